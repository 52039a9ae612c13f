"""Forwards of one model that take turns on a rank. Used by transformer.py."""

import collections
import functools
import math

import torch.nn.functional as F
from greenlet import getcurrent, greenlet

from ..autoencoders.family import replaced


def take_turns(forwards, contexts, serving, by_block):
    """What these forwards return; each goes on until its context's yield_turn is called.

    A forward may yield in the midst of its own attention, so what it puts in the place of torch's attention, and its
    tokens, are its own. serving(context, cuts): Hooks.serving. by_block: all run a block before one runs the next.
    """
    outputs, host = {}, getcurrent()
    tasks = [greenlet(forward) for forward in forwards]
    attentions, cuts = [F.scaled_dot_product_attention for _ in tasks], [{} for _ in tasks]
    last = [-1] * len(tasks)                                   # block that each has run

    def end_block(own, block):
        last[own] = block
        host.switch()
        while min(last) < block:
            host.switch()

    for index, context in enumerate(contexts):
        context.yield_turn = host.switch
        if by_block:
            context.end_block = functools.partial(end_block, index)
    waiting = collections.deque(range(len(tasks)))
    try:
        while waiting:
            index = waiting.popleft()
            with (serving(contexts[index], cuts[index]),
                  replaced(F, scaled_dot_product_attention=attentions[index])):
                answer = tasks[index].switch()
                attentions[index] = F.scaled_dot_product_attention
            if tasks[index].dead:
                outputs[index], last[index] = answer, math.inf
            else:
                waiting.append(index)
    finally:
        # of a forward that failed, the others end now, and not when they are found
        for index in waiting:
            tasks[index].throw()
    return [outputs[index] for index in range(len(tasks))]
