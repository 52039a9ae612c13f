"""Model plans: which modules are blocks, where tokens enter and leave them, and which modules compute attention."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from .tp_plan import Fused


@dataclass(frozen=True)
class TokenArgument:
    """A tensor with a token dim, which holds all tokens of the streams in this order (or a tuple of such tensors).

    ndim: the tensor has tokens only if it has this many dims, such as timesteps that differ between tokens. A tensor
    with one row along dim applies to all tokens.
    """

    dim: int
    streams: tuple[str, ...]
    ndim: int | None = None


@dataclass(frozen=True)
class BlockList:
    """A ModuleList of transformer blocks, in execution order.

    The last three fields override those of the ModelPlan for this list; None: as the ModelPlan has them.
    """

    name: str                              # attribute of the model
    file_prefix: str                       # of the blocks' tensors in ComfyUI's and the publisher's files
    count: str = "num_layers"              # config argument with the number of blocks
    # what a block returns, in order: streams, or tuples of streams that are joined in one tensor
    returns: tuple = ("image",)
    # fraction of a block's parameters that an image token passes through, for the cost model (SD3: 0.5)
    image_fraction: float = 1.0
    # list of a ControlNet's output that ComfyUI's model adds to the image tokens after each block: "input" or "output";
    # None: it adds none. In models with skips it is added to the skips.
    control: str | None = None
    # kind of these blocks in ComfyUI's block patches ("patches_replace"): "double" or "single"
    patched: str | None = None
    # kind of ComfyUI's patches that add to the image tokens after each of these blocks, such as "double_block"
    added: str | None = None
    # config argument with the width of the image tokens in these blocks, if not the family's width (PixelDiT)
    width: str | None = None
    # another ModuleList of the same length, whose module i block i calls (TripoSplat)
    paired: str | None = None
    # where these streams differ from those of the list before, the forward joins or splits tensors between the lists
    streams: dict[str, str | tuple[str, ...]] | None = None
    attention: dict[str, tuple[str, ...]] | None = None
    tokens: dict[str, TokenArgument | tuple[TokenArgument | None, ...]] | None = None

    @property
    def names(self):
        """Names of the ModuleLists whose modules together make one block."""
        return (self.name,) if self.paired is None else (self.name, self.paired)


@dataclass(frozen=True)
class ModelPlan:
    """Location of the tokens in a transformer: its blocks, their token arguments and their attention.

    A stream is a kind of token that passes through the blocks: "image" is the latent's; others, such as "text", take
    part in self-attention with it. Text that only cross-attention reads is no stream. The first three fields are needed
    by every family, `tokens` and `positions` by every family with position embeddings; a comment names an example of
    the others. What one or two families need is an attribute or a method that a subclass in the model's file overrides.
    """

    hooks: ClassVar = "transformer"        # key in hooks.install.HOOKS
    is_unet: ClassVar = False              # a U-shaped network, without lists of blocks that tokens pass end to end
    takes_unet_patches: ClassVar = False   # ComfyUI's model applies the model patches that nodes make for U-Nets
    methods: ClassVar = ("cfg", "data", "ulysses", "ring", "tensor")           # to suggest in place of others
    # (config) -> number of image sizes, each half the one before; None: all blocks have the same tokens
    num_levels: ClassVar = None
    nested_lists: ClassVar = ()            # attributes of the model that are lists of lists of blocks

    # --- blocks, streams and attention ---
    blocks: tuple[BlockList, ...]
    # block argument with hidden states (B, T, C) -> its stream, or the streams that are joined in it, in order
    streams: dict[str, str | tuple[str, ...]]
    # self-attention module inside a block (".": the block itself) -> its streams, in the order of the sequence. Streams
    # that are no hidden states of the block are one of `tokens`.
    attention: dict[str, tuple[str, ...]]
    outputs: tuple[str, ...] = ("image",)  # streams that the forward needs after the last block
    # other block arguments with a token dim, such as rotary tables. For an argument that is a tuple, a tuple with None
    # for elements without tokens.
    tokens: dict[str, TokenArgument | tuple[TokenArgument | None, ...]] = field(default_factory=dict)
    # block argument that masks keys, (B, T) or (B, 1, 1, T) -> the streams of T; (): it never masks any. Blocks receive
    # None in its place.
    masks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # module outside the blocks that derives positions from the size of the latent -> its rule for a patch, which
    # position_slicing.py describes
    positions: dict[str, Callable] = field(default_factory=dict)
    needs_text: bool = False               # blocks fail without text tokens, and receive a placeholder (Qwen-Image)

    # --- modules that need more than their own tokens ---
    # modules inside a block that mix tokens by sums alone (linear attention: Sana). They call `total`, an argument that
    # adapt_model adds to their forward, to turn sums over this rank's tokens into sums over all tokens.
    token_reductions: tuple[str, ...] = ()
    # modules inside a block on (B, C, rows, columns) that read one row beyond their own on each side (Sana)
    halos: tuple[str, ...] = ()
    # (block argument, streams): the block receives (token indices of this rank, (T,); number of all tokens), counted
    # over the full streams in this order, for computation that depends on a token's position, such as reading the audio
    # of its frame (Wan HuMo)
    token_index_argument: tuple[str, tuple[str, ...]] | None = None
    # the forward reads the latent after or between the blocks too; every pipeline stage then receives it (PixelDiT)
    rereads_latent: bool = False

    # --- caching and precision ---
    # module inside a block whose input is the same for all patches -> "step" (timestep, pooled text) or "run" (text
    # only). PipeFusion evaluates it once in that span.
    cacheable: dict[str, str] = field(default_factory=dict)
    cacheable_outside: dict[str, str] = field(default_factory=dict)             # such modules outside the blocks
    # stream of references whose keys and values ComfyUI's Flux KV Cache node computes in the first step and reuses in
    # later ones; None: ComfyUI's model does not support it (Flux.2)
    cached_references: str | None = None
    # module whose first arguments diffusers' forward rounds to half precision -> (the forward's arguments that they are
    # computed from, factor). The module receives them unrounded, as in ComfyUI's models.
    full_precision_inputs: dict[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)

    # --- weights and tensor parallelism ---
    # pattern of a linear's path in a block -> style, in addition to DEFAULT_TP_PLAN and before it (tp_plan.py)
    tp_plan: dict[str, str | Fused] = field(default_factory=dict)
    of_heads: tuple[str, ...] = ()         # attention arguments with heads in their last dim, or dim 1 of four
    # block lists that are not in `blocks` and no pipeline stage runs; tensor parallelism splits them too (Z-Image)
    unstaged_blocks: tuple[str, ...] = ()

    # --- model patches of ComfyUI ---
    takes_output_patches: bool = False     # ComfyUI's model runs attn1_output_patch on its image tokens
    # linear of a block whose input ComfyUI's LLLite networks change -> their name for it (Anima)
    lllite_targets: dict[str, str] = field(default_factory=dict)

    # --- attributes that a subclass overrides ---
    # attention module inside a block -> (streams of the queries, streams of the keys) (LTX-2: audio to video)
    cross_attention: ClassVar[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {}
    tokens_first: ClassVar = False         # blocks take and return hidden states as (T, B, C) (ERNIE-Image)
    skip_name: ClassVar = "skip"           # block argument that takes a skip
    # block argument with the number of token rows; each rank then has full rows (Sana: "height")
    row_count_argument: ClassVar[str | None] = None
    # module after the blocks on (B, C, rows, columns) that reads one row beyond its own on each side -> rows per row of
    # tokens (Chroma Radiance). A patch reads the rows that its neighbours computed last.
    boundary_halos: ClassVar[dict[str, int]] = {}
    # (module outside the blocks, (its positional arguments) -> number of image tokens): the forward calls this module
    # once or several times, each time for tokens of its own, which pass through all blocks (MiniMax Music 3)
    passes: ClassVar[tuple[str, Callable] | None] = None
    # modules inside a block, (B, T, C) to the same, that select which of their submodules compute by values (experts:
    # HiDream). They run outside the compiled graph of a block.
    graph_breaks: ClassVar[tuple[str, ...]] = ()
    # prefixes of block tensors that the forward also uses outside the blocks (DiT)
    shared_parameters: ClassVar[tuple[str, ...]] = ()
    # (norm, attention) of a block to whose result ComfyUI's InfiniteTalk adds audio attention: the norm that receives
    # the hidden states before the text cross-attention, and that cross-attention (Wan). (): not supported.
    audio_attention: ClassVar[tuple[str, ...]] = ()
    # attention of a block to the text, with diffusers' names to_k, norm_k and to_v, whose first call attends to the
    # text alone, or that has a function changed_text(query, out) for it: Normalized Attention Guidance changes the
    # output (Wan). "": not supported.
    text_attention: ClassVar = ""

    def window(self, attention):
        """Return the number of tokens (before, after) its own that a token attends to in this attention module of a
        block; None: all (ACE-Step 1.5). The distance is that of token indices in the full sequence of one stream, and
        replaces the mask that the module computes for its own tokens."""

    def skips(self, num_blocks):
        """Return {block that takes a skip: block whose output it is} of a U-shaped model (Hunyuan-DiT)."""
        return {}

    @property
    def lists(self):
        """The block lists with the plan's defaults filled in, and the streams of each tensor always as a tuple."""
        unit = lambda stream: stream if isinstance(stream, tuple) else (stream,)  # noqa: E731
        lists = []
        for list_ in self.blocks:
            shared = {name: getattr(self, name) for name in ("streams", "attention", "tokens")
                      if getattr(list_, name) is None}
            list_ = dataclasses.replace(list_, **shared)
            lists.append(dataclasses.replace(list_, streams={name: unit(stream)
                                                             for name, stream in list_.streams.items()},
                                             returns=tuple(unit(stream) for stream in list_.returns)))
        return tuple(lists)

    def is_outside(self, name):
        """Whether a tensor is of no block of the lists, or used outside of it too."""
        return name.startswith(self.shared_parameters)

    def has_one_output_a_skip(self, num_blocks):
        """Whether a ControlNet needs one output for each skip connection."""
        return bool(self.skips(num_blocks))

    def takes_controlnets(self, config):
        """Whether ComfyUI's model adds the output of a ControlNet."""
        return any(list_.control for list_ in self.blocks)

    def control_shapes(self, family, config, shape):
        """See Family.control_shapes."""
        tokens = family.inputs.latent.num_tokens(shape), family.width(config)
        skips = self.skips(family.num_blocks(config))
        return {f"{list_.control}.{number}": tokens for list_ in self.blocks if list_.control
                for number in (sorted(skips.values()) if skips else range(config[list_.count]))}

    def patched_blocks(self, config, kind):
        """Names of the blocks that ComfyUI's patches of a kind ("dit", "attn1") can replace."""
        return {f"{list_.patched}_block.{number}" for list_ in self.blocks if list_.patched and kind == "dit"
                for number in range(config[list_.count])}

    @property
    def stream_names(self):
        """All streams of the model, e.g. {"image", "text"}."""
        return {name for list_ in self.lists for streams in (*list_.streams.values(), *list_.attention.values())
                for name in streams}


