"""The key that a person copies from the host to a machine that joins, and the certificate that it belongs to. Used by
connections.py, the listener and join."""

import base64
import hashlib
import os
import secrets
import ssl
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from ..protocol.errors import ConfigError

SECRET_BYTES, FINGERPRINT_BYTES = 16, 32
CERTIFICATE, PRIVATE_KEY, SECRET = "certificate.pem", "private-key.pem", "secret"


@dataclass(frozen=True)
class Key:
    """What a machine needs to join: by it the host is known, and the host knows it."""

    fingerprint: bytes             # SHA-256 of the host's certificate
    secret: bytes = field(repr=False)                          # so that it is in no traceback or log

    @property
    def text(self):
        return base64.urlsafe_b64encode(self.fingerprint + self.secret).decode()


def read_key(text):
    """The Key that a user has pasted. Raises ConfigError for other text."""
    try:
        raw = base64.urlsafe_b64decode(text)
    except ValueError:
        raw = b""
    if len(raw) != FINGERPRINT_BYTES + SECRET_BYTES:
        raise ConfigError(f"Copy the whole key again, which has 64 characters: python -m xdit_backend key shows it on "
                          f"the machine with ComfyUI. {len(text)} characters were given, which are not a key.")
    return Key(raw[:FINGERPRINT_BYTES], raw[FINGERPRINT_BYTES:])


def key_folder(comfyui):
    """The folder of the key in that of ComfyUI, with its usual user folder."""
    return Path(comfyui) / "user" / "xdit" / "machines"


def identity(folder):
    """The host's Key, with its certificate and secret in a private folder; made where there is none.
    Raises ConfigError without openssl."""
    folder = Path(folder)
    try:
        return _identity(folder)
    except OSError as error:
        raise ConfigError(f"Give this user room in {folder}, and leave to write there: the key by which other "
                          f"machines join cannot be kept ({error}).") from error


def _identity(folder):
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    if not all((folder / name).is_file() for name in (CERTIFICATE, PRIVATE_KEY, SECRET)):
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                   "-days", "36500",
                   "-subj", "/CN=xdit", "-keyout", str(folder / PRIVATE_KEY), "-out", str(folder / CERTIFICATE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, umask=0o077)
        except FileNotFoundError:
            raise ConfigError("Install openssl, such as with apt install openssl, which makes the certificate for "
                              "other machines: they join over TLS, and it is not here.") from None
        except (subprocess.SubprocessError, OSError) as error:
            raise ConfigError(f"openssl could not make a certificate for other machines to join: "
                              f"{getattr(error, 'stderr', None) or error}") from error
        # on a full disk it ends up shorter, and would be a key that others know
        unfinished = folder / f"{SECRET}.new"
        with open(unfinished, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        unfinished.replace(folder / SECRET)
    return _read(folder)


def read_identity(folder):
    """The Key of a folder; None: none was made there. Raises ConfigError where this user may not read it."""
    try:
        return _read(Path(folder))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"Run this as the user who runs ComfyUI: the key in {folder} cannot be read "
                          f"({error}).") from error


def _read(folder):
    certificate = ssl.PEM_cert_to_DER_cert((folder / CERTIFICATE).read_text())
    return Key(hashlib.sha256(certificate).digest(), (folder / SECRET).read_bytes())


def server_context(folder):
    """What the host meets others with, of the folder of its `identity`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(Path(folder) / CERTIFICATE, Path(folder) / PRIVATE_KEY)
    context.num_tickets = 0                                    # who only sends would never read them
    return context
