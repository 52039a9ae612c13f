"""Between machines: who holds the key is let in and nobody else, and what is no message harms nobody."""

import contextlib
import errno
import hashlib
import secrets
import socket
import ssl
import struct
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from xdit_backend.host import logs
from xdit_backend.multi_node import connections, segment_transfer
from xdit_backend.multi_node.connections import (
    HEADER,
    MACHINE,
    Find,
    JoinAccepted,
    JoinRequest,
    Link,
    Missing,
    Piece,
    Ping,
    Refused,
    Searching,
    Tensor,
    connect,
)
from xdit_backend.multi_node.file_digest import Contents
from xdit_backend.multi_node.join import Joined
from xdit_backend.multi_node.listener import Listener, interface_of, read_address, version_differences, versions
from xdit_backend.multi_node.node_session import MAX_ANSWERS, Session, wait_for
from xdit_backend.multi_node.tls_keys import SECRET_BYTES, Key, identity, read_key
from xdit_backend.protocol import channel, messages, specs
from xdit_backend.protocol.errors import ChannelClosedError, ConfigError, WorkerStartError, XDiTError
from xdit_backend.protocol.shared_memory import Segment, SegmentStore
from xdit_backend.protocol.validation import MAX_REASON

CARDS = {"cpu": ("a processor", 1e9)}


@pytest.fixture
def pair(listener):
    """Two ends of one connection over TLS: (the host's, the other's)."""
    server = socket.create_server(("127.0.0.1", 0))
    made = []

    def welcome():
        link = connections.accepted(server.accept()[0], listener._context)
        connections.authenticate(link, listener._key.secret)
        link.set_silence_limit(60)
        made.append(link)
    thread = threading.Thread(target=welcome)
    thread.start()
    other = connect(server.getsockname(), listener._key)
    thread.join()
    yield made[0], other
    for link in (*made, other):
        link.close()
    server.close()


def join(listener, key=None, **hello):
    """(link, answer) of who says Hello so."""
    link = connect((listener.address, listener.port), key or listener._key)
    link.send(JoinRequest(**{"purpose": "machine", "name": "other", "versions": versions(), "gpus": CARDS} | hello))
    return link, link.receive()[1]


def test_a_machine_with_the_key_joins_and_is_known_by_its_name(listener):
    commands, welcome = join(listener)
    replies, _ = join(listener, purpose="replies", session=welcome.session)

    assert isinstance(welcome, JoinAccepted) and listener.gpus("other") == CARDS and listener.joined() == ["other"]
    session = listener.take("other")
    assert session.is_open and session.name == "other"
    session.close()
    assert listener.joined() == []
    with pytest.raises(ChannelClosedError):
        while True:                                            # what was sent before
            commands.receive()


def test_heartbeats_that_nobody_reads_do_not_stop_a_session(listener):
    """ComfyUI may compute for minutes on its own while workers are at a command."""
    _, welcome = join(listener, name="busy")
    replies, _ = join(listener, purpose="replies", session=welcome.session)
    wait_for(lambda: "busy" in listener.joined() or None, time.monotonic() + 60, lambda: None)
    session = listener.take("busy")
    near, session._inner[1] = channel.pair()
    replies.set_silence_limit(10)

    for _ in range(5000):                                      # of almost three hours
        replies.send(messages.Heartbeat(1, 7, 0, False), rank=1)
    replies.send(messages.Phase(1, "computing"), rank=1)
    received = [near.receive()]
    while not isinstance(received[-1], messages.Phase):
        received.append(near.receive())

    assert session.is_open and 0 < received.count(messages.Heartbeat(1, 7, 0, False)) < 5000
    session.close()


def test_another_secret_is_refused_before_anything_is_parsed(listener, monkeypatch):
    parsed = []
    monkeypatch.setattr(connections, "decode", lambda *arguments: parsed.append(arguments))
    wrong = Key(listener._key.fingerprint, bytes(SECRET_BYTES))

    with pytest.raises(ChannelClosedError):
        join(listener, wrong)

    assert not parsed and listener.joined() == []


