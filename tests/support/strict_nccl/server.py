"""The referee's thread in the test's process, and ranks that run under it."""

import os
import pickle
import socket
import threading
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait

from tests.support.ranks import run_ranks

from . import client
from .referee import Referee


class StrictWorld:
    """Groups of ranks that are joined by the simulation. Each group of processes has a Referee of its own.

    queues: of referee.QUEUES. mutant: of mutants.MUTANTS; "": the product is as it is.
    """

    def __init__(self, folder, queues, mutant=""):
        self.address, self.queues, self._mutant = os.path.join(folder, "referee"), queues, mutant
        self.referees = {}                                     # name of a group -> its Referee
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self.address)
        self._listening.listen(64)
        self._stopping, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def failures(self):
        return [referee.failure for referee in self.referees.values() if referee.failure]

    @property
    def num_operations(self):
        return sum(sum(referee.num_operations.values()) for referee in self.referees.values())

    def run_ranks(self, function, world_size, *args, timeout_s=300):
        """As tests.support.ranks.run_ranks, whose place it takes in a module of tests."""
        source = function.__module__, function.__code__.co_filename, function.__qualname__
        strict = self.address, self.queues, self._mutant
        return run_ranks(client.run_strictly, world_size, strict, source, pickle.dumps(args), timeout_s=timeout_s)

    def close(self):
        self._stop.close()
        self._thread.join()
        self._listening.close()
        self._stopping.close()

    def _serve(self):
        ranks = {}                                             # Connection -> (its group, rank)
        while True:
            for ready in wait([self._listening, self._stopping, *ranks]):
                if ready is self._stopping:
                    for connection in ranks:
                        connection.close()
                    return
                if ready is self._listening:
                    ranks[Connection(self._listening.accept()[0].detach())] = None
                    continue
                self._take(ready, ranks)

    def _take(self, connection, ranks):
        try:
            name, *arguments = connection.recv()
        except (EOFError, OSError):
            name, arguments = "gone", []
        if name == "join":
            group, rank, world_size = arguments
            self.referees.setdefault(group, Referee(world_size, self.queues))
            ranks[connection], arguments = (group, rank), []
        if name == "gone":
            place = ranks.pop(connection)
            connection.close()
            if place is None:
                return
        else:
            place = ranks[connection]
        group, rank = place
        answers = self.referees[group].handle(rank, name, *arguments)
        others = {each: other for other, each in ranks.items()}
        for to, error, answer in answers:
            if (group, to) in others:
                try:
                    others[group, to].send((error, answer))
                except OSError:                                # it has ended, as its connection will tell
                    pass


@contextmanager
def strict_world(folder, queues, mutant=""):
    """A StrictWorld whose socket is in this folder, until the end of a test."""
    world = StrictWorld(str(folder), queues, mutant)
    try:
        yield world
    finally:
        world.close()