class UShapedPlan:
    """Interface of UNetPlan and ReplicatedPlan in common with ModelPlan: networks without lists of blocks that tokens
    pass from end to end."""

    is_unet = True
    takes_unet_patches = False
    methods = "cfg", "data", "displaced"
    takes_output_patches = rereads_latent = False
    blocks = lists = nested_lists = unstaged_blocks = audio_attention = ()
    stream_names = frozenset(("image",))
    cross_attention = positions = cacheable = cacheable_outside = lllite_targets = MappingProxyType({})
    row_count_argument = cached_references = passes = None
    text_attention = ""

    def is_outside(self, name):
        """See ModelPlan.is_outside."""
        return True

    def has_one_output_a_skip(self, num_blocks):
        """See ModelPlan.has_one_output_a_skip."""
        return False


@dataclass(frozen=True)
class UNetPlan(UShapedPlan):
    """Structure of a U-Net, which mixes the rows of its images in convolutions, norms and self-attention."""

    hooks: ClassVar = "unet"
    takes_unet_patches: ClassVar = True
    takes_output_patches: ClassVar = True

    first: str                             # the convolution that reads the latent
    num_levels: Callable                   # (config) -> number of image sizes, each half the one before
    skips: Callable                        # (config) -> [(channels, level)] of the skips, in the encoder's order

    def takes_controlnets(self, config):
        """See ModelPlan.takes_controlnets."""
        return True

    def control_shapes(self, family, config, shape):
        """See Family.control_shapes."""
        skips = [(channels, *(-(-length // 2 ** level) for length in shape[2:]))
                 for channels, level in self.skips(config)]
        return {f"{name}.{number}": skip for name in ("input", "output")
                for number, skip in enumerate(skips)} | {"middle.0": skips[-1]}

    def patched_blocks(self, config, kind):
        """See ModelPlan.patched_blocks."""
        depths = config["transformer_layers_per_block"]
        return {"middle.0", *(f"middle.0.{number}" for number in range(depths[-1]))} if kind == "attn1" else set()


@dataclass(frozen=True)
class ReplicatedPlan(UShapedPlan):
    """Structure of a U-shaped network of ComfyUI's that each rank runs in full: only images and branches are split
    across ranks (Stable Cascade). Its `down_blocks` and `up_blocks` are lists of lists of blocks, in execution order.
    """

    hooks: ClassVar = "replicated"
    nested_lists: ClassVar = ("down_blocks", "up_blocks")

    num_levels: Callable                   # (config) -> number of image sizes, each half the one before
    # (config) -> [channels] of the entries that the forward takes from a ControlNet's list "input", in order; each is
    # resized to the image where it is added
    control: Callable = lambda config: []

    def takes_controlnets(self, config):
        """See ModelPlan.takes_controlnets."""
        return bool(self.control(config))

    def control_shapes(self, family, config, shape):
        """See Family.control_shapes."""
        return {f"input.{number}": (channels, None, None) for number, channels in enumerate(self.control(config))}

    def patched_blocks(self, config, kind):
        """See ModelPlan.patched_blocks."""
        return set()
