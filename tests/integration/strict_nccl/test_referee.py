"""The referee alone: what it carries out, and what it names."""

import pytest

from tests.support.strict_nccl.referee import WORLD, Operation, Referee

FLOAT = "torch.float32"


class Played:
    """A referee and its ranks, whose requests are made one after the other. answers: [(rank, error, answer)]."""

    def __init__(self, world_size, queues="communicator"):
        self.referee, self.answers, self._number = Referee(world_size, queues), [], 0
        for rank in range(world_size):
            self.ask(rank, "join")
        assert len(self.answers) == world_size
        self.answers.clear()

    def ask(self, rank, *request):
        self.answers += self.referee.handle(rank, *request)

    def launch(self, rank, operation):
        self._number += 1
        self.ask(rank, "launch", self._number, operation)
        return self._number

    def of(self, rank):
        """What this rank was answered so far, which is forgotten."""
        found = [answer for to, error, answer in self.answers if to == rank and not error]
        self.answers = [each for each in self.answers if each[0] != rank]
        return found


def send(to, size=4, communicator=WORLD, dtype=FLOAT, where="sender.py:1"):
    return Operation(communicator, (0, 1), "p2p", {to: (bytes(size), dtype)}, {}, where=where)


def receive(of, size=4, communicator=WORLD, dtype=FLOAT, where="receiver.py:1"):
    return Operation(communicator, (0, 1), "p2p", {}, {of: (size, dtype)}, where=where)


def reduce(size=4, communicator=WORLD, ranks=(0, 1), dtype=FLOAT, where="reduce.py:1"):
    peers = {rank: (bytes(size), dtype) for rank in ranks}
    return Operation(communicator, ranks, "all_reduce", peers, dict.fromkeys(ranks, (size, dtype)),
                     (size, dtype, "sum"), where)


def test_a_send_ends_with_its_receive_and_not_before():
    played = Played(2)
    played.launch(0, send(1))
    played.launch(1, receive(0))           # which connects the pair
    assert played.of(0) == played.of(1) == [None]
    number = played.launch(0, send(1))
    played.ask(0, "test", number)
    assert played.of(0) == [None, False]
    played.ask(0, "wait", number, "a.py:1")
    assert played.of(0) == []
    other = played.launch(1, receive(0))
    played.ask(1, "wait", other, "b.py:1")

    assert played.of(0) == [{}] and played.of(1) == [None, {0: bytes(4)}] and not played.referee.failure


def test_a_first_transfer_waits_for_its_peer_at_launch():
    played = Played(2)
    played.launch(0, send(1))
    assert played.of(0) == []
    played.launch(1, receive(0))
    assert played.of(0) == [None]


@pytest.mark.parametrize("one, other, words", [
    (send(1), receive(0, size=8), "4 bytes of torch.float32 to 1"),
    (send(1), receive(0, dtype="torch.int32"), "4 bytes of torch.int32 from 0"),
    (reduce(4), reduce(8), "8, torch.float32"), (reduce(), reduce(dtype="torch.int32"), "torch.int32"),
    (reduce(), Operation(WORLD, (0, 1), "barrier", {}, {}, where="barrier.py:1"), "barrier of world")], ids=str)
def test_what_does_not_agree_is_named(one, other, words):
    played = Played(2)
    played.launch(0, one)
    played.launch(1, other)

    assert played.referee.failure.startswith("MISMATCH: rank 0: ") and words in played.referee.failure
    assert [error for _, error, _ in played.answers] == [played.referee.failure] * 2
    played.ask(0, "synchronize", "later.py:1")
    assert played.answers[-1][:2] == (0, played.referee.failure)


def test_two_sends_that_meet_are_a_deadlock_with_each_ranks_place():
    played = Played(2)
    for rank in (0, 1):
        played.launch(rank, Operation(WORLD, (0, 1), "p2p", {1 - rank: (bytes(4), FLOAT)}, {}, where=f"ring.py:{rank}"))

    lines = played.referee.failure.splitlines()
    assert lines[0].startswith("DEADLOCK")
    assert "rank 0 is at ring.py:0, and waits for the launch of p2p of world" in lines[1]
    assert any("rank 1 is at ring.py:1" in line for line in lines)
    assert sum("queued: p2p of world" in line for line in lines) == 2