def test_another_certificate_is_told_nothing(listener):
    """As where another machine has taken the host's address: the secret must not reach it."""
    key = Key(hashlib.sha256(b"another").digest(), listener._key.secret)
    reached = []
    server = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listener._context.wrap_socket(server.accept()[0], server_side=True) as secure:
            reached.append(secure.recv(1))
    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ConfigError, match="is not the one of this key"):
        connect(server.getsockname(), key)
    thread.join()
    server.close()

    assert reached == [b""]


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"\x16\x03\x01\xff\xff" + b"\0" * 50])
def test_strangers_without_tls_are_turned_away(listener, said):
    with socket.create_connection((listener.address, listener.port)) as stranger:
        stranger.settimeout(60)
        with contextlib.suppress(OSError):                     # it may be turned away before all is said
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while stranger.recv(1000):
                pass

    assert join(listener)[1].session                           # who comes next is let in


def test_older_tls_is_refused(listener):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode, context.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with socket.create_connection((listener.address, listener.port)) as connected, pytest.raises(OSError):
        context.wrap_socket(connected)


@pytest.mark.parametrize("frame", [
    struct.pack("!iI", MACHINE, 2 ** 32 - 1), struct.pack("!iI", -2, 10) + b"Ping {}   ",
    HEADER.pack(MACHINE, 5) + b"Pong ", HEADER.pack(MACHINE, 7) + b"Stop {}", HEADER.pack(0, 7) + b"Ping {}",
    HEADER.pack(MACHINE, 42) + b'Piece {"path":"a","start":0,"num_bytes":0}',
    HEADER.pack(0, 17) + b'Stop {"request":0', HEADER.pack(MACHINE, 4) + b"\xff\xfe\0\0"], ids=range(8))
def test_what_is_no_message_ends_the_connection(pair, frame):
    host, other = pair

    other.raw.sendall(frame)
    with pytest.raises(ChannelClosedError):
        host.receive()
    with pytest.raises(ChannelClosedError):
        host.receive()


@pytest.mark.parametrize("message", [
    Piece("path", 0, connections.CHUNK_BYTES), messages.Stop()], ids=lambda message: type(message).__name__)
def test_messages_arrive_as_they_were_sent(pair, message):
    host, other = pair
    rank = 3 if isinstance(message, messages.Stop) else MACHINE

    other.send(message, rank)

    assert host.receive() == (rank, message)


def test_each_part_of_a_large_piece_has_its_own_time_to_pass(pair):
    """A network that takes longer for a whole piece than silence may last is slow, and not gone."""
    host, other = pair
    content, sent, send = bytes(range(256)) * 4096, [], other.raw.sendall
    other.raw.sendall = lambda part: (sent.append(len(part)), send(part))
    thread = threading.Thread(target=other.send, args=(Piece("path", 0, len(content)),), kwargs={"content": content})
    thread.start()

    assert host.receive() == (MACHINE, Piece("path", 0, len(content))) and host.read(len(content)) == content
    thread.join()
    assert max(sent) <= connections.SEND_BYTES


def test_too_large_a_piece_is_no_message():
    with pytest.raises(ValueError):
        Piece("path", 0, connections.CHUNK_BYTES + 1)
    with pytest.raises(ValueError):
        Tensor(Segment("path", "float32", (2 ** 60,)))


def test_a_host_that_says_nothing_counts_as_gone(pair):
    host, other = pair
    host.set_silence_limit(0.2)

    with pytest.raises(ChannelClosedError, match="the connection timed out"):
        host.receive()


def test_pings_are_signs_of_life(pair, monkeypatch):
    monkeypatch.setattr(connections, "PINGS", 1000)
    host, other = pair
    is_over = threading.Event()
    thread = threading.Thread(target=connections.ping, args=(other, is_over))
    thread.start()

    assert [host.receive() for _ in range(3)] == [(MACHINE, Ping())] * 3
    is_over.set()
    thread.join()


