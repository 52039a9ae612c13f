"""A host that listens on loopback, and what lies between it and who joins."""

import contextlib
import socket
import threading

import pytest

from xdit_backend.multi_node.listener import Listener


@pytest.fixture(scope="module")
def listener(tmp_path_factory):
    listener = Listener("127.0.0.2:0", tmp_path_factory.mktemp("host") / "key")
    yield listener
    listener.close()


class Relay:
    """Passes connections on to a port, until it is cut: then it ends them, and takes no other until it is healed."""

    def __init__(self, address, port):
        self._target, self._sockets, self._is_cut = (address, port), [], False
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        self._is_cut = True
        self.end_all()

    def heal(self):
        self._is_cut = False

    def end_all(self):
        while self._sockets:
            end(self._sockets.pop())

    def close(self):
        self.cut()
        end(self._server)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                if self._is_cut:
                    end(near)
                    continue
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()


def pump(source, target):
    with contextlib.suppress(OSError):
        while content := source.recv(2 ** 16):
            target.sendall(content)
    for each in (source, target):
        end(each)


def end(connected):
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
    connected.close()
