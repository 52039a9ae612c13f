"""The loop of a worker: how far it looks ahead in its commands."""

from dataclasses import dataclass

from xdit_backend.protocol.specs import Layout
from xdit_backend.worker.command_loop import PREFETCHED, prefetch_ahead

RING, STAGES = Layout(ring_degree=2), Layout(pipefusion_degree=2)


@dataclass
class Step:
    layout: Layout
    can_be_prepared: bool = True


@dataclass
class Decode:
    can_be_prepared: bool = False


class Prepared(list):
    """Stands for the engine: the commands that it was asked to prepare."""

    def prefetch(self, command):
        self.append(command)
        if command.can_be_prepared is None:
            raise MemoryError
        return command.can_be_prepared


def prepared(*commands):
    """How many of these commands are prepared, or tried, in their order."""
    engine = Prepared()
    prefetch_ahead(engine, commands)
    assert engine == list(commands[:len(engine)])
    return len(engine)


def test_receives_are_not_posted_past_a_step_of_another_layout():
    """All ranks may take part in that step, and the sender comes to its send only after it."""
    assert prepared(*[Step(STAGES)] * PREFETCHED) == PREFETCHED
    assert prepared(Step(STAGES), Step(RING), Step(STAGES)) == 1
    assert prepared(Step(RING), Step(STAGES), Step(STAGES)) == 1
    assert prepared(Step(STAGES), Step(STAGES), Step(RING)) == 2


def test_receives_are_not_posted_past_a_command_that_cannot_be_prepared():
    assert prepared(Step(STAGES), Decode(), Step(STAGES)) == 1
    assert prepared(Decode(), Step(STAGES)) == 1
    assert prepared(Step(STAGES), Step(STAGES, can_be_prepared=None), Step(STAGES)) == 2
    assert prepared() == 0