def test_what_a_machine_lacks_is_refused_by_name(listener):
    for changed, words in (({"torch": "1.0"}, "torch is 1.0 there"),
                           ({"the xDiT nodes": "0"}, "the xDiT nodes is 0 there")):
        _, answer = join(listener, versions=versions() | changed)
        assert isinstance(answer, Refused) and words in answer.reason
    assert version_differences({}, {"torch": "2"}).startswith("torch is not installed there and 2 here")


def test_the_doctor_knows_of_machines_that_joined_were_refused_and_left(listener):
    def told():
        return [line for line in logs.machines() if line.startswith("fourth ")]

    join(listener, name="fourth", versions=versions() | {"torch": "1.0"})
    assert told() == [f"fourth rejected: torch is 1.0 there and {versions()['torch']} here. Install the same on both "
                      f"machines."]
    _, welcome = join(listener, name="fourth")
    replies, _ = join(listener, name="fourth", purpose="replies", session=welcome.session)
    wait_for(lambda: "fourth" in listener.joined() or None, time.monotonic() + 60, lambda: None)
    session = listener.take("fourth")
    assert told() == ["fourth in use: cpu a processor, 0.9 GiB"]
    session.close("someone in /home/someone/secret switched it off")
    assert told() == ["fourth gone: someone in .../secret switched it off"]


def test_the_doctor_knows_of_machines_while_their_file_is_written(monkeypatch, tmp_path):
    monkeypatch.setenv("XDIT_LOG_FOLDER", str(tmp_path / "logs"))
    note_machines, is_over = logs.note_machines, threading.Event()
    # the listener of other tests, which runs on, tells its own
    monkeypatch.setattr(logs, "note_machines", lambda lines: None)
    note_machines(["other joined"])

    def write():
        while not is_over.is_set():
            note_machines(["other joined"])
    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    read = {tuple(logs.machines()) for _ in range(2000)}
    is_over.set()
    for thread in threads:
        thread.join()

    assert read == {("other joined",)} and len(list((tmp_path / "logs").iterdir())) == 1


def test_a_listener_that_is_closed_says_nothing_of_machines_any_more(listener, tmp_path, monkeypatch):
    """Another may have followed, at another address."""
    first, noted = Listener("127.0.0.1:0", tmp_path / "key"), []
    monkeypatch.setattr(logs, "note_machines", noted.append)
    first.close()
    assert noted == [[]]

    first._note_machines()                                     # as its thread does that has let in a machine meanwhile

    assert noted == [[]]


def test_the_doctor_knows_of_no_machine_of_a_host_that_has_ended(monkeypatch, tmp_path):
    monkeypatch.setenv("XDIT_LOG_FOLDER", str(tmp_path / "logs"))
    note_machines = logs.note_machines
    # the listener of other tests, which runs on, tells its own
    monkeypatch.setattr(logs, "note_machines", lambda lines: None)
    note_machines(["other joined"])
    own, = (tmp_path / "logs").iterdir()
    assert logs.machines() == ["other joined"] and own.stat().st_mode & 0o077 == 0
    ended = subprocess.Popen(["true"])
    ended.wait()
    own.rename(tmp_path / "logs" / logs.MACHINES.format(ended.pid))
    (tmp_path / "logs" / logs.MACHINES.format(f"{ended.pid}.{ended.pid}")).touch()         # it was at writing

    assert logs.machines() == [] and not list((tmp_path / "logs").iterdir())


def test_a_session_of_another_is_not_taken_over(listener):
    commands, welcome = join(listener, name="third")
    for purpose, session in (("replies", "0" * 32), ("replies", "")):
        assert isinstance(join(listener, purpose=purpose, session=session)[1], Refused), purpose


