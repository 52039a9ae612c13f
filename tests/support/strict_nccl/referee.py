"""The referee of the simulation: it has the queues of all ranks of a group, and carries out the operations at their
heads.

An operation ends when its peers' are at the heads of their queues too; nothing is buffered, so a send is a rendezvous.
Kinds, sizes, dtypes and order must agree. The ranks (client.py) send requests and block until the answer: when all
ranks are blocked and nothing can move, that is a deadlock.
"""

import collections
from dataclasses import dataclass, field

QUEUES = ("communicator", "rank", "launch")    # of a rank: one for each communicator; one; one, and it waits at launch
WORLD = "world"
NUM_SHOWN = 4                              # operations of a queue in a report


@dataclass
class Operation:
    """An exchange as one rank has launched it.

    sends: {peer: (bytes, dtype)}. receives: {peer: (number of bytes, dtype)}. agreed: what must be equal on all ranks
    of a collective. The transfers of a "p2p" are independent of each other; all others are collectives.
    """

    communicator: str
    ranks: tuple
    kind: str
    sends: dict
    receives: dict
    agreed: tuple = ()
    where: str = ""
    arrived: dict = field(default_factory=dict)
    is_done: bool = False
    is_taken: bool = False                 # the rank has what arrived
    is_idle: bool = False                  # the device has been waited for since

    def __post_init__(self):
        self.to_send, self.to_receive = set(self.sends), set(self.receives)

    def __str__(self):
        sizes = [f"{len(payload)} bytes of {dtype} to {peer}" for peer, (payload, dtype) in self.sends.items()]
        sizes += [f"{size} bytes of {dtype} from {peer}" for peer, (size, dtype) in self.receives.items()]
        words = ", ".join(map(str, self.agreed) if self.agreed else sizes)
        return f"{self.kind} of {self.communicator} ({words}), launched at {self.where}"

    def connections(self, rank):
        """What NCCL connects at first use, at which the process waits for its peers: pairs, or all ranks for a kind of
        collective."""
        if self.kind not in ("p2p", "all_to_all"):
            return {(self.communicator, self.kind, self.ranks)}
        pairs = [(rank, peer) for peer, (payload, _) in self.sends.items() if len(payload)]
        pairs += [(peer, rank) for peer, (size, _) in self.receives.items() if size]
        return {(self.communicator, "p2p", pair) for pair in pairs if pair[0] != pair[1]}


@dataclass
class Request:
    """What a rank is blocked in. operation: the one that it waits for."""

    words: str
    where: str
    operation: Operation | None = None
    connections: frozenset = frozenset()
    groups: tuple = ()                     # of a split
    is_synchronize: bool = False


