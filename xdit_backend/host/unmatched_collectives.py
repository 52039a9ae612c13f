"""Detection of collectives and transfers that a failed rank leaves unmatched, after which a group must be ended.

Every rank counts the collectives and transfers ("exchanges") of a command that it enters, by participating ranks
(distributed.collectives.Traffic.entering). An exchange completes only when all its ranks have entered it. If a failed
rank never entered it, the others wait forever; with NCCL it may also be matched by that rank's next command, which
gives a hang or a wrong result. If the counts are equal on all ranks, nothing is pending and the group can continue.
"""

import re

LOST_DEVICE = "AcceleratorError", "CopyError"


def ranks_of(exchange):
    """Ranks of an exchange, from its name "0,1" or "0>1"."""
    return set(map(int, re.split("[,>]", exchange)))


def lost_device(failures):
    """Whether a device is unusable: a lost CUDA context reports "CUDA error", and may be why a copy failed."""
    return any(failure.kind in LOST_DEVICE or failure.message.startswith("CUDA error") for failure in failures)


def is_unmatched(failed, done, running):
    """Whether ranks have entered an exchange that a failed rank has not entered, or not completed.

    failed, done: {rank: its Failed or Done}. running: {rank that has not answered: exchanges that it has entered}.
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
    """Whether another rank has entered an exchange with the failed rank more often. is_final: or less often."""
    for name in entered.keys() | others.keys():
        if {rank, other} <= ranks_of(name):
            ahead = others.get(name, 0) - entered.get(name, 0)
            if ahead > 0 or (is_final and ahead < 0):
                return True
    return False