def connected(queues):
    """Two ranks that have used two communicators."""
    played = Played(2, queues)
    for name in ("a", "b"):
        for rank in (0, 1):
            played.launch(rank, reduce(communicator=name))
    played.answers.clear()
    return played


@pytest.mark.parametrize("queues, is_deadlock", [("communicator", False), ("rank", True), ("launch", True)])
def test_communicators_in_another_order_on_another_rank(queues, is_deadlock):
    played = connected(queues)
    numbers = {}
    for rank, order in ((0, "ab"), (1, "ba")):
        for name in order:
            if not (queues == "launch" and name == order[1]):  # at whose launch the rank is not yet
                numbers[rank] = played.launch(rank, reduce(communicator=name))
    if queues == "rank":
        for rank in (0, 1):
            played.ask(rank, "wait", numbers[rank], f"wait.py:{rank}")

    assert played.referee.failure.startswith("DEADLOCK") == is_deadlock
    assert is_deadlock or not played.referee.failure


def test_a_rank_that_has_ended_leaves_others_in_a_deadlock():
    played = Played(2)
    played.ask(1, "gone", "ValueError: no such shape")
    played.launch(0, reduce())

    assert played.referee.failure.startswith("DEADLOCK")
    assert "rank 1 has ended with ValueError: no such shape" in played.referee.failure


def test_an_operation_without_a_peer_is_named_when_all_have_ended():
    played = Played(2)
    played.launch(0, send(1))
    played.launch(1, receive(0))
    played.launch(0, send(1, where="last.py:7"))
    assert not played.referee.failure
    played.ask(0, "gone")
    played.ask(1, "gone")

    assert played.referee.failure.startswith("LEFT: all ranks have ended") and "last.py:7" in played.referee.failure


def test_a_split_needs_an_idle_communicator_on_every_rank():
    """A host that has waited for an operation knows nothing of its device over NCCL."""
    played = Played(2)
    numbers = [played.launch(rank, reduce()) for rank in (0, 1)]
    for rank in (0, 1):
        played.ask(rank, "wait", numbers[rank], "wait.py:1")
        played.ask(rank, "synchronize", "synchronize.py:1")
    played.ask(0, "split", ((0,), (1,)), "split.py:1")
    assert len(played.of(0)) == 3 and not played.referee.failure
    played.ask(1, "split", ((0,), (1,)), "split.py:1")
    assert played.of(0) == [1] and played.referee.num_splits == 1

    for rank in (0, 1):
        number = played.launch(rank, reduce(where="unfinished.py:3"))
    played.ask(1, "wait", number, "wait.py:1")
    played.ask(1, "split", ((0, 1),), "split.py:2")
    assert played.referee.failure.startswith("SPLIT: rank 1 splits the communicator of the world at split.py:2")
    assert "unfinished.py:3" in played.referee.failure


def test_ranks_that_split_in_another_way_are_named():
    played = Played(2)
    played.ask(0, "split", ((0, 1),), "split.py:1")
    played.ask(1, "split", ((0,), (1,)), "split.py:2")

    assert played.referee.failure.startswith("MISMATCH: rank 0: a split into ((0, 1),)")


def test_a_communicator_that_is_destroyed_must_be_unused():
    played = connected("communicator")
    played.launch(0, reduce(communicator="a"))
    played.ask(0, "destroy", "b", "end.py:1")
    assert not played.referee.failure
    played.ask(0, "destroy", "a", "end.py:2")
    assert played.referee.failure.startswith("DESTROY: rank 0 destroys a at end.py:2")


def test_a_synchronised_device_has_carried_out_everything():
    played = connected("communicator")
    played.launch(0, reduce(communicator="a"))
    played.ask(0, "synchronize", "here.py:1")
    assert played.of(0) == [None]
    played.launch(1, reduce(communicator="a"))
    assert played.of(0) == [None]