@pytest.mark.parametrize("rank", [0, 2])
def test_a_machine_answers_for_its_own_ranks_only(listener, rank):
    _, welcome = join(listener, name="liar")
    replies, _ = join(listener, purpose="replies", session=welcome.session)
    wait_for(lambda: "liar" in listener.joined() or None, time.monotonic() + 60, lambda: None)
    session = listener.take("liar")
    near, session._inner[1] = channel.pair()

    replies.send(messages.Phase(rank, "computing"), rank=1)    # by its own channel, in the name of another

    with pytest.raises(ChannelClosedError):
        near.receive()
    assert not session.is_open


@pytest.mark.parametrize("fields", [
    b'Hello {"purpose": "replies", "session": "\xc3\xa9"}', b'Hello {"purpose": "replies", "session": "0"}',
    b'Find {"path": "/models/a", "content": "many-00"}', b'Find {"path": "/models/a", "content": ""}',
    b'Find {"path": "/models/a", "content": "' + b"9" * 5000 + b"-" + b"0" * 64 + b'"}'],
                         ids=lambda raw: repr(raw[:50]))
def test_sessions_and_contents_that_are_none_are_no_messages(pair, fields):
    """Else the thread that compares them raises."""
    host, other = pair
    other.raw.sendall(HEADER.pack(MACHINE, len(fields)) + fields)

    with pytest.raises(ChannelClosedError, match="Invalid message"):
        host.receive()


def test_answers_that_nobody_asked_for_are_dropped(listener):
    """A machine that sends them by the thousand fills no memory, and the answer that is asked for is still found."""
    commands, welcome = join(listener, name="other")
    replies, _ = join(listener, purpose="replies", session=welcome.session)
    session = listener.take("other")
    for number in range(300):
        replies.send(connections.Missing(f"/models/{number}", "x" * 500_000))
        replies.send(connections.Searching(number, 300))

    def answer():
        while not isinstance(commands.receive()[1], connections.Find):
            pass
        for number in range(300):
            replies.send(connections.Searching(number, 300))
            replies.send(connections.Missing(f"/models/{number}", "x"))
        replies.send(connections.Found("/models/a"))
        replies.send(connections.Missing("/models/a", "too late"))
    threading.Thread(target=answer, daemon=True).start()
    session.find("/models/a", f"1-{'0' * 64}", lambda: None, lambda done, total: None)
    replies.send(connections.Ping())

    assert wait_for(lambda: session._answers.qsize() <= MAX_ANSWERS or None, time.monotonic() + 5, lambda: None)
    assert len(connections.Missing("/models/a", "x" * 500_000).reason) == MAX_REASON


def test_a_machine_that_does_not_come_is_asked_for_by_the_command(listener, monkeypatch):
    monkeypatch.setenv("XDIT_JOIN_TIMEOUT_S", "0.1")
    told = []

    with pytest.raises(WorkerStartError) as error:
        listener.take("absent", told.append)

    command = listener.key_command("absent")
    assert command in str(error.value) and command in told[0] and "has not joined after 0 s" in str(error.value)


def test_a_person_can_give_up_waiting(listener):
    def check():
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        listener.take("absent", check=check)


def test_the_key_stays_and_is_private(listener, tmp_path):
    first = Listener("127.0.0.1:0", tmp_path / "key")
    first.close()
    again = Listener("127.0.0.1:0", tmp_path / "key")
    again.close()

    assert first._key == again._key != listener._key
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in (tmp_path / "key").iterdir())


def test_a_secret_that_was_not_written_whole_is_none(tmp_path, monkeypatch):
    def full(num_bytes):
        raise OSError(errno.ENOSPC, "No space left on device")
    folder = tmp_path / "key"
    with monkeypatch.context() as patched:
        patched.setattr(secrets, "token_bytes", full)
        with pytest.raises(ConfigError, match=f"^Allow this user to write to {folder}, .*No space left on "
                                              f"device"):
            identity(folder)

    assert len(identity(folder).secret) == SECRET_BYTES


