"""Listener where other machines join: the host's only open port, and only if the user has set an address for it."""

import contextlib
import dataclasses
import hashlib
import logging
import secrets
import socket
import threading
import time
from pathlib import Path

import psutil

from .. import system
from ..comfyui.install_location import PACK, comfyui_version, find_comfyui
from ..host import logs
from ..host.doctor import gigabytes, package_versions
from ..protocol import timeouts
from ..protocol.errors import ChannelClosedError, ConfigError, WorkerStartError
from .connections import PORT, JoinAccepted, JoinRequest, Refused, accepted, authenticate
from .file_digest import Contents
from .listening import Listening
from .node_session import POLL_S, Session, wait_for
from .pending import Pending
from .tls_keys import identity, key_folder, server_context

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent.parent
COMFYUI = "ComfyUI"                        # optional on a machine: models that need its modules report that
COMPARED = ("torch", "diffusers")          # packages that must have the same version on all machines


class Listener:
    """Accepts other machines, and keeps their sessions.

    address: of this machine, "192.168.1.10", or with a port, "192.168.1.10:29431". folder: of the key. Raises
    ConfigError if it cannot listen there.
    """

    def __init__(self, address, folder):
        # now, not in a thread when a machine joins
        timeouts.check()
        self.wanted = read_address(address)
        self.address, self.port = self.wanted
        self.contents = Contents()
        self._folder = Path(folder)
        self._key = identity(folder)
        self._context = server_context(folder)
        try:
            self._server = socket.create_server((self.address, self.port))
        except OSError as error:
            addresses = ", ".join(own_addresses())
            raise ConfigError(f"Set one of {addresses} in Settings > xDiT, with another port, such as "
                              f"{self.address}:{PORT + 1}, if this one is taken: other machines cannot join at "
                              f"{address} ({error}).") from error
        self.port = self._server.getsockname()[1]
        self._listening = Listening(f"{self.address}:{self.port}")
        self._write_listening()
        self._sessions, self._lock, self._pending = [], threading.Lock(), Pending()
        # machine name -> why it was rejected, or is gone
        self._absent = {}
        self._is_over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()
        log.info("other machines can join at %s:%d", self.address, self.port)

    def key_command(self, name):
        """Command that shows, in the folder of the xDiT nodes on this machine, what to run on machine `name`.

        Only that command shows the key, since errors, phases and logs may be read by others.
        """
        is_usual = self._folder == key_folder(PACK.parent.parent)
        folder = "" if is_usual else f" --folder {system.quoted(self._folder)}"
        return f"python -m xdit_backend key{folder} {name}"

    @property
    def interface(self):
        """Network interface for the tensors between machines."""
        return interface_of(self.address)

    def gpus(self, name, on_phase=lambda text: None, check=lambda: None):
        """{device: (name, memory in bytes)} of a machine, after waiting until it joins. Raises like `take`."""
        return self._wait(name, on_phase, check, False).gpus

    def take(self, name, on_phase=lambda text: None, check=lambda: None):
        """Reserve an unused Session of a machine, after waiting until it joins. on_phase(text): shown to the user.

        Raises WorkerStartError if it does not join in time.
        """
        return self._wait(name, on_phase, check, True)

    def joined(self):
        """Names of the connected machines."""
        with self._lock:
            return sorted({session.name for session in self._sessions if session.is_open})

    def close(self):
        self._is_over.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)            # wakes the thread in accept
        self._server.close()
        for session in list(self._sessions):
            session.close("ComfyUI has ended")
        with self._lock:                                       # _note_machines writes nothing after this
            logs.note_machines([])

    def _note_machines(self):
        """Write the machines' state for the doctor, unless this listener is closed and may have been replaced."""
        with self._lock:
            if self._is_over.is_set():
                return
            self._absent |= {session.name: f"gone: {session.ended}" for session in self._sessions if session.ended}
            lines_of = dict(self._absent)
            for session in self._sessions:
                if session.is_open:                            # a machine in use has a second session for another group
                    gpus = "; ".join(f"{device} {gpu}, {gigabytes(num_bytes)}"
                                     for device, (gpu, num_bytes) in session.gpus.items())
                    is_used = session.is_used or lines_of.get(session.name, "").startswith("in use")
                    lines_of[session.name] = f"{'in use' if is_used else 'joined'}: {gpus}"
                    self._absent.pop(session.name, None)
            logs.note_machines([f"{name} {state}" for name, state in sorted(lines_of.items())])

    def _note_waiting(self, name):
        with self._lock:
            names = dict.fromkeys((*self._listening.names, name))
            self._listening = dataclasses.replace(self._listening, names=tuple(names))
            self._write_listening()

    def _write_listening(self):
        try:
            self._listening.write(self._folder)
        except OSError as error:
            log.warning("python -m xdit_backend key will not find the address at which ComfyUI listens: %s", error)

    def _wait(self, name, on_phase, check, takes):
        def found():
            with self._lock:
                self._sessions = [session for session in self._sessions if session.is_open or not session.ended]
                free = [session for session in self._sessions if session.name == name and session.is_open
                        and not session.is_used]
                if takes and free:
                    # the newest, since the host may not have noticed yet that others are lost
                    free[-1].reserve()
                return free[-1] if free else None

        session = found()
        if session is None:
            timeout_s = timeouts.seconds("XDIT_JOIN_TIMEOUT_S")
            self._note_waiting(name)
            text = (f"waiting for {name} to join. To see what to run there, run this on the machine with ComfyUI, in "
                    f"the folder of the xDiT nodes: {self.key_command(name)}")
            log.warning("%s", text)
            on_phase(text)
            session = wait_for(found, time.monotonic() + timeout_s, check)
        if session is None:
            others = f" Joined are: {', '.join(self.joined())}." if self.joined() else ""
            raise WorkerStartError(
                f"{name} has not joined after {timeout_s:.0f} s.{others} On the machine with ComfyUI, in the folder of "
                f"the xDiT nodes, run:\n{self.key_command(name)}\nIt shows what to run on {name}, which needs the "
                f"xDiT nodes, the same versions of {' and '.join(COMPARED)}, and the model files, but not ComfyUI. "
                f"When {name} says that it has joined, queue the prompt again. If it cannot connect, let port "
                f"{self.port} through the firewall here. Or leave {name} out of devices in xDiT Parallel Config.")
        self._note_machines()
        return session

    # --- joining ---

    def _accept(self):
        while not self._is_over.is_set():
            try:
                self._server.settimeout(POLL_S if self._pending.num_waiting else None)
                self._queue(*self._server.accept())
            except TimeoutError:
                pass
            except OSError:
                if not self._is_over.is_set():
                    time.sleep(POLL_S)                         # such as too many open files
            while (link := self._pending.next()) is not None:
                try:
                    threading.Thread(target=self._authenticate, args=(link,), daemon=True).start()
                except RuntimeError as error:                  # this process has reached its limit of threads
                    log.warning("a machine cannot join: %s", error)
                    self._pending.remove(link)
                    link.close()
        for link in self._pending.close():
            link.close()

    def _queue(self, connected, address):
        try:
            link = accepted(connected, self._context)
        except (OSError, ValueError):                          # it is already closed
            connected.close()
            return
        refused = self._pending.add(link, address[0])
        if refused is not None:
            refused.close()

    def _authenticate(self, link):
        try:
            authenticate(link, self._key.secret)
            _, join_request = link.receive()
        except ChannelClosedError:
            link.close()
            return
        finally:
            self._pending.remove(link)
        self._end_incomplete()
        try:
            self._answer(link, join_request)
        except ChannelClosedError:
            link.close()

    def _end_incomplete(self):
        """Close sessions whose second connection is late; such a machine joins again by itself."""
        with self._lock:
            late = [session for session in self._sessions if session.is_late]
        for session in late:
            session.close("it did not finish joining")

    def _answer(self, link, join_request):
        if not isinstance(join_request, JoinRequest):
            link.close()
            return
        if join_request.purpose == "machine":
            reason = version_differences(join_request.versions, versions())
            if reason:
                self._absent[join_request.name] = f"rejected: {reason}"
                self._note_machines()
                link.send(Refused(reason))
                link.close()
                return
            session = Session(join_request.name, secrets.token_hex(16), join_request.gpus, link, self._note_machines)
            link.send(JoinAccepted(session.token, time.perf_counter()))
            with self._lock:
                self._sessions.append(session)
            return
        with self._lock:
            session = next((each for each in self._sessions
                            if secrets.compare_digest(each.token, join_request.session)), None)
        if session is None or session.ended:
            link.send(Refused("its session has ended"))
            link.close()
            return
        link.send(JoinAccepted(session.token, time.perf_counter()))
        session.answer_over(link)
        self._note_machines()
        log.info("%s has joined", session.name)


