"""How a model is described: as data. One `Family` a file of this folder, in the words of describe.py, keys.py and positions.py."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..protocol.errors import UnsupportedError


@dataclass(frozen=True)
class TokenArgument:
    """A tensor with a token dim, holding all tokens of the streams one after the other (or a tuple of such tensors).

    ndim: it has tokens only where it has so many dims, such as times that differ from token to token. Where it has one row only, that
    is for all tokens.
    """

    dim: int
    streams: tuple[str, ...]
    ndim: int | None = None


@dataclass(frozen=True)
class BlockList:
    """A ModuleList of transformer blocks, in execution order.

    in_file: what its blocks' tensors are prefixed with in ComfyUI's and the publisher's files. count: the argument of the
    diffusers class that says how many blocks there are. returns: what a block returns, in order; each a stream, or a tuple
    of streams that are one tensor. image_share: the part of a block's parameters that an image token passes through.
    control: which list of what a ControlNet gives ComfyUI's model adds to the image after each block, "input" or "output"; where there
    are skips, to those.
    patched: what ComfyUI's block patches call its blocks, where ComfyUI's model heeds them, "double" or "single".
    twins: a ModuleList of as many blocks, each of which the block of its number calls (Family.amend); it is where that one is.
    streams, attention, tokens, masks: as in ModelPlan, where this list's differ from the plan's. Where `streams` differ, the
    model's forward has merged or parted tensors in between.
    """

    name: str
    in_file: str
    count: str = "num_layers"
    returns: tuple = ("image",)
    image_share: float = 1.0
    control: str | None = None
    patched: str | None = None
    twins: str | None = None
    streams: dict[str, str | tuple[str, ...]] | None = None
    attention: dict[str, tuple[str, ...]] | None = None
    tokens: dict[str, TokenArgument | tuple[TokenArgument, ...]] | None = None
    masks: dict[str, tuple[str, ...]] | None = None

    @property
    def names(self):
        """Of the ModuleLists whose blocks make one block."""
        return (self.name,) if self.twins is None else (self.name, self.twins)


@dataclass(frozen=True)
class ModelPlan:
    """Where the tokens of a diffusers transformer are. All lists of blocks share what is said here, unless they say otherwise.

    streams: block arguments that carry hidden states (B, T, C) from block to block -> the stream, or the tuple of streams
    that follow one another in it. "image" is the latent's; others ("text") take part in self-attention beside it. A text
    that is only read by cross-attention is not a stream.
    attention: modules inside a block that mix tokens -> the streams they mix, in the order of their sequence. Those that are
    no block's hidden states, blocks get as one of their `tokens`.
    across: modules inside a block in which tokens of some streams read those of others -> (the streams of its queries, those of its keys).
    outputs: the streams that the forward makes its output of, after the last block.
    tokens: other block arguments with a token dim, such as rotary tables; a tuple where the argument is one.
    masks: block arguments that say which tokens may be attended to, (B, T) or (B, 1, 1, T) -> the streams of T, or () where
    they never mask any. A block gets None in their place. What a mask says is not looked at, so one that masks nothing is heeded too.
    exact: modules whose leading arguments the forward rounds to half precision on the way -> the arguments of the
    forward they come from, and the factor it multiplies them by. They get them unrounded, as ComfyUI's models do.
    positions: modules outside the blocks that derive positions from the latent's shape -> how a patch's are had (positions.py).
    once: modules inside a block whose input is the same for all patches -> "step" (of time and pooled conditioning) or "run"
    (of text only). PipeFusion evaluates them once a step or run, not for each patch; its weights are read as often.
    once_outside: such modules outside the blocks, e.g. what refines the text; for a ModuleList, its modules.
    beside: lists of blocks that no stream passes by itself, which tensor parallelism spreads like the others; unsplit: linears of
    blocks, by their paths, that it leaves whole; of_heads: arguments of attentions that hold something for each head: in their
    last dim, or along dim 1 of four.
    needs_text: blocks cannot do without tokens of streams beside the image's: where there are none, they get one that nothing attends to.
    heeds_output: ComfyUI's model lets nodes change what its self-attention gives (attn1_output_patch), of the tokens that are no text.
    skips(num_blocks): in U-shaped models, blocks that take a `skip` -> the earlier block whose output it is.
    sums: modules inside a block that mix tokens by sums over them alone (linear attention). They call `total`, an argument of their
    forward that amend has given them, with the sums over this rank's tokens, for those over all.
    tokens_first: blocks take and return hidden states as (T, B, C).
    rows: the block argument that says how many rows of tokens there are; each rank then has whole rows. halos: modules inside a block
    that take (B, C, rows, columns) and read one row beyond each.
    outside: what names of tensors of blocks begin with that the forward uses outside of these too, so that every stage has them.
    """

    blocks: tuple[BlockList, ...]
    streams: dict[str, str | tuple[str, ...]]
    attention: dict[str, tuple[str, ...]]
    across: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("image",)
    tokens: dict[str, TokenArgument | tuple[TokenArgument, ...]] = field(default_factory=dict)
    masks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    exact: dict[str, tuple[tuple[str, ...], float]] = field(default_factory=dict)
    positions: dict[str, Callable] = field(default_factory=dict)
    once: dict[str, str] = field(default_factory=dict)
    once_outside: dict[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    unsplit: tuple[str, ...] = ()
    of_heads: tuple[str, ...] = ()
    needs_text: bool = False
    heeds_output: bool = False
    skips: Callable = lambda num_blocks: {}
    sums: tuple[str, ...] = ()
    tokens_first: bool = False
    rows: str | None = None
    halos: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    @property
    def lists(self):
        """The block lists, each with all that is said of it here. What one tensor holds is always a tuple of streams."""
        unit = lambda stream: stream if isinstance(stream, tuple) else (stream,)  # noqa: E731
        lists = []
        for list_ in self.blocks:
            shared = {name: getattr(self, name) for name in ("streams", "attention", "tokens", "masks") if getattr(list_, name) is None}
            list_ = dataclasses.replace(list_, **shared)
            lists.append(dataclasses.replace(list_, streams={name: unit(stream) for name, stream in list_.streams.items()},
                                             returns=tuple(unit(stream) for stream in list_.returns)))
        return tuple(lists)

    @property
    def stream_names(self):
        """All streams of the model, e.g. {"image", "text"}."""
        return {name for list_ in self.lists for streams in (*list_.streams.values(), *list_.attention.values()) for name in streams}


@dataclass(frozen=True)
class RowPlan:
    """Where a U-Net, which has no blocks that tokens pass, mixes the rows of its images: its convolutions, norms and self-attention.

    first: the convolution that reads the latent itself. self_attention: what modules that mix the pixels of an image are called.
    of_text: modules of the cross-attention whose input is the text alone. num_levels(config): sizes of the image, each half the last.
    skips(config): what goes from the way down to the way up, in the order in which it is made: [(channels, level)].
    """

    first: str
    self_attention: str
    of_text: tuple[str, ...]
    num_levels: Callable
    skips: Callable
    blocks: tuple = ()
    outside: tuple[str, ...] = ()
    rows: None = None
    stream_names: frozenset = frozenset(("image",))


@dataclass(frozen=True)
class Tiny:
    """The family at a size for tests: arguments of the diffusers class; ComfyUI's class ("module:Class") and its arguments.

    What the tensors of a diffusers folder are called in ComfyUI, that class tells (nodes/bridge/folders.py); `more` are
    arguments with which it has tensors that it lacks without. frames: of a latent that has a dim for them. detected: name in
    comfy.supported_models whose detection from a file would take published widths for granted.
    """

    config: dict
    native: str = ""
    arguments: dict = field(default_factory=dict)
    frames: int = 3
    detected: str | None = None
    more: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Sampled:
    """How ComfyUI is to sample a family that it has no model of (nodes/bridge/own_model.py). Such models are diffusers folders.

    prediction: name in comfy.model_base.ModelType. settings: of ComfyUI's sampling; those of the model's own scheduler. latent_format:
    name in comfy.latent_formats; latent: what is otherwise than in that. memory: ComfyUI's memory_usage_factor. labels: argument of the
    diffusers class that says how many classes there are, of a model that is given a class and no text.
    """

    prediction: str
    settings: dict
    latent_format: str
    latent: dict = field(default_factory=dict)
    memory: float = 1.0
    labels: str | None = None


@dataclass(frozen=True)
class Family:
    """Everything this project knows of one model family. shapes: {name of a tensor in a file: its shape}.

    title: what a person reads in tables. transformer: class name in diffusers. recognise(shapes): is a file with such tensors
    ours? refusals: functions of shapes, each says why a file of this family cannot be run, or None; refused_beside: tensors in or
    beside the diffusion model -> why a file with them cannot be run. config(shapes): arguments of the diffusers class, from the header
    alone. convert(tensors, config): from the file's names to diffusers'; some tensors are on the meta device.
    latent: describe.Packed or describe.Whole, how latents become hidden states and back; sign: of the prediction.
    arguments: of the diffusers forward -> a function of describe.Asked, or what it is. time_scale: ComfyUI's timestep at sigma 1.
    conditioning: what is understood of ComfyUI's arguments to a diffusion model -> the argument of the diffusers class that says
    how wide it is (None: it has a shape of its own); ignored: what ComfyUI's model itself ignores too.
    choices: conditioning that is a word -> the words that are understood, and the word each comes to.
    heeded_with: conditioning -> the conditioning without which ComfyUI's model ignores it.
    parts: of a model whose latents have several: what those after the first are called, as conditioning -> a function that takes the
    forward's output of it back to the part. The forward's output is a tuple then. parted(latents, times, config): of ComfyUI's
    call of such a model: (the first part, its timestep, {name: tensor of this call alone}).
    lengths: streams beside the image -> a function of the conditioning that says how many tokens. "text": those of its context.
    stream_widths: streams whose tokens are not as wide as the image's -> the argument of the diffusers class that says how wide.
    multiple: image tokens are padded to a multiple of this, by a stream "pad" after them.
    amend(model, config): make the model compute as ComfyUI's does, where diffusers' does not; before it has weights. What it remembers of a
    forward until its blocks have run is in a ContextVar: another forward may take turns with it there.
    by_tensors: arguments of the diffusers class that ComfyUI tells by the tensors alone; a folder's config.json is not asked.
    values: tensors whose values tell ComfyUI how a model is sampled; they may stand beside the diffusion model in a file.
    unrounded: modules and parameters that ComfyUI does not hold in a smaller type than it computes in. too_small: types that its numbers
    do not fit in, so that it is not computed in them.
    prepares: what names of tensors begin with that ComfyUI prepares the text with, once, before LoRA hooks are in effect.
    settings: what ComfyUI's model heeds of a file's metadata -> the values that are run, first what holds where it says none; the config
    has them under "_" and the name. beyond(arguments): what ComfyUI's arguments ask of its model that ours does not do; or None.
    rope_options(arguments): what ComfyUI's BaseModel of the family itself puts there, of ComfyUI's arguments to its model; or None.
    marks: of diffusers folders: what config.json says -> the tensor by which files say it. further: parts beside the transformer that
    belong to it -> a function of a tensor's name there: ComfyUI's name, which begins with one of `prepares`, or None.
    in_folder(checkpoints.folder.Folder): what such a folder says of the settings, or None; heeded: arguments of the diffusers class that
    it tells it by.
    num_heads, num_key_heads, width, num_channels, in_channels: of the attention (None: a U-Net, whose tokens nothing shares out; as many:
    None), of a token, of a prediction, of what the class takes; functions of config. pixels: frames, rows and columns of the picture that a
    latent's pixel stands for, likewise. cfg: what the table says of it. sampled: of a family that ComfyUI has no model of.
    refused: methods that it cannot have, as degrees call them ("ring") -> why, after "because".
    """

    name: str
    title: str
    transformer: str
    plan: ModelPlan | RowPlan
    recognise: Callable
    config: Callable
    convert: Callable
    latent: Any
    arguments: dict
    conditioning: dict[str, str | None]
    tiny: Tiny
    ignored: tuple[str, ...] = ()
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    heeded_with: dict[str, str] = field(default_factory=dict)
    refusals: tuple[Callable, ...] = ()
    refused_beside: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, Callable] = field(default_factory=dict)
    stream_widths: dict[str, str] = field(default_factory=dict)
    multiple: int = 1
    sign: float = 1.0
    time_scale: float = 1000.0
    cfg: str = "yes"
    sampled: Sampled | None = None
    refused: dict[str, str] = field(default_factory=dict)
    amend: Callable = lambda model, config: None
    by_tensors: tuple[str, ...] = ()
    unrounded: tuple[str, ...] = ()
    too_small: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    prepares: tuple[str, ...] = ()
    settings: dict[str, tuple] = field(default_factory=dict)
    beyond: Callable = lambda arguments: None
    rope_options: Callable = lambda arguments: None
    marks: dict[str, str] = field(default_factory=dict)
    further: dict[str, Callable] = field(default_factory=dict)
    in_folder: Callable = lambda folder: None
    heeded: tuple[str, ...] = ()
    parts: dict[str, Callable] = field(default_factory=dict)
    parted: Callable | None = None
    num_heads: Callable = lambda config: config["num_attention_heads"]
    num_key_heads: Callable = lambda config: None
    width: Callable = lambda config: config["num_attention_heads"] * config["attention_head_dim"]
    num_channels: Callable = lambda config: config.get("out_channels") or config["in_channels"]
    in_channels: Callable = lambda config: config["in_channels"]
    pixels: Callable = lambda config: (1, 8, 8)

    def taken_channels(self, config):
        """Channels of what ComfyUI hands to its model: those of the latent, and of pictures that it adds to them."""
        return self.latent.channels(self.in_channels(config))

    def refuse(self, shapes, beside=()):
        """Why a file of this family cannot be run; None where it can. beside: names of what else is in it."""
        return next((reason for refusal in self.refusals if (reason := refusal(shapes))),
                    next((reason for name, reason in self.refused_beside.items() if name in shapes or name in beside), None))

    def tensors(self, conditioning):
        """What is understood of ComfyUI's conditioning as tensors, which is what workers take.

        A number is a tensor of one. Of a list, `name.0` and so on; a word is part of a name. Raises UnsupportedError for words that
        are not understood.
        """
        found = {}
        for name in self.conditioning:
            value = conditioning.get(name) if conditioning.get(self.heeded_with.get(name, name)) is not None else None
            if isinstance(value, (list, tuple)):
                found |= {f"{name}.{number}": _as_tensor(each) for number, each in enumerate(value)}
            elif isinstance(value, str):
                words = self.choices.get(name, {})
                if value not in words:
                    raise UnsupportedError(f"xDiT runs {self.name} with {name} = {' or '.join(words) or 'nothing'}, and "
                                           f"this workflow's conditioning has {value}. Change it in the node that sets it, or use Load "
                                           f"Diffusion Model.")
                found[f"{name}.{words[value]}"] = torch.zeros(1)
            elif value is not None:
                found[name] = _as_tensor(value)
        return found

    def inputs(self, latent, timestep, conditioning, config, patch=None):
        """Arguments of the diffusers forward. timestep: as ComfyUI gives it, (B,), or one for each frame or token of the
        whole latent, (B, N). patch: a messages.Patch where the latent is one."""
        asked = Asked(latent, timestep, conditioning, config, patch)
        return {name: rule(asked) if callable(rule) else rule for name, rule in self.arguments.items()}

    def prediction(self, output, latent):
        """The forward's output as the latent's rows and columns, in ComfyUI's sign."""
        prediction = self.latent.unpack(output[0] if self.parts else output, latent)
        return prediction if self.sign == 1 else prediction * self.sign

    def part_predictions(self, output):
        """The forward's output of the latent's parts after the first: {name: like the part}."""
        return {name: unpack(tokens) * self.sign for (name, unpack), tokens in zip(self.parts.items(), output[1:])} if self.parts else {}

    def token_counts(self, shape, conditioning, patch=None):
        """Tokens of every stream: {"image": ..., "text": ...}. shape: of the latent or the patch; conditioning: of a whole forward."""
        whole = [patch.whole if patch is not None and dim == patch.dim else length for dim, length in enumerate(shape)]
        streams, lengths = self.plan.stream_names, {
            "text": lambda conditioning: conditioning["context"].shape[1],
            "pad": lambda conditioning: -self.latent.num_tokens(whole) % self.multiple} | self.lengths
        return {"image": self.latent.num_tokens(shape)} | {
            stream: length(conditioning) for stream, length in lengths.items() if stream in streams}

    def stream_width(self, config, streams):
        """Of a token of these streams, which are one tensor."""
        name = next((self.stream_widths[stream] for stream in streams if stream in self.stream_widths), None)
        return self.width(config) if name is None else config[name]

    def control_shapes(self, config, shape):
        """{place: (T, C), or (C, rows, columns) of a U-Net}: what a ControlNet may add where, to each image of a latent of this shape.

        A place is a list of what ComfyUI's ControlNets give, and the number of the block there: "output.3". {} where ComfyUI's model takes
        none.
        """
        if self.by_rows:
            skips = [(channels, *(-(-length // 2 ** level) for length in shape[2:])) for channels, level in self.plan.skips(config)]
            return {f"{name}.{number}": skip for name in ("input", "output") for number, skip in enumerate(skips)} | {"middle.0": skips[-1]}
        tokens = self.latent.num_tokens(shape), self.width(config)
        skips = self.plan.skips(self.num_blocks(config))
        return {f"{list_.control}.{number}": tokens for list_ in self.plan.blocks if list_.control
                for number in (sorted(skips.values()) if skips else range(config[list_.count]))}

    def patch_size(self, config):
        """Latent pixels of a token along each dim."""
        return self.latent.patch

    @property
    def by_rows(self):
        """Is it a U-Net?"""
        return isinstance(self.plan, RowPlan)

    def num_blocks(self, config):
        return sum(config[list_.count] for list_ in self.plan.blocks)


def _as_tensor(value):
    return value if torch.is_tensor(value) else torch.tensor([float(value)])


@dataclass(frozen=True)
class Asked:
    """One call of a model, as ComfyUI makes it: what the rules of `Family.arguments` read."""

    latent: object
    timestep: object
    conditioning: dict
    config: dict
    patch: object = None
