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
    """A ModuleList of transformer blocks, in execution order.

    file_prefix: what its blocks' tensors are prefixed with in ComfyUI's and the publisher's files. count: the argument
    of the diffusers class that says how many blocks there are. returns: what a block returns, in order; each a stream,
    or a tuple of streams that are one tensor. image_share: the part of a block's parameters that an image token passes
    through.
    control: which list of what a ControlNet gives ComfyUI's model adds to the image after each block, "input" or
    "output"; where there are skips, to those.
    patched: what ComfyUI's block patches call its blocks, where ComfyUI's model heeds them, "double" or "single".
    twins: a ModuleList of as many blocks, each of which the block of its number calls (Family.amend); it is where that
    one is.
    streams, attention, tokens, masks: as in ModelPlan, where this list's differ from the plan's. Where `streams`
    differ, the model's forward has merged or parted tensors in between.
    """

    name: str
    file_prefix: str
    count: str = "num_layers"
    returns: tuple = ("image",)
    image_share: float = 1.0
    control: str | None = None
    patched: str | None = None
    paired: str | None = None
    streams: dict[str, str | tuple[str, ...]] | None = None
    attention: dict[str, tuple[str, ...]] | None = None
    tokens: dict[str, TokenArgument | tuple[TokenArgument, ...]] | None = None
    masks: dict[str, tuple[str, ...]] | None = None

    @property
    def names(self):
        """Of the ModuleLists whose blocks make one block."""
        return (self.name,) if self.paired is None else (self.name, self.paired)


@dataclass(frozen=True)
class ModelPlan:
    """Where the tokens of a diffusers transformer are. All lists of blocks share what is said here, unless they say
    otherwise.

    streams: block arguments that carry hidden states (B, T, C) from block to block -> the stream, or the tuple of
    streams that follow one another in it. "image" is the latent's; others ("text") take part in self-attention beside
    it. A text that is only read by cross-attention is not a stream.
    attention: modules inside a block that mix tokens -> the streams they mix, in the order of their sequence. Those
    that are no block's hidden states, blocks get as one of their `tokens`.
    across: modules inside a block in which tokens of some streams read those of others -> (the streams of its queries,
    those of its keys).
    outputs: the streams that the forward makes its output of, after the last block.
    tokens: other block arguments with a token dim, such as rotary tables; a tuple where the argument is one.
    masks: block arguments that say which tokens may be attended to, (B, T) or (B, 1, 1, T) -> the streams of T, or ()
    where they never mask any. A block gets None in their place. What a mask says is not looked at, so one that masks
    nothing is heeded too.
    exact: modules whose leading arguments the forward rounds to half precision on the way -> the arguments of the
    forward they come from, and the factor it multiplies them by. They get them unrounded, as ComfyUI's models do.
    positions: modules outside the blocks that derive positions from the latent's shape -> how a patch's are had
    (positions.py).
    once: modules inside a block whose input is the same for all patches -> "step" (of time and pooled conditioning) or
    "run" (of text only). PipeFusion evaluates them once a step or run, not for each patch; its weights are read as
    often.
    once_outside: such modules outside the blocks, e.g. what refines the text; for a ModuleList, its modules.
    beside: lists of blocks that no stream passes by itself, which tensor parallelism spreads like the others; unsplit:
    linears of blocks, by their paths, that it leaves whole; of_heads: arguments of attentions that hold something for
    each head: in their last dim, or along dim 1 of four.
    needs_text: blocks cannot do without tokens of streams beside the image's: where there are none, they get one that
    nothing attends to.
    takes_output_patches: ComfyUI's model lets nodes change what its self-attention gives (attn1_output_patch), of the
    tokens that are no text.
    skips(num_blocks): in U-shaped models, blocks that take a `skip` -> the earlier block whose output it is.
    sums: modules inside a block that mix tokens by sums over them alone (linear attention). They call `total`, an
    argument of their forward that amend has given them, with the sums over this rank's tokens, for those over all.
    tokens_first: blocks take and return hidden states as (T, B, C).
    rows: the block argument that says how many rows of tokens there are; each rank then has whole rows. halos: modules
    inside a block that take (B, C, rows, columns) and read one row beyond each.
    outside: what names of tensors of blocks begin with that the forward uses outside of these too, so that every stage
    has them.
    """

    blocks: tuple[BlockList, ...]
    streams: dict[str, str | tuple[str, ...]]
    attention: dict[str, tuple[str, ...]]
    cross_attention: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("image",)
    tokens: dict[str, TokenArgument | tuple[TokenArgument, ...]] = field(default_factory=dict)
    masks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    exact: dict[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)
    positions: dict[str, Callable] = field(default_factory=dict)
    once: dict[str, str] = field(default_factory=dict)
    once_outside: dict[str, str] = field(default_factory=dict)
    unstaged_blocks: tuple[str, ...] = ()
    unsplit: tuple[str, ...] = ()
    of_heads: tuple[str, ...] = ()
    needs_text: bool = False
    takes_output_patches: bool = False
    skips: Callable = lambda num_blocks: {}
    sums: tuple[str, ...] = ()
    tokens_first: bool = False
    rows: str | None = None
    halos: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

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
    """Where a U-Net, which has no blocks that tokens pass, mixes the rows of its images: its convolutions, norms and
    self-attention.

    first: the convolution that reads the latent itself. self_attention: what modules that mix the pixels of an image
    are called.
    of_text: modules of the cross-attention whose input is the text alone. num_levels(config): sizes of the image, each
    half the last.
    skips(config): what goes from the way down to the way up, in the order in which it is made: [(channels, level)].
    """

    first: str
    self_attention: str
    of_text: tuple[str, ...]
    num_levels: Callable
    skips: Callable
