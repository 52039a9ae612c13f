"""The key of a host: one command shows it, and nothing else does."""

import base64
import io
import logging
import shlex
import ssl
import sys

import pytest

from tests.unit.multi_node.test_connections import join as say_hello
from xdit_backend.__main__ import make_parser
from xdit_backend.multi_node import join, listener, tls_keys
from xdit_backend.multi_node.listener import Listener
from xdit_backend.multi_node.tls_keys import identity, key_folder, read_key
from xdit_backend.protocol.errors import ConfigError, WorkerStartError


@pytest.fixture
def host(tmp_path):
    host = Listener("127.0.0.1:0", tmp_path / "user folder" / "xdit" / "machines")
    yield host
    host.close()


def run(*words):
    options = make_parser().parse_args(words)
    options.run(options)


def shown(capsys):
    """(commands, key) that `key` has printed."""
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    return lines[:-1], read_key(lines[-1])


def test_the_command_that_errors_name_shows_the_key_and_what_to_run(host, monkeypatch, capsys):
    monkeypatch.setenv("XDIT_JOIN_TIMEOUT_S", "0")
    for name in ("one", "two"):
        with pytest.raises(WorkerStartError) as error:
            host.take(name)

    command = next(line for line in str(error.value).splitlines() if line.startswith("python"))
    python, m, package, *words = shlex.split(command)
    assert (python, m, package, words[0], words[-1]) == ("python", "-m", "xdit_backend", "key", "two")
    run(*words)
    joins = [f"python -m xdit_backend join 127.0.0.1:{host.port} {name}" for name in ("one", "two")]
    assert shown(capsys) == (joins[1:], host._key)
    run(*words[:-1])                                           # all that it has waited for
    assert shown(capsys) == (joins, host._key)


def test_nothing_else_shows_the_key(host, tmp_path, monkeypatch, capsys, caplog):
    """Errors, phases and logs, which ComfyUI keeps in /history and shows at /internal/logs; and files."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("XDIT_JOIN_TIMEOUT_S", "0")
    monkeypatch.setenv("XDIT_LOG_FOLDER", str(tmp_path / "logs"))
    told = []
    for ask in (host.take, host.gpus):
        with pytest.raises(WorkerStartError) as error:
            ask("absent", told.append)
        told.append(str(error.value))
    say_hello(host, versions={})                               # refused, which the doctor knows
    told += [caplog.text, capsys.readouterr().out, repr(host._key), repr(vars(host))]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o077 == 0, path
            told += [path.read_bytes().decode("latin-1")] if path.name != "secret" else []

    secret = host._key.secret
    for text in told:
        for form in (host._key.text, host._key.text[-22:], secret.decode("latin-1"), secret.hex(), repr(secret),
                     base64.b64encode(secret).decode().rstrip("=")):
            assert form not in text, text
    assert any("absent" in text for text in told) and len(told) > 8


def test_the_key_of_the_usual_folder_needs_no_option(tmp_path, monkeypatch, capsys):
    (tmp_path / "comfy" / "ldm").mkdir(parents=True)
    monkeypatch.setattr(listener, "PACK", tmp_path / "custom_nodes" / "xdit")
    monkeypatch.setenv("XDIT_COMFYUI", str(tmp_path))
    monkeypatch.delitem(sys.modules, "comfy", raising=False)
    host = Listener("127.0.0.1:0", key_folder(tmp_path))
    host.close()

    assert host.key_command("other-pc") == "python -m xdit_backend key other-pc"
    run("key", "other-pc")
    assert shown(capsys) == ([f"python -m xdit_backend join 127.0.0.1:{host.port} other-pc"], host._key)


def test_without_a_key_the_command_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "comfy", raising=False)
    monkeypatch.setenv("XDIT_COMFYUI", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="^Add --folder and the folder of the key.*XDIT_COMFYUI is not set"):
        run("key", "other-pc")
    with pytest.raises(ConfigError, match=f"^Queue a prompt .* {tmp_path} has no key.*--user-directory"):
        run("key", "other-pc", "--folder", str(tmp_path))
    identity(tmp_path / "key")                                 # but nothing has listened
    with pytest.raises(ConfigError, match="^Queue a prompt"):
        run("key", "other-pc", "--folder", str(tmp_path / "key"))


def test_names_that_no_machine_has_are_rejected(host):
    with pytest.raises(ConfigError, match='^Use small letters, digits, dots and hyphens.*"Other PC" is not'):
        run("key", "Other PC", "--folder", str(host._folder))
    with pytest.raises(ConfigError, match="^Name the machine to join"):
        run("key", "--folder", str(host._folder))


@pytest.mark.parametrize("way", ["argument", "standard input", "terminal"])
def test_join_takes_the_key_from_its_command_or_asks_for_it(host, tmp_path, monkeypatch, way):
    given, text = [], host._key.text
    monkeypatch.setattr(join, "_keep_joining", lambda address, key, *others: given.append((address, key)))
    monkeypatch.setattr(join.signal, "signal", lambda *arguments: None)
    monkeypatch.setattr(join.getpass, "getpass", lambda words: f" {text} " if way == "terminal" else "none")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{text}\n" if way == "standard input" else ""))
    monkeypatch.setattr(join.sys.stdin, "isatty", lambda: way == "terminal", raising=False)

    run("join", f"127.0.0.1:{host.port}", "other-pc", *([text] if way == "argument" else []), "--models", str(tmp_path))

    assert given == [(("127.0.0.1", host.port), host._key)]


def test_join_without_a_key_says_where_it_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match="^Copy the whole key again.*xdit_backend key shows it.* 0 characters"):
        run("join", "127.0.0.1:1", "other-pc", "--models", str(tmp_path))


def test_without_openssl_the_package_cryptography_makes_the_certificate(tmp_path, monkeypatch):
    pytest.importorskip("cryptography")
    monkeypatch.setattr(tls_keys.shutil, "which", lambda name: None)

    key = identity(tmp_path / "machines")
    context = tls_keys.server_context(tmp_path / "machines")

    assert identity(tmp_path / "machines") == key and context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_without_both_the_error_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(tls_keys.shutil, "which", lambda name: None)
    monkeypatch.setitem(sys.modules, "cryptography", None)

    with pytest.raises(ConfigError, match="^Install openssl, .* or on Windows the package cryptography"):
        identity(tmp_path / "machines")
