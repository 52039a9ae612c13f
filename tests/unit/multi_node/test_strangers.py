"""Who does not hold the key cannot keep out a machine that does."""

import contextlib
import socket
import ssl
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.unit.multi_node.test_connections import join
from xdit_backend.multi_node import connections as links
from xdit_backend.multi_node import pending
from xdit_backend.multi_node.connections import JoinAccepted
from xdit_backend.multi_node.listener import Listener
from xdit_backend.multi_node.node_session import wait_for
from xdit_backend.multi_node.pending import (
    MAX_SERVED,
    MAX_SERVED_PER_ADDRESS,
    MAX_WAITING,
    MAX_WAITING_PER_ADDRESS,
    TURN_S,
    Pending,
)
from xdit_backend.protocol.errors import ChannelClosedError

PATIENCE_S = 10.0
LOADS = {"one address": ["127.0.0.1"] * 40, "an address each": [f"127.0.0.{index}" for index in range(10, 90)],
         "several addresses": [f"127.0.0.{10 + index % 4}" for index in range(80)]}


@contextlib.contextmanager
def strangers(host, sources, interval_s=1.0):
    """Slow strangers from these addresses, in a process of their own."""
    process = subprocess.Popen([sys.executable, "-m", "tests.support.strangers", host.address, str(host.port),
                                str(interval_s), *sources], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("load", LOADS)
def test_a_machine_joins_within_10_s_however_many_slow_strangers_hold_connections(tmp_path, load):
    host = Listener("127.0.0.2:0", tmp_path / "key")
    try:
        with strangers(host, LOADS[load]):
            assert wait_for(lambda: host._pending.num_waiting or None, time.monotonic() + 60, lambda: None)
            for _ in range(3):
                took_s = joined_after(host)
                print(f"{load}: joined after {took_s:.2f} s")
                assert took_s < PATIENCE_S
                time.sleep(1)
    finally:
        host.close()


def joined_after(host):
    """Seconds until a machine with the key is welcome, which tries again every RETRY_S as join does."""
    began_s = time.monotonic()
    while time.monotonic() < began_s + 2 * PATIENCE_S:
        try:
            link, answer = join(host)
            assert isinstance(answer, JoinAccepted)
            link.close()
            break
        except (ChannelClosedError, OSError):
            time.sleep(2)
    return time.monotonic() - began_s


# --- deadlines ---

def test_handshake_secret_and_hello_have_one_deadline(listener, monkeypatch):
    """Also for a stranger that holds the key, or that sends a byte more often than any time-out of one read."""
    monkeypatch.setattr(links, "AUTHENTICATE_S", 1.0)
    for began in (begin_handshake, lambda host: begin_secret(host, b""), lambda host: begin_secret(host, key_of(host))):
        began_s = time.monotonic()
        with began(listener) as connected, pytest.raises(OSError):
            while time.monotonic() < began_s + 30:
                connected.sendall(b"\1")
                time.sleep(0.2)

        assert 0.9 < time.monotonic() - began_s < 20


def begin_handshake(host):
    """A connection with the beginning of a TLS record of 511 bytes, of which each byte sent is one more."""
    connected = socket.create_connection((host.address, host.port))
    connected.sendall(b"\x16\x03\x01\x01\xff\x01\x00\x01\xfb")
    return connected


def begin_secret(host, secret):
    """A TLS connection with a part of the secret, or the secret and the beginning of a message of 16 million bytes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    secure = context.wrap_socket(socket.create_connection((host.address, host.port)))
    secure.sendall(secret and secret + links.HEADER.pack(links.MACHINE, 2 ** 24))
    return secure


def key_of(host):
    return host._key.secret


def test_a_machine_that_does_not_finish_joining_is_forgotten(listener, monkeypatch):
    monkeypatch.setattr("xdit_backend.multi_node.node_session.COMPLETE_S", 0.0)
    link, _ = join(listener, name="half")
    join(listener, name="another")

    with pytest.raises(ChannelClosedError, match="the connection"):
        link.receive()


# --- who is listened to ---

class Ended:
    """Stands for a Link: Pending calls `end` alone."""

    is_ended = False

    def end(self):
        self.is_ended = True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that time.monotonic of pending.py says, in a list."""
    now_s = [1000.0]
    monkeypatch.setattr(pending.time, "monotonic", lambda: now_s[0])
    return now_s


def served(line):
    """All that are listened to now."""
    links = []
    while (link := line.next()) is not None:
        links.append(link)
    return links


def test_an_address_has_a_part_of_the_places_and_gives_them_up_in_turn(clock):
    line, own = Pending(), [Ended() for _ in range(MAX_SERVED_PER_ADDRESS + 2)]
    for link in own:
        assert line.add(link, "10.0.0.1") is None

    assert served(line) == own[:-2] and line.num_waiting == 2
    other = Ended()
    line.add(other, "10.0.0.2")
    assert served(line) == [other]                             # before those that came first
    clock[0] += TURN_S + 0.1
    assert served(line) == own[-2:]
    assert [link for link in (*own, other) if link.is_ended] == own[:2]


def test_whose_address_has_no_place_comes_before_all_others(clock):
    line = Pending()
    for index in range(MAX_SERVED + 8):
        line.add(Ended(), f"10.0.0.{index % 4}")
    first = served(line)
    machine = Ended()
    line.add(machine, "10.0.1.1")

    assert len(first) == MAX_SERVED and served(line) == []
    line.remove(first[5])
    assert served(line) == [machine] and not any(link.is_ended for link in first)


def test_the_line_is_bounded_and_an_address_cannot_fill_it(clock):
    line = Pending()
    refused = [line.add(Ended(), "10.0.0.1") for _ in range(MAX_WAITING_PER_ADDRESS + 3)]
    assert sum(link is not None for link in refused) == 3
    for index in range(MAX_WAITING - MAX_WAITING_PER_ADDRESS):
        assert line.add(Ended(), f"10.0.{index}.2") is None
    machine = Ended()

    assert line.add(machine, "10.0.255.3") not in (None, machine) and line.num_waiting == MAX_WAITING
    assert served(line)[0] is not machine and machine in [link for link, _ in line._waiting]
    assert len(line.close()) == MAX_WAITING - MAX_SERVED and line.num_waiting == 0
