"""Interleaved execution of several forwards of one model on a rank, as coroutines."""

import collections
import functools
import math

from greenlet import getcurrent, greenlet


def interleave(forwards, contexts, serving, by_block):
    """Run forwards interleaved and return their outputs; each runs until it calls its context's yield_turn.

    serving(context): ModelHooks.serving. by_block: all run a block before any runs the next.
    """
    outputs, host = {}, getcurrent()
    tasks = [greenlet(forward) for forward in forwards]
    last = [-1] * len(tasks)                                   # last block of each

    def end_block(own, block):
        last[own] = block
        host.switch()
        while min(last) < block:
            host.switch()

    for index, context in enumerate(contexts):
        if not context.options.compile_backend:                # a graph cannot yield
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
        # if a forward failed, end the others now and not when they are garbage-collected
        for index in waiting:
            tasks[index].throw()
    return [outputs[index] for index in range(len(tasks))]
