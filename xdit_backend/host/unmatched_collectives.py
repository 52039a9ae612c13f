"""Exchanges that a failed rank leaves unmatched, which decide whether a worker group outlives a failure.

Every rank counts the exchanges of a command that it enters, by the ranks that take part (distributed.collectives.
Traffic.entering). An exchange ends only when all of its ranks have entered it. One that a failed rank never entered
leaves the others waiting. With NCCL it may also be joined by that rank's next command, which gives a hang or a wrong
result. With equal counts on all ranks nothing is left over, and the group can go on.
"""

import re

LOST_DEVICE = "AcceleratorError", "CopyError"


def ranks_of(exchange):
    """The ranks that take part in an exchange of this name, "0,1" or "0>1"."""
    return set(map(int, re.split("[,>]", exchange)))


def lost_device(failures):
    """Does a Failed say that a device computes nothing more? A device whose context is lost says "CUDA error", and a
    failed copy may be that."""
    return any(failure.kind in LOST_DEVICE or failure.message.startswith("CUDA error") for failure in failures)


def is_unmatched(failed, done, running):
    """Is there an exchange of a command that a failed rank has not entered, or not completed, and others have entered?

    failed, done: {rank: its Failed or Done}. running: {rank: the exchanges that it has entered so far}, of ranks that
    have not answered.
    """
    if any(failure.is_broken for failure in failed.values()):
        return len(failed) + len(done) + len(running) > 1
    return any(_left(rank, failure.entered, other, entered, is_final)
               for rank, failure in failed.items()
               for answers, is_final in ((_entered(failed), True), (_entered(done), True), (running, False))
               for other, entered in answers.items() if other != rank)


def _entered(answers):
    return {rank: answer.entered for rank, answer in answers.items()}


def _left(rank, entered, other, others, is_final):
    """Has another rank entered an exchange with this failed one more often than that? is_final: or less often."""
    for name in entered.keys() | others.keys():
        if {rank, other} <= ranks_of(name):
            ahead = others.get(name, 0) - entered.get(name, 0)
            if ahead > 0 or (is_final and ahead < 0):
                return True
    return False