def read_address(text):
    """Parse "192.168.1.10" or "192.168.1.10:29431" to (address, port).

    Raises ConfigError if it is not an address, or the wildcard address.
    """
    address, colon, port = text.strip().partition(":")
    try:
        socket.inet_aton(address)
        number = int(port) if colon else PORT
        if address.count(".") != 3 or not 0 <= number < 2 ** 16 or address == "0.0.0.0":
            raise ValueError
    except (OSError, ValueError):
        raise ConfigError("Give one address of this machine at which others could join, such as "
                          f'{", ".join(own_addresses())}; a port may follow, "{own_addresses()[0]}:{PORT}": "{text}" '
                          "is not one.") from None
    return address, number


def own_addresses():
    """IPv4 addresses of this machine, loopback ones last."""
    found = [one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET]
    return sorted(found, key=lambda address: address.startswith("127.")) or ["127.0.0.1"]


def interface_of(address):
    """Name of this machine's network interface with this address. Raises WorkerStartError if there is none."""
    for name, each in psutil.net_if_addrs().items():
        own = [one.address for one in each if one.family == socket.AF_INET]
        if address in own or (address.startswith("127.") and "127.0.0.1" in own):
            return name
    raise WorkerStartError(f"Set one of {', '.join(own_addresses())} in Settings > xDiT: no network interface of "
                           f"this machine has the address {address}, at which others joined.")


def versions():
    """Versions that must be the same on all machines: of packages, ComfyUI, this package's source and the system."""
    source = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        source.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes().replace(b"\r\n", b"\n"))
    comfyui = find_comfyui()
    own = {} if comfyui is None else {COMFYUI: comfyui_version(comfyui)}
    return package_versions(COMPARED) | {
        "the xDiT nodes": source.hexdigest()[:12], "the family of the operating system": system.FAMILY} | own


def version_differences(theirs, ours):
    """Describe the different versions of two machines; "" if they are the same."""
    different = [f"{name} is {theirs.get(name, 'not installed')} there and {version} here"
                 for name, version in ours.items()
                 if theirs.get(name) != version and (name != COMFYUI or name in theirs)]
    return f"{'; '.join(different)}. Install the same on both machines." if different else ""
