"""ForwardContext: one forward of a model on one rank, as hooks and parallel methods see it."""

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
from ..protocol.specs import ForwardOptions, Patch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ImageRows:
    """A patch's rows along the dim in which the latent is split, and its tokens, within the full latent."""

    patch: Patch
    axis: int                              # 0 frames, 1 rows
    whole_rows: int                        # rows of the full latent, padded to complete tokens
    whole_token_rows: int                  # token rows of the full latent
    first_token: int                       # of the patch, in the full latent
    num_tokens: int                        # of the full latent


@dataclass
class ModelPatches:
    """ComfyUI's model patches in a forward, and what a ControlNet and the family add to it."""

    # block, by ComfyUI's name for it in patches -> its operation, see specs.Branch
    operations: dict = field(default_factory=dict)
    guided: tuple = ()                     # specs.Nag, applied in order to the output of every self-attention
    free_u: tuple = ()                     # specs.FreeU and Shrink of a U-Net, applied in order
    tiles: dict = field(default_factory=dict)          # specs.Branch.tiles of its self-attentions
    networks: tuple = ()                   # (specs.NetworkUse, injected_networks.Network), applied in order
    scores: Any = None                     # output: specs.Branch.scores of these images
    shuffled: dict = field(default_factory=dict)       # specs.Branch.shuffled, on the device
    # by insertion point (Family.control_shapes): residuals for this rank
    control: PinnedAhead = field(default_factory=lambda: PinnedAhead({}, CPU))
    biases: dict = field(default_factory=dict)         # attention -> Inputs.biases of this forward's image


@dataclass
class HookState:
    """State of the hooks during a forward."""

    # hooks.attention_dispatch.RunningAttention, while in an attention over several ranks
    attention: Any = None
    attentions: dict = field(default_factory=dict)     # name -> RunningAttention, of the running compiled block
    graph_breaks: dict = field(default_factory=dict)   # name -> forward, of the same, see ModelPlan.graph_breaks
    block: str = ""                        # path of the running compiled block of a U-Net
    text_attention: str = ""               # path of the running attention to the text, of a U-Net
    # running attention to the text of a transformer, if networks guide its output, until that is computed
    guided_attention: Any = None
    skip_sizes: dict = field(default_factory=dict)     # number of a skip -> its rows and columns, with a Shrink
    skips: dict = field(default_factory=dict)          # block -> its output, which a later block takes as its skip
    cuts: dict = field(default_factory=dict)           # this rank's shards of arguments that every block gets
    masks: dict = field(default_factory=dict)          # stream -> (B, T), True for tokens to attend to
    # of tensor_parallel.py: results for layers that have not run yet
    precomputed: dict = field(default_factory=dict)


@dataclass
class ForwardContext:
    """One forward on this rank: its blocks and tokens, its caches and communication, and ComfyUI's patches."""

    inputs: dict                           # arguments of the model's forward
    mesh: Mesh
    traffic: Traffic
    blocks: range                          # blocks of this rank
    num_blocks: int
    tokens: Tokens
    patch: Patch | None = None             # None: the full latent
    rows: ImageRows | None = None          # of the patch
    options: ForwardOptions = field(default_factory=ForwardOptions)
    backend: BackendUse = field(default_factory=BackendUse)       # options.backend as this rank has it
    key_values: KeyValues | None = None    # cache; None: attention is over this forward's tokens
    cached_blocks: range = range(0)
    step: tuple = ()                       # identifies this step of the run: its timesteps
    first_image: int = 0                   # in the batch of key_values
    num_images: int = 1
    references: ReferenceUse | None = None                     # use of cached reference keys and values
    exchange: Exchange | None = None       # of displaced patches
    # first row of each rank's band of a U-Net's latent, then the number of rows; None: every rank has all rows
    bands: tuple[int, ...] | None = None
    yield_turn: Callable = lambda: None    # called during an all-reduce: switches to an interleaved forward
    weights_streamed: bool = False         # some blocks' weights are streamed; layers compute for their own block only
    end_block: Callable = lambda block: None           # called after each block: lets interleaved forwards run it
    receive_message: Callable | None = None  # () -> the previous stage's message; for stages after the first
    patches: ModelPatches = field(default_factory=ModelPatches)
    state: HookState = field(default_factory=HookState)

    @property
    def is_plain(self):
        """True if blocks run as they are: one rank runs the complete model on the full latent, without patches."""
        patches = self.patches
        return (self.mesh.sequence_degree == 1 and self.patch is None and self.key_values is None
                and len(self.blocks) == self.num_blocks and not patches.control and not patches.operations
                and not patches.guided and not patches.networks and not patches.biases and self.references is None
                and self.options.sparse is None)

    @property
    def shards_attention(self):
        """True if attention is more than the attention backend on this rank's tokens."""
        patches = self.patches
        return (self.mesh.sequence_degree > 1 or self.key_values is not None or bool(self.state.masks)
                or bool(patches.guided) or bool(patches.biases) or self.references is not None
                or any(operation != "skip" for operation in patches.operations.values())
                or self.options.sparse is not None
                or any(network.has_two_speakers for _, network in patches.networks))

    @property
    def opens(self):
        """True if this forward has the first tokens of a step, and with them the text."""
        return opens_step(self.patch)

    @property
    def once(self):
        """Cache of outputs that are the same in several calls, {key: (moment, output)}; None: there is none."""
        if self.key_values is not None:
            return self.key_values.once
        return None if self.bands is None else self.exchange.once

    def moment(self, span, batch):
        """Identifies the calls with the same output of a cacheable module: a "step" of these images, or the "run"."""
        return self.first_image, batch, *(self.step if span == "step" else ())

    def caches(self, block):
        return self.key_values is not None and block in self.cached_blocks

    @property
    def num_image_tokens(self):
        """Number of tokens of the full image."""
        return self.tokens.counts["image"] if self.rows is None else self.rows.num_tokens

    @property
    def first_token(self):
        """Index of this forward's first image token in the full image."""
        return 0 if self.rows is None else self.rows.first_token


def tokens_of(family, mesh, shape, conditioning, patch=None):
    """The Tokens of a forward. shape: of the latent or its patch. Streams other than the image come with a step's first
    patch."""
    counts, left_out = family.token_counts(shape, conditioning, patch), {}
    if not opens_step(patch):
        left_out = {stream: count for stream, count in counts.items() if stream != "image"}
        counts |= dict.fromkeys(left_out, 0)
    return Tokens(counts, mesh.sequence_degree, mesh.sequence_rank, left_out, family.tokens_a_row(shape),
                  mesh.sequence_speeds)


def rows_of(family, shape, patch):
    """The ImageRows of a patch of a latent. shape: of the patch's latent."""
    axes = family.inputs.latent.patch
    size, counts = axes[patch.dim - 2], family.inputs.latent.counts(shape)
    num_token_rows = -(-patch.whole // size)
    a_row = family.inputs.latent.num_tokens(shape) // counts[patch.dim - 2]
    return ImageRows(patch, patch.dim - 2 + 3 - len(axes), num_token_rows * size, num_token_rows,
                     patch.start // size * a_row, num_token_rows * a_row)
