"""Forwards of one model that take turns on a rank. Used by transformer.py."""

import collections
import functools
import math

from greenlet import getcurrent, greenlet


def interleave(forwards, contexts, serving, by_block):
    """What these forwards return; each goes on until its context's yield_turn is called.

    serving(context): Hooks.serving. by_block: all run a block before one runs the next.
    """
    outputs, host = {}, getcurrent()
    tasks = [greenlet(forward) for forward in forwards]
    last = [-1] * len(tasks)                                   # block that each has run

    def end_block(own, block):
        last[own] = block
        host.switch()
        while min(last) < block:
            host.switch()

    for index, context in enumerate(contexts):
        if not context.compile_backend:                             # not from within a graph
            context.yield_turn = host.switch
        if by_block:
            context.end_block = functools.partial(end_block, index)
    waiting = collections.deque(range(len(tasks)))
    try:
        while waiting:
            index = waiting.popleft()
            with serving(contexts[index]):
                answer = tasks[index].switch()
            if tasks[index].dead:
                outputs[index], last[index] = answer, math.inf
            else:
                waiting.append(index)
    finally:
        # of a forward that failed, the others end now, and not when they are found
        for index in waiting:
            tasks[index].throw()
    return [outputs[index] for index in range(len(tasks))]
