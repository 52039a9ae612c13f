"""Bytes a rank holds under a layout: weights, stale keys and values, activations. Pure arithmetic."""

from dataclasses import dataclass

from .cost import ELEMENT_BYTES

ACTIVATIONS = 8.5              # that live at once beside the feed-forward's, in hidden states
WHOLE = 0.45                   # of them, what tensor parallelism leaves whole


@dataclass(frozen=True)
class Memory:
    weights: float
    keys_values: float
    activations: float

    @property
    def total(self):
        return self.weights + self.keys_values + self.activations


def rank_memory(net, job, degrees, beside_bytes=0.0):
    """Memory of one rank. beside_bytes: of what it holds beside the transformer.

    Stale keys and values are 2 B (S + S_t) h elements a block, of a stage's blocks and a rank's heads under PipeFusion; under
    DistriFusion of all blocks, and twice, to send and to receive. Activations are of whole maps: warm-up runs them.
    """
    batch = degrees.batch(job)
    tokens = job.tokens + (job.text if net.joint else 0)
    stages = 1 if degrees.warmup_by_sequence else degrees.pipefusion
    a_block = 2 * net.key_share * batch * tokens * net.width * ELEMENT_BYTES
    keys_values = 0.0
    if degrees.pipefusion > 1:
        keys_values = a_block * net.blocks / degrees.pipefusion / degrees.ulysses
    if degrees.displaced > 1:
        keys_values = 2 * a_block * net.blocks / degrees.sequence
    rows = batch * tokens / degrees.sequence / degrees.displaced
    live = ACTIVATIONS + net.elements / 4
    return Memory(weights=ELEMENT_BYTES * net.parameters / stages / degrees.tensor + beside_bytes, keys_values=keys_values,
                  activations=rows * net.width * ELEMENT_BYTES * live * (WHOLE + (1 - WHOLE) / degrees.tensor))