@pytest.mark.parametrize("address", ["", "0.0.0.0", "all", "10.0.0.1:x", "10.0.0.1:70000", "10.1", "::"])
def test_addresses_that_are_none_are_refused(address):
    with pytest.raises(ConfigError, match="^Give one address of this machine"):
        read_address(address)


def test_an_address_of_another_machine_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="^Set one of .* other machines cannot join at 192"):
        Listener("192.0.2.1", tmp_path)                        # of a network for documentation
    with pytest.raises(WorkerStartError, match="no network interface"):
        interface_of("192.0.2.1")
    assert interface_of("127.0.0.2") == interface_of("127.0.0.1")


@pytest.mark.parametrize("text", ["", "short", "é" * 64, "A" * 63, "A" * 68])
def test_keys_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="^Copy the whole key again, which has 64 characters"):
        read_key(text)


# --- tensors ---

@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.uint8, torch.float8_e4m3fn],
                         ids=str)
def test_tensors_arrive_by_their_bits(pair, dtype):
    """Those that several machines write a part of each too: what one has not written stays as the other has it."""
    host, other = pair
    store = SegmentStore()
    try:
        shape, generator = (3, 700, 300), torch.Generator().manual_seed(0)
        whole = (torch.randn(shape, generator=generator) * (torch.arange(3) != 1).view(3, 1, 1)).to(dtype)
        theirs, view = store.create(shape, dtype)
        ours, there = store.create(shape, dtype)
        view[1:] = whole[1:]
        there[0] = whole[0]
        thread = threading.Thread(target=lambda: (segment_transfer.send(other, "path", theirs), other.send(Ping())))
        thread.start()
        pieces = 0
        while isinstance(message := host.receive()[1], Piece):
            segment_transfer.receive(host, message, ours)
            pieces += 1
        thread.join()

        bits = {1: torch.uint8, 2: torch.int16, 8: torch.int64}[whole.element_size()]
        assert torch.equal(there.view(bits), whole.view(bits))
        assert 0 < pieces * connections.CHUNK_BYTES < view.nbytes + 2 * connections.CHUNK_BYTES
    finally:
        store.close()


def test_pieces_outside_of_a_tensor_are_refused(pair):
    host, other = pair
    store = SegmentStore()
    try:
        segment, view = store.create((4,), torch.float32)
        other.send(Piece("path", 8, 16), content=b"\1" * 16)
        _, piece = host.receive()
        with pytest.raises(XDiTError, match="outside of a tensor of 16 bytes"):
            segment_transfer.receive(host, piece, segment)
        assert not view.any()
    finally:
        store.close()


def test_commands_name_all_their_segments():
    one, two, three, four = (Segment(f"/dev/shm/x/{name}", "float32", (1,)) for name in "1234")
    branch = specs.Branch(one, two, "c", three, {"a": two}, scores=one, parts={"audio": four})
    command = messages.Predict(1, "m", specs.Layout(), [branch])

    assert [(segment.path[-1], is_result) for segment, is_result in segment_transfer.segments_of(command)] == [
        ("1", False), ("2", False), ("3", True), ("2", False), ("1", True), ("4", True)]
    moved = segment_transfer.replaced(command,
                                      lambda segment: Segment("here" + segment.path, segment.dtype, segment.shape))
    assert all(segment.path.startswith("here") for segment, _ in segment_transfer.segments_of(moved))
    assert moved.branches[0].conditioning == "c" and segment_transfer.replaced(command,
                                                                               lambda segment: segment) is command
    for requested in (messages.Decode(1, "v", one, two), messages.Encode(1, "v", one, two)):
        pending_command = segment_transfer.pending_command(requested, (2, 3))
        assert pending_command == segment_transfer.PendingCommand({2, 3}, {one.path: one, two.path: two}, [two.path])


# --- files ---