class Referee:
    """Of one group of ranks. handle() takes the requests, from one thread."""

    def __init__(self, world_size, queues):
        assert queues in QUEUES, queues
        self.world_size, self._queue_model = world_size, queues
        self.failure = ""
        self.num_splits, self.num_operations = 0, collections.Counter()
        self._operations = {}              # (rank, number) -> Operation that may be under way, as the host knows it
        self._queues = collections.defaultdict(collections.deque)
        self._requests, self._joined = {}, set()
        self._gone = {}                    # rank -> what it raised, in words
        self._launched = collections.defaultdict(set)          # connection -> ranks that have used it

    def handle(self, rank, name, *arguments):
        """Take a request of a rank. Returns the answers that can be given: [(rank, error, answer)]."""
        if name == "gone":
            self._gone[rank] = f" with {arguments[0]}" if arguments else ""
            self._requests.pop(rank, None)
        elif name == "test":
            operation = self._operations.get((rank, *arguments))
            return [(rank, self.failure, operation is None or operation.is_done)]
        elif not self.failure:
            self._requests[rank] = getattr(self, f"_{name}")(rank, *arguments)
        else:
            return [(rank, self.failure, None)]
        if not self.failure:
            while self._move():
                pass
        answers = [] if self.failure else self._answers()
        if not self.failure:
            self._look_for_a_deadlock()
        if self.failure:
            answers += [(blocked, self.failure, None) for blocked in self._requests]
            self._requests.clear()
        return answers

    # --- requests ---

    def _join(self, rank):
        self._joined.add(rank)
        return Request("others to join", "")

    def _launch(self, rank, number, operation):
        self._operations[rank, number] = operation
        self._queue_of(rank, operation).append(operation)
        self.num_operations[operation.kind] += 1
        connections = operation.connections(rank)
        for connection in connections:
            self._launched[connection].add(rank)
        waits = operation if self._queue_model == "launch" else None
        return Request(f"the launch of {operation}", operation.where, waits, frozenset(connections))

    def _wait(self, rank, number, where):
        operation = self._operations[rank, number]
        return Request(f"the end of {operation}", where, operation)

    def _synchronize(self, rank, where):
        return Request("its device", where, is_synchronize=True)

    def _split(self, rank, groups, where):
        """As ncclCommSplit of the world's communicator: a collective of all its ranks, under which nothing may be."""
        under_way = [each for (owner, _), each in self._operations.items()
                     if owner == rank and each.communicator == WORLD and not each.is_idle]
        if under_way:
            self._fail(f"SPLIT: rank {rank} splits the communicator of the world at {where}, and has not waited for "
                       f"its device since {under_way[0]}")
        return Request(f"a split into {groups}", where, groups=groups)

    def _destroy(self, rank, communicator, where):
        left = [str(each) for (owner, _), each in self._operations.items()
                if owner == rank and each.communicator == communicator and not each.is_done]
        if left:
            self._fail(f"DESTROY: rank {rank} destroys {communicator} at {where} with {left[0]} under way")
        return Request("", where)

    def _fault(self, rank, text):
        self._fail(f"{text} [rank {rank}]")
        return Request("", "")

    # --- operations ---

    def _queue_of(self, rank, operation):
        return self._queues[(rank, operation.communicator) if self._queue_model == "communicator" else (rank,)]

    def _heads(self):
        """{(rank, communicator): the operation at the head of a queue}"""
        heads = {}
        for (rank, *_), queue in self._queues.items():
            while queue and queue[0].is_done:
                queue.popleft()
            if queue:
                heads[rank, queue[0].communicator] = queue[0]
        return heads

    def _move(self):
        """Carry out what can be, of the operations at the heads; was there anything?"""
        heads, moved = self._heads(), False
        for (rank, _), operation in heads.items():
            if not operation.is_done and not self.failure:
                move = self._transfer if operation.kind == "p2p" else self._collect
                moved |= move(rank, operation, heads)
        return moved

    def _transfer(self, rank, operation, heads):
        moved = False
        for peer in sorted(operation.to_send):
            other = heads.get((peer, operation.communicator))
            if other is not None and not other.is_done and other.kind == "p2p" and rank in other.to_receive:
                if not self._deliver(rank, operation, peer, other):
                    return False
                other.is_done = not (other.to_send or other.to_receive)
                moved = True
        operation.is_done = not (operation.to_send or operation.to_receive)
        return moved

    def _deliver(self, rank, operation, peer, other):
        """Hand over what one rank sends another; do they agree about it?"""
        payload, dtype = operation.sends[peer]
        if (len(payload), dtype) != other.receives[rank]:
            self._mismatch({rank: operation, peer: other})
            return False
        other.arrived[rank] = payload
        operation.to_send.discard(peer)
        other.to_receive.discard(rank)
        return True

    def _collect(self, rank, operation, heads):
        every = {each: heads.get((each, operation.communicator)) for each in operation.ranks}
        if any(each is None or each.is_done for each in every.values()):
            return False
        if any(each.kind == "p2p" for each in every.values()):
            return False                   # its transfers may be with other ranks
        if len({(each.kind, each.ranks, each.agreed) for each in every.values()}) > 1:
            self._mismatch(every)
            return False
        for sender, receiver in [(one, other) for one in every for other in every[one].sends]:
            if sender not in every[receiver].receives:
                self._mismatch({sender: every[sender], receiver: every[receiver]})
            if self.failure or not self._deliver(sender, every[sender], receiver, every[receiver]):
                return False
        if any(each.to_receive for each in every.values()):
            self._mismatch(every)
            return False
        for each in every.values():
            each.is_done = True
        return True

    # --- answers ---

    def _answers(self):
        answers = []
        if len(self._joined) < self.world_size:
            return answers
        splits = {rank: request.groups for rank, request in self._requests.items() if request.groups}
        if len(splits) == self.world_size:
            if len(set(splits.values())) > 1:
                self._mismatch({rank: self._requests[rank].words for rank in splits})
                return answers
            self.num_splits += 1
        for rank, request in list(self._requests.items()):
            if self._is_over(rank, request, len(splits) == self.world_size):
                del self._requests[rank]
                answers.append((rank, "", self._result(rank, request)))
        return answers

    def _is_over(self, rank, request, is_split):
        if request.operation is not None and not request.operation.is_done:
            return False
        if request.is_synchronize:
            return all(each.is_done for (owner, _), each in self._operations.items() if owner == rank)
        return (not request.groups or is_split) and all(
            set(connection[2]) <= self._launched[connection] for connection in request.connections)

    def _result(self, rank, request):
        arrived = None
        if request.operation is not None:
            arrived, request.operation.arrived, request.operation.is_taken = request.operation.arrived, {}, True
        for key, each in list(self._operations.items()):
            if key[0] == rank:
                each.is_idle |= request.is_synchronize
                if each.is_taken and (each.is_idle or each.communicator != WORLD):
                    del self._operations[key]
        return self.num_splits if request.groups else arrived

    # --- failures ---

    def _look_for_a_deadlock(self):
        """All ranks are blocked, or have ended, and nothing moves."""
        if len(self._joined) < self.world_size:
            return
        if len(self._requests) + len(self._gone) == self.world_size:
            left = [str(each) for each in self._operations.values() if not each.is_done]
            if self._requests:
                self._fail("DEADLOCK")
            elif left:
                self._fail(f"LEFT: all ranks have ended, and {left[0]} has no peer")

    def _mismatch(self, every):
        self._fail("MISMATCH: " + "; ".join(f"rank {rank}: {each}" for rank, each in every.items()))

    def _fail(self, text):
        lines = [f"{text} (queues: one a {self._queue_model})"]
        for rank in range(self.world_size):
            request = self._requests.get(rank)
            what = (f"has ended{self._gone[rank]}" if rank in self._gone else "computes" if request is None
                    else f"is at {request.where or 'its start'}, and waits for {request.words}")
            lines.append(f"  rank {rank} {what}")
            for (owner, *_), queue in self._queues.items():
                left = [each for each in queue if not each.is_done]
                lines += [f"    queued: {each}" for each in left[:NUM_SHOWN] if owner == rank]
        self.failure = self.failure or "\n".join(lines)
