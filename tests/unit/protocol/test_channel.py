"""Connections: authenticated, private, and clear about the other end."""

import multiprocessing.connection as connection
import os
import struct
import threading
import time

import pytest

from tests.programs.malformed import dial, receive_frames, write
from xdit_backend import system
from xdit_backend.protocol import channel
from xdit_backend.protocol.channel import ADDRESS_FILE, KEY_FILE, ChannelListener, connect
from xdit_backend.protocol.errors import ChannelClosedError, XDiTError
from xdit_backend.protocol.messages import DropConditioning, Phase, Stop


@pytest.fixture
def channel_listener(tmp_path):
    channel_listener = ChannelListener(tmp_path)
    yield channel_listener
    channel_listener.close()


def accept_while(channel_listener, act):
    """(what door.accept returned, what act returned or raised)"""
    result = {}

    def run():
        try:
            result["act"] = act()
        except Exception as error:
            result["act"] = error
    thread = threading.Thread(target=run)
    thread.start()
    channel = channel_listener.accept(5)
    thread.join()
    return channel, result["act"]


def test_messages_go_both_ways(channel_listener, tmp_path):
    host, worker = accept_while(channel_listener, lambda: connect(tmp_path))

    host.send(Stop())
    worker.send(Phase(1, "loading weights", 1, 2))

    assert worker.receive() == Stop() and host.receive() == Phase(1, "loading weights", 1, 2)


def test_who_lacks_the_key_is_not_let_in(channel_listener, tmp_path):
    address = (tmp_path / ADDRESS_FILE).read_text()

    channel, outcome = accept_while(channel_listener, lambda: system.connect(address, b"guessed"))

    assert channel is None and isinstance(outcome, connection.AuthenticationError)


def test_the_door_stays_open_after_a_stranger(channel_listener, tmp_path):
    address = (tmp_path / ADDRESS_FILE).read_text()
    accept_while(channel_listener, lambda: system.connect(address, b"guessed"))

    channel, _ = accept_while(channel_listener, lambda: connect(tmp_path))

    assert channel is not None


def test_the_key_is_for_this_user_only(channel_listener, tmp_path):
    assert os.stat(tmp_path / KEY_FILE).st_mode & 0o077 == 0


def test_nobody_comes(channel_listener):
    assert channel_listener.accept(0.01) is None


def test_a_closed_end_is_named(channel_listener, tmp_path):
    host, worker = accept_while(channel_listener, lambda: connect(tmp_path))

    worker.close()

    with pytest.raises(ChannelClosedError):
        host.receive()
    with pytest.raises(ChannelClosedError):
        host.send(Stop())
        host.send(Stop())


@pytest.mark.parametrize("raw", [
    struct.pack("!i", 100) + b"Stop {",                        # a frame that breaks off
    struct.pack("!i", 2 ** 31 - 1) + b"Stop {}",               # absurd sizes
    struct.pack("!iQ", -1, 2 ** 62) + b"Stop {}",
    struct.pack("!i", 9) + b"Stop {}  " + struct.pack("!i", 7) + b"Exec {}",
    struct.pack("!i", 0)], ids=repr)
def test_what_is_no_message_ends_the_connection_and_nothing_else(channel_listener, tmp_path, raw):
    host, stranger = accept_while(channel_listener, lambda: connect(tmp_path))
    write(stranger, raw)
    stranger.raw.close()

    with pytest.raises(ChannelClosedError):
        assert host.receive() == Stop()
        host.receive()
    with pytest.raises(ChannelClosedError):                    # TCP notices with a later message
        for _ in range(1000):
            host.send(Stop())
            time.sleep(0.01)
    following, worker = accept_while(channel_listener, lambda: connect(tmp_path))
    worker.send(Stop())
    assert following.receive() == Stop()


def test_no_message_is_too_long_to_be_received(channel_listener, tmp_path):
    host, worker = accept_while(channel_listener, lambda: connect(tmp_path))

    with pytest.raises(XDiTError, match="exceeds a connection's limit"):
        host.send(DropConditioning(1, ["c" * 2048] * 2 ** 14))
    host.send(Stop())

    assert worker.receive() == Stop()


def test_frames_of_any_bytes_are_refused_or_are_messages_within_ten_times_the_hosts_patience():
    # of which two are parts of a frame whose rest does not come
    outcomes = receive_frames(3, 200)

    assert outcomes["refused"] > 100 and outcomes["messages, then refused"] > 10


def test_a_stranger_who_says_nothing_does_not_keep_others_out(channel_listener, tmp_path, monkeypatch):
    with dial((tmp_path / ADDRESS_FILE).read_text()):
        with monkeypatch.context() as patched:                 # who is let in may take its time
            patched.setattr(channel, "HANDSHAKE_S", 0.2)
            assert channel_listener.accept(5) is None

        let_in, _ = accept_while(channel_listener, lambda: connect(tmp_path))

    assert let_in is not None


def test_the_limit_is_for_the_rest_of_a_message_and_not_for_the_wait_until_the_next(tmp_path):
    """A worker without work says nothing for hours."""
    channel_listener = ChannelListener(tmp_path, timeout_s=0.2)
    host, worker = accept_while(channel_listener, lambda: connect(tmp_path))

    sending = threading.Timer(1.0, worker.send, (Stop(),))
    sending.start()
    assert host.receive() == Stop()
    sending.join()
    write(worker, struct.pack("!i", 100) + b"Stop {")
    with pytest.raises(ChannelClosedError):
        host.receive()
    host.close()
    channel_listener.close()


def test_a_pair_has_room_until_it_is_full_and_wakes_up_when_it_is_ended():
    near, far = channel.pair()
    outcome = []

    def fill_and_wait():
        try:
            while True:
                near.send(Stop())
        except ChannelClosedError as error:
            outcome.append(error)
    assert near.has_capacity
    waiting = threading.Thread(target=fill_and_wait)
    waiting.start()
    while near.has_capacity:
        waiting.join(0.01)
    assert far.receive() == Stop() and not outcome
    far.end()
    waiting.join(60)

    assert len(outcome) == 1


def test_who_takes_no_messages_counts_as_gone(tmp_path):
    """A worker that was stopped: what it does not read fills the connection."""
    channel_listener = ChannelListener(tmp_path, timeout_s=0.3)
    host, _worker = accept_while(channel_listener, lambda: connect(tmp_path))

    with pytest.raises(ChannelClosedError, match="accepts no data"):
        for _ in range(10_000):                                # a socket of TCP takes some megabytes
            host.send(DropConditioning(1, ["conditioning"] * 1000))
    host.close()
    channel_listener.close()