def test_files_are_found_by_content(tmp_path):
    contents, folder = Contents(), tmp_path / "there"
    (folder / "sub").mkdir(parents=True)
    here = tmp_path / "model.safetensors"
    here.write_bytes(b"content")
    content = contents.of(here)

    assert contents.find("model.safetensors", content, [folder]) is None
    (folder / "model.safetensors").write_bytes(b"another")     # of the same size and name
    assert contents.find("model.safetensors", content, [folder]) is None
    (folder / "sub" / "renamed.safetensors").write_bytes(b"content")
    assert contents.find("model.safetensors", content, [folder]) == str(folder / "sub" / "renamed.safetensors")


def test_a_file_that_changes_has_another_content(tmp_path):
    contents, path, read = Contents(), tmp_path / "model.gguf", []
    path.write_bytes(b"content")
    first = contents.of(path, lambda done, total: read.append((done, total)))
    again = contents.of(path, lambda done, total: read.append((done, total)))
    path.write_bytes(b"others!")
    time.sleep(0.01)
    path.touch()

    assert first == again == f"7-{hashlib.sha256(b'content').hexdigest()}" and read == [(7, 7)]
    assert contents.of(path) == f"7-{hashlib.sha256(b'others!').hexdigest()}"


def test_a_host_opens_no_file_of_a_joined_machine_by_its_path(tmp_path):
    """Only files below the folders that were named there, after it has asked for them by their content."""
    (tmp_path / "models").mkdir()
    private, public = tmp_path / "private.safetensors", tmp_path / "models" / "a.safetensors"
    for path in (private, public):
        save_file({"weight": torch.full((2,), float(path == private))}, path)
    answers, joined = [], Joined(("127.0.0.1", 1), None, "other", [tmp_path / "models"], Contents(), None)
    joined.replies = SimpleNamespace(send=answers.append)

    def load(path):
        return joined._localised(messages.LoadModel(1, specs.ModelSpec("a", "Flux.1", str(path), "float32", "float32")))
    joined._find(Find(str(private), Contents().of(private)))
    assert [type(answer) for answer in answers if not isinstance(answer, Searching)] == [Missing]
    for path in (private, public, "/etc/passwd"):
        with pytest.raises(KeyError):
            load(path)

    joined._find(Find("/on/the/host/b.safetensors", Contents().of(public)))
    assert load("/on/the/host/b.safetensors").spec.path == str(public)


def test_of_a_folder_what_is_read_counts(tmp_path):
    contents = Contents()
    for name in ("one", "two"):
        (tmp_path / name / "transformer").mkdir(parents=True)
        (tmp_path / name / "transformer" / "config.json").write_text("{}")
        (tmp_path / name / "transformer" / "a.safetensors").write_bytes(b"weights")
        (tmp_path / name / "readme.md").write_text(name)

    assert contents.of(tmp_path / "one") == contents.of(tmp_path / "two")
    assert contents.find("other", contents.of(tmp_path / "one"),
                         [tmp_path]) in (str(tmp_path / "one"), str(tmp_path / "two"))
    (tmp_path / "two" / "transformer" / "config.json").write_text('{"a": 1}')
    assert contents.of(tmp_path / "one") != contents.of(tmp_path / "two")


def test_a_link_may_be_closed_twice_and_while_another_waits(pair):
    host, other = pair
    outcome = []

    def wait():
        try:
            host.receive()
        except ChannelClosedError as error:
            outcome.append(error)
    thread = threading.Thread(target=wait)
    thread.start()
    host.close()
    host.close()
    thread.join(60)

    assert len(outcome) == 1 and isinstance(host, Link)


def test_a_machine_lost_while_the_host_starts_its_own_workers_closes_its_session(pair, tmp_path):
    """Its session may time out before the workers of that machine are started."""
    session = Session("other-pc", b"token", CARDS, pair[0])
    session.close("the connection timed out")

    channels = session.start(("cpu", "other-pc/cpu"), tmp_path / "store", {})

    assert list(channels) == [1] and not session.is_open and session.ended == "the connection timed out"
    with pytest.raises(ChannelClosedError):
        channels[1].receive()
