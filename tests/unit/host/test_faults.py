"""A few of the faults that tests/programs/faults.py draws: which end a run, and in what, is for it to judge."""

from tests.programs.faults import FAULTS, LAYOUTS, NEVER, PHASES, draw, suffer_all
from xdit_backend.host import handshake

SLICE = (0, 1, 2, 4, 7, 9, 11, 26, 27, 63, 81, 112)           # each kind, each phase and each method is among them


def test_workers_that_are_killed_stopped_or_cancelled_leave_words_or_a_image_and_nothing_else(monkeypatch):
    monkeypatch.setenv("XDIT_SILENCE_TIMEOUT_S", "60")         # suffer_all sets its own, for this test alone
    monkeypatch.setattr(handshake, "START_TIMEOUT_S", handshake.START_TIMEOUT_S)

    outcomes = suffer_all(SLICE)

    assert outcomes.total() == len(SLICE) and outcomes["said so"] >= 1


def test_every_kind_phase_and_method_is_in_the_slice():
    faults = list(map(draw, SLICE))

    assert {fault.kind for fault in faults} == set(FAULTS) and {fault.phase for fault in faults} == set(PHASES)
    assert {fault.layout for fault in faults} == LAYOUTS[2].keys()


def test_every_fault_is_drawn_in_every_phase():
    drawn = {(fault.kind, fault.phase) for fault in map(draw, range(300))}

    assert drawn == {(kind, phase) for kind in FAULTS for phase in PHASES if (phase, kind) not in NEVER}
    assert {fault.layout for fault in map(draw, range(300))} == LAYOUTS[2].keys()
