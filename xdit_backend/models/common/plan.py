"""The plan of a model, as data: which modules are its blocks, where tokens enter and leave, what attends.
Part of a Family."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TokenArgument:
    """A tensor with a token dim, holding all tokens of the streams one after the other (or a tuple of such tensors).

    ndim: it has tokens only where it has so many dims, such as times that differ from token to token. Where it has one
    row only, that is for all tokens.
    """

    dim: int
    streams: tuple[str, ...]
    ndim: int | None = None


@dataclass(frozen=True)
class BlockList:
    """A ModuleList of transformer blocks, in execution order. None in the last four: as the ModelPlan says."""

    name: str
    file_prefix: str                       # of its blocks' tensors in ComfyUI's and the publisher's files
    count: str = "num_layers"              # argument of the diffusers class that says how many blocks there are
    returns: tuple = ("image",)            # what a block returns, in order: streams, or tuples of joined streams
    image_fraction: float = 1.0               # part of a block's parameters that an image token passes through
    # which of a ControlNet's lists ComfyUI's model adds to the image after each block: "input" or "output". Where there
    # are skips, it is added to those.
    control: str | None = None
    patched: str | None = None             # what ComfyUI's block patches call these blocks, "double" or "single"
    # what its patches that add to the image after each of these blocks are called, such as "double_block"
    added: str | None = None
    # argument of the class, or rule under "_" of the family, that says how wide their image tokens are, where these are
    # not as wide as the family's
    width: str | None = None
    paired: str | None = None              # a ModuleList of as many blocks, each called by the block of its number
    # where these streams differ from those of the list before, the model's forward joins or separates tensors between
    streams: dict[str, str | tuple[str, ...]] | None = None
    attention: dict[str, tuple[str, ...]] | None = None
    tokens: dict[str, TokenArgument | tuple[TokenArgument | None, ...]] | None = None
    masks: dict[str, tuple[str, ...]] | None = None

    @property
    def names(self):
        """Of the ModuleLists whose blocks make one block."""
        return (self.name,) if self.paired is None else (self.name, self.paired)


@dataclass(frozen=True)
class ModelPlan:
    """Where the tokens of a diffusers transformer are. A BlockList may say otherwise of its own blocks.

    A stream is a kind of token that passes the blocks: "image" is the latent's; others, such as "text", take part in
    self-attention beside it. A text that only cross-attention reads is no stream.
    """

    blocks: tuple[BlockList, ...]
    # block argument that carries hidden states (B, T, C) -> the stream, or the streams that follow one another in it
    streams: dict[str, str | tuple[str, ...]]
    # self-attention inside a block (".": the block itself) -> its streams, in the order of the sequence. Those that are
    # no hidden states of the block come as one of `tokens`.
    attention: dict[str, tuple[str, ...]]
    # module inside a block where streams attend to others -> (streams of the queries, streams of the keys)
    cross_attention: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("image",)  # streams that the forward needs after the last block
    # other block arguments with a token dim, such as rotary tables; a tuple where the argument is one, None in it for
    # what has none
    tokens: dict[str, TokenArgument | tuple[TokenArgument | None, ...]] = field(default_factory=dict)
    # block argument that says which tokens may be attended to, (B, T) or (B, 1, 1, T) -> the streams of T; () where it
    # never masks any. A block gets None in its place.
    masks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # module whose first arguments diffusers' forward rounds to half precision -> (the forward's arguments that they
    # come from, the factor). It gets them unrounded, as in ComfyUI's models.
    full_precision_inputs: dict[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)
    # module outside the blocks that derives positions from the latent's shape -> how a patch gets its
    # (position_slicing.py)
    positions: dict[str, Callable] = field(default_factory=dict)
    # module inside a block whose input is the same for all patches -> "step" (time, pooled text) or "run" (text only).
    # PipeFusion evaluates it once in that span.
    cacheable: dict[str, str] = field(default_factory=dict)
    cacheable_outside: dict[str, str] = field(default_factory=dict)             # such modules outside the blocks
    unstaged_blocks: tuple[str, ...] = ()  # lists of blocks that no stage passes; tensor parallelism splits them too
    unsplit: tuple[str, ...] = ()          # linears of blocks, by path, that tensor parallelism leaves whole
    of_heads: tuple[str, ...] = ()         # arguments of attentions with heads in their last dim, or dim 1 of four
    # (attention of a block) -> how many tokens (before, after) its own one attends to; None: all. Of attention over one
    # stream alone: by the places of tokens in the whole, whatever mask the module makes of those it has
    window: Callable = lambda attention: None
    needs_text: bool = False               # blocks fail without text tokens, and get a placeholder instead
    takes_output_patches: bool = False     # ComfyUI's model runs attn1_output_patch on its image tokens
    # (number of blocks) -> {block that takes a skip: the block whose output it is}, of U-shaped models
    skips: Callable = lambda num_blocks: {}
    skip_name: str = "skip"                # the block argument that takes it
    # Modules inside a block that mix tokens by sums alone (linear attention). They call `total`, an argument that amend
    # has added to their forward, with the sums over this rank's tokens, to get those over all.
    token_reductions: tuple[str, ...] = ()
    # Modules inside a block, (B, T, C) to the same, that choose by numbers which of their parts compute (experts).
    # A compiled block calls them as they are.
    graph_breaks: tuple[str, ...] = ()
    # linear of a block whose input networks of ComfyUI's LLLite change -> what they call it
    lllite_targets: dict[str, str] = field(default_factory=dict)
    # of a block to which ComfyUI's InfiniteTalk adds what it finds in sound: the norm that is given the hidden states
    # before attention to the text, and that attention. (): ComfyUI's model heeds none
    audio_attention: tuple[str, ...] = ()
    tokens_first: bool = False             # blocks take and return hidden states as (T, B, C)
    row_count_argument: str | None = None  # block argument with the number of token rows; ranks have whole rows then
    halos: tuple[str, ...] = ()            # modules that take (B, C, rows, columns) and read one row beyond their own
    rereads_latent: bool = False           # the forward reads the latent after or between the blocks too
    # such a module after the blocks, of the whole picture -> its rows to a row of tokens. A patch reads what its
    # neighbours have given last.
    boundary_halos: dict[str, int] = field(default_factory=dict)
    # (block argument, streams): it is given (places of this rank's tokens, (T,); tokens of all), counted through the
    # whole streams one after the other, for what a token does by its place, such as reading its frame's sound
    token_index_argument: tuple[str, tuple[str, ...]] | None = None
    # stream of references, whose keys and values ComfyUI's Flux KV Cache keeps from a run's first call for its later
    # ones; None: its model does not heed that
    cached_references: str | None = None
    # prefixes of tensors of blocks that the forward also uses outside of blocks
    shared_parameters: tuple[str, ...] = ()

    @property
    def lists(self):
        """The block lists, each with all that is said of it here.
        What one tensor holds is always a tuple of streams."""
        unit = lambda stream: stream if isinstance(stream, tuple) else (stream,)  # noqa: E731
        lists = []
        for list_ in self.blocks:
            shared = {name: getattr(self, name) for name in ("streams", "attention", "tokens", "masks")
                      if getattr(list_, name) is None}
            list_ = dataclasses.replace(list_, **shared)
            lists.append(dataclasses.replace(list_, streams={name: unit(stream)
                                                             for name, stream in list_.streams.items()},
                                             returns=tuple(unit(stream) for stream in list_.returns)))
        return tuple(lists)

    @property
    def stream_names(self):
        """All streams of the model, e.g. {"image", "text"}."""
        return {name for list_ in self.lists for streams in (*list_.streams.values(), *list_.attention.values())
                for name in streams}


@dataclass(frozen=True)
class UNetPlan:
    """Where a U-Net mixes the rows of its images: its convolutions, norms and self-attention. It has no lists of blocks
    that tokens pass."""

    first: str                             # the convolution that reads the latent itself
    num_levels: Callable                   # (config) -> number of image sizes, each half the one before
    skips: Callable                        # (config) -> [(channels, level)] from the way down to the way up, in order


@dataclass(frozen=True)
class ReplicatedPlan:
    """Of a U-shaped network of ComfyUI's that each rank runs whole: images and branches alone are shared out. Its
    `down_blocks` and `up_blocks` are lists of lists of blocks, in execution order."""

    num_levels: Callable                   # (config) -> number of image sizes, each half the one before
    # (config) -> [channels] of what the forward takes of a ControlNet's list "input", in its order; each is made as
    # large as the image where it is added
    control: Callable = lambda config: []
    takes_output_patches: bool = False     # as of ModelPlan; none of those that ComfyUI's U-Nets heed either
    cached_references: str | None = None
    lllite_targets: dict[str, str] = field(default_factory=dict)
    rereads_latent: bool = False
