"""What the hooks and the parallel methods need to know of one forward of a model on one rank."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..attention.backends import BackendUse
from ..distributed.collectives import Traffic
from ..distributed.mesh import Mesh
from ..distributed.token_shards import Tokens
from ..memory.staging import PinnedAhead
from ..parallel.displaced_exchange import Exchange
from ..parallel.reference_kv_cache import ReferenceUse
from ..parallel.stale_kv_cache import KeyValues
from ..partition import opens_step
from ..protocol.specs import WHOLE, Patch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ImageRows:
    """Where a patch is in the whole latent, in rows along the dim it is cut along, and in tokens."""

    patch: Patch
    axis: int                              # 0 frames, 1 rows
    whole_rows: int                        # latent rows of the whole, padded to whole tokens
    whole_token_rows: int
    first_token: int                       # of the patch, in the whole
    num_tokens: int                        # of the whole


@dataclass
class ForwardContext:
    """One forward on this rank: which blocks, which tokens, what is kept and exchanged.
    The hooks read it at every block."""

    inputs: dict                           # arguments of the model's forward
    mesh: Mesh
    traffic: Traffic
    blocks: range                          # the blocks this rank runs
    num_blocks: int
    tokens: Tokens
    patch: Patch | None = None             # None: the latent is whole
    rows: ImageRows | None = None          # of the patch
    key_values: KeyValues | None = None    # None: nothing is kept, attention is over this forward's tokens
    cached_blocks: range = range(0)
    step: tuple = ()                       # what identifies this step of the run: its timesteps
    extrapolation: float = 0.0                  # how far stale keys and values go on as they went before; 0: not at all
    first_image: int = 0                   # of the batch that key_values holds
    num_images: int = 1
    references: ReferenceUse | None = None                     # None: nothing of them is kept
    compile_backend: str = ""              # of torch.compile, as whose graphs blocks run; "": as they are
    backend: BackendUse = field(default_factory=BackendUse)       # by which attention runs
    attention_exchange: str = WHOLE        # in which form attention's tensors travel, of exchanges.EXCHANGES
    exchange: Exchange | None = None       # with displaced_degree: what other ranks have sent
    # of a U-Net's latent, the first row of each rank, and how many there are; None: all here
    bands: tuple[int, ...] | None = None
    yield_turn: Callable = lambda: None    # called while this forward's sums travel: another's turn
    weights_streamed: bool = False             # those of some blocks, for each block; none computes with another's
    end_block: Callable = lambda block: None           # called after each block, for others' turns with its weights
    # tensor_parallel.py's: what was made for layers that have not asked yet
    precomputed: dict = field(default_factory=dict)
    receive_message: Callable | None = None  # () -> the message of the stage before, for stages after the first
    skips: dict = field(default_factory=dict)          # block -> its output, which a later block takes as `skip`
    cuts: dict = field(default_factory=dict)           # of what every block gets anew: this rank's part; hooks fill it
    # hooks.attention_dispatch.RunningAttention, while in an attention that ranks share
    attention: Any = None
    attentions: dict = field(default_factory=dict)     # name -> those of the block that runs, where it is compiled
    graph_breaks: dict = field(default_factory=dict)       # name -> forward, likewise, see ModelPlan.choosing
    block: str = ""                        # path of the block of a U-Net that runs, likewise
    # stream -> (B, T), which tokens may be attended to; hooks fill it
    masks: dict = field(default_factory=dict)
    # block, as ComfyUI's patches call it -> what it does instead, see specs.Branch
    operations: dict = field(default_factory=dict)
    biases: dict = field(default_factory=dict)         # attention -> Family.biases of this forward's image
    guided: tuple = ()                     # specs.Nag, one after the other, of what every self-attention gives
    free_u: tuple = ()                     # specs.FreeU and Shrink of a U-Net, one after the other
    skip_sizes: dict = field(default_factory=dict)     # number of a skip -> its rows and columns, with a Shrink
    tiles: dict = field(default_factory=dict)          # specs.Branch.tiles of its self-attentions
    networks: tuple = ()                   # (specs.NetworkUse, injected_networks.Network), one after the other
    text_attention: str = ""               # path of the attention to the text of a U-Net that runs
    scores: Any = None                     # specs.Branch.scores of these images, to be filled
    # by place (Family.control_shapes): what this rank adds there
    control: PinnedAhead = field(default_factory=lambda: PinnedAhead({}, CPU))

    @property
    def is_plain(self):
        """Nothing to do: one rank runs the whole model on a whole latent."""
        return (self.mesh.sequence_degree == 1 and self.patch is None and self.key_values is None
                and len(self.blocks) == self.num_blocks and not self.control and not self.operations
                and not self.guided and not self.networks and not self.biases and self.references is None)

    @property
    def shards_attention(self):
        """Is attention anything but torch's own, over this rank's tokens?"""
        return (self.mesh.sequence_degree > 1 or self.key_values is not None or bool(self.masks)
                or bool(self.guided) or bool(self.biases) or self.references is not None
                or any(network.tells_apart for _, network in self.networks))

    @property
    def opens(self):
        """Does this forward bring the first tokens of a step, and with them the text?"""
        return opens_step(self.patch)

    @property
    def once(self):
        """Where outputs are kept that are the same in several calls: {key: (moment, output)}. None: nowhere."""
        if self.key_values is not None:
            return self.key_values.once
        return None if self.bands is None else self.exchange.once

    def moment(self, span, batch):
        """For how long something is the same: a "step" of these images, or the "run"."""
        return self.first_image, batch, *(self.step if span == "step" else ())

    def caches(self, block):
        return self.key_values is not None and block in self.cached_blocks

    @property
    def num_image_tokens(self):
        """Tokens of the whole image."""
        return self.tokens.counts["image"] if self.rows is None else self.rows.num_tokens

    @property
    def first_token(self):
        """Index of this forward's first image token in the whole image."""
        return 0 if self.rows is None else self.rows.first_token


def tokens_of(family, mesh, shape, conditioning, patch=None):
    """The Tokens of a forward. shape: of the latent or its patch.
    Streams beside the image come with a step's first patch."""
    counts, left_out = family.token_counts(shape, conditioning, patch), {}
    if not opens_step(patch):
        left_out = {stream: count for stream, count in counts.items() if stream != "image"}
        counts |= dict.fromkeys(left_out, 0)
    return Tokens(counts, mesh.sequence_degree, mesh.sequence_rank, left_out, family.tokens_a_row(shape),
                  mesh.sequence_speeds)


def rows_of(family, shape, patch):
    """The ImageRows of a patch whose latent has this shape."""
    axes = family.latent.patch
    size, counts = axes[patch.dim - 2], family.latent.counts(shape)
    whole = -(-patch.whole // size)
    a_row = family.latent.num_tokens(shape) // counts[patch.dim - 2]
    return ImageRows(patch, patch.dim - 2 + 3 - len(axes), whole * size, whole, patch.start // size * a_row,
                     whole * a_row)
