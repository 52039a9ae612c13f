"""One trip through a model's forward on one rank: what the seams and the parallel methods need to know of it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..partition import opens_step
from ..protocol.messages import Patch
from .collectives import Traffic
from .mesh import Mesh
from .pipefusion import KeyValues
from .tokens import Tokens


@dataclass
class Trip:
    """One trip of hidden states through the model on this rank: which blocks, which tokens, what is kept and exchanged.

    The seams read it at every block. tokens is set when the first block is reached.
    """

    mesh: Mesh
    traffic: Traffic
    inputs: dict                           # arguments of the model's forward
    blocks: range                          # the blocks this rank runs
    num_blocks: int
    patch: Patch | None = None             # None: the latent is whole
    patch_size: int = 1                    # latent rows of a token, along the patch's dim
    rows: int = 0                          # latent rows of the patch
    key_values: KeyValues | None = None    # None: nothing is kept, attention is over this trip's tokens
    kept_blocks: range = range(0)
    step: tuple = ()                       # what tells this step of the run from others: its timesteps
    first_image: int = 0                   # of the batch that key_values holds
    num_images: int = 1
    arrive: Callable | None = None         # () -> the message of the stage before, for stages after the first
    tokens: Tokens | None = None
    skips: dict = field(default_factory=dict)          # block -> its output, which a later block takes as `skip`

    @property
    def is_plain(self):
        """Nothing to do: one rank runs the whole model on a whole latent."""
        return (self.mesh.sequence_degree == 1 and self.patch is None and self.key_values is None
                and len(self.blocks) == self.num_blocks)

    @property
    def opens(self):
        """Does this trip bring the first tokens of a step, and with them the text?"""
        return opens_step(self.patch)

    def keeps(self, block):
        return self.key_values is not None and block in self.kept_blocks

    @property
    def tokens_a_row(self):
        """Image tokens in each of the patch's token rows."""
        return self.tokens.counts["image"] // -(-self.rows // self.patch_size)

    @property
    def num_image_tokens(self):
        """Tokens of the whole image."""
        if self.patch is None:
            return self.tokens.counts["image"]
        return self.tokens_a_row * -(-self.patch.whole // self.patch_size)

    @property
    def first_token(self):
        """Index of this trip's first image token in the whole image."""
        return 0 if self.patch is None else self.tokens_a_row * (self.patch.start // self.patch_size)
