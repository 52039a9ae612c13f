"""A family of models, as data: all that its file in models/ says, in the words of describe.py, keys.py,
plan.py and positions.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..protocol.errors import UnsupportedError
from .plan import ModelPlan, UNetPlan


@dataclass(frozen=True)
class ConfigRules:
    """A config of diffusers from {name: shape} of a file: {key: a function of the shapes, or the value itself}."""

    rules: dict

    def __call__(self, shapes):
        return {key: rule(shapes) if callable(rule) else rule for key, rule in self.rules.items()}


@dataclass(frozen=True)
class Tiny:
    """The family at a size for tests: arguments of the diffusers class; ComfyUI's class ("module:Class") and its
    arguments.

    What the tensors of a diffusers folder are called in ComfyUI, that class tells (nodes/bridge/model/folders.py);
    `more` are arguments with which it has tensors that it lacks without. frames: of a latent that has a dim for them.
    detected: name in comfy.supported_models whose detection from a file would take published widths for granted.
    """

    config: dict
    native: str = ""
    arguments: dict = field(default_factory=dict)
    frames: int = 3
    detected: str | None = None
    more: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Sampled:
    """How ComfyUI is to sample a family that it has no model of (nodes/bridge/model/own_model.py). Such models are
    diffusers folders.

    prediction: name in comfy.model_base.ModelType. settings: of ComfyUI's sampling; those of the model's own scheduler.
    latent_format: name in comfy.latent_formats; latent: what is otherwise than in that. memory: ComfyUI's
    memory_usage_factor. labels: argument of the diffusers class that says how many classes there are, of a model that
    is given a class and no text.
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

    title: what a person reads in tables. transformer: class name in diffusers. recognise(shapes): is a file with such
    tensors ours? refusals: functions of shapes, each says why a file of this family cannot be run, or None;
    refused_tensors: tensors in or beside the diffusion model -> why a file with them cannot be run. config(shapes):
    arguments of the diffusers class, from the header alone. convert(tensors, config): from the file's names to
    diffusers'; some tensors are on the meta device.
    latent: describe.Packed or describe.Unpacked, how latents become hidden states and back; sign: of the prediction.
    arguments: of the diffusers forward -> a function of describe.CallInputs, or what it is. time_scale: ComfyUI's
    timestep at sigma 1.
    conditioning: what is understood of ComfyUI's arguments to a diffusion model -> the argument of the diffusers class
    that says how wide it is (None: it has a shape of its own); ignored: what ComfyUI's model itself ignores too.
    choices: conditioning that is a word -> the words that are understood, and the word each comes to.
    only_with: conditioning -> the conditioning without which ComfyUI's model ignores it.
    parts: of a model whose latents have several: what those after the first are called, as conditioning -> a function
    that takes the forward's output of it back to the part. The forward's output is a tuple then. parted(latents, times,
    config): of ComfyUI's call of such a model: (the first part, its timestep, {name: tensor of this call alone}).
    lengths: streams beside the image -> a function of the conditioning that says how many tokens. "text": those of its
    context.
    stream_widths: streams whose tokens are not as wide as the image's -> the argument of the diffusers class that says
    how wide.
    multiple: image tokens are padded to a multiple of this, by a stream "pad" after them.
    amend(model, config): make the model compute as ComfyUI's does, where diffusers' does not; before it has weights.
    What it remembers of a forward until its blocks have run is in a ContextVar: another forward may take turns with it
    there.
    config_from_tensors: arguments of the diffusers class that ComfyUI tells by the tensors alone; a folder's
    config.json is not asked.
    values: tensors whose values tell ComfyUI how a model is sampled; they may stand beside the diffusion model in a
    file.
    unrounded: modules and parameters that ComfyUI does not hold in a smaller type than it computes in.
    unsupported_dtypes: types that its numbers do not fit in, so that it is not computed in them.
    prepares: what names of tensors begin with that ComfyUI prepares the text with, once, before LoRA hooks are in
    effect.
    settings: what ComfyUI's model heeds of a file's metadata -> the values that are run, first what holds where it says
    none; the config has them under "_" and the name. beyond(arguments): what ComfyUI's arguments ask of its model that
    ours does not do; or None.
    rope_options(arguments): what ComfyUI's BaseModel of the family itself puts there, of ComfyUI's arguments to its
    model; or None.
    marks: of diffusers folders: what config.json says -> the tensor by which files say it. further: parts beside the
    transformer that belong to it -> a function of a tensor's name there: ComfyUI's name, which begins with one of
    `prepares`, or None.
    folder_metadata(checkpoints.folder.Folder): what such a folder says of the settings, or None; heeded: arguments of
    the diffusers class that it tells it by.
    num_heads, num_key_heads, width, num_channels, in_channels: of the attention (None: a U-Net, whose tokens nothing
    shares out; as many:
    None), of a token, of a prediction, of what the class takes; functions of config. pixels: frames, rows and columns
    of the picture that a latent's pixel stands for, likewise. cfg: what the table says of it. sampled: of a family that
    ComfyUI has no model of.
    refused: methods that it cannot have, as degrees call them ("ring") -> why, after "because".
    """

    name: str
    title: str
    transformer: str
    plan: ModelPlan | UNetPlan
    recognise: Callable
    config: ConfigRules
    convert: Callable
    latent: Any
    arguments: dict
    conditioning: dict[str, str | None]
    tiny: Tiny
    ignored: tuple[str, ...] = ()
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    only_with: dict[str, str] = field(default_factory=dict)
    refusals: tuple[Callable, ...] = ()
    refused_tensors: dict[str, str] = field(default_factory=dict)
    lengths: dict[str, Callable] = field(default_factory=dict)
    stream_widths: dict[str, str] = field(default_factory=dict)
    multiple: int = 1
    sign: float = 1.0
    time_scale: float = 1000.0
    cfg: str = "yes"
    sampled: Sampled | None = None
    refused: dict[str, str] = field(default_factory=dict)
    amend: Callable = lambda model, config: None
    config_from_tensors: tuple[str, ...] = ()
    keep_in_compute_dtype: tuple[str, ...] = ()
    unsupported_dtypes: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    text_prefixes: tuple[str, ...] = ()
    settings: dict[str, tuple] = field(default_factory=dict)
    unsupported_arguments: Callable = lambda arguments: None
    rope_options: Callable = lambda arguments: None
    marker_tensors: dict[str, str] = field(default_factory=dict)
    extra_parts: dict[str, Callable] = field(default_factory=dict)
    folder_metadata: Callable = lambda folder: None
    folder_arguments: tuple[str, ...] = ()
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

    def refuse(self, shapes, other_tensors=()):
        """Why a file of this family cannot be run; None where it can. beside: names of what else is in it."""
        return next((reason for refusal in self.refusals if (reason := refusal(shapes))),
                    next((reason for name,
                          reason in self.refused_tensors.items() if name in shapes or name in other_tensors),
                         None))

    def tensors(self, conditioning):
        """What is understood of ComfyUI's conditioning as tensors, which is what workers take.

        A number is a tensor of one. Of a list, `name.0` and so on; a word is part of a name. Raises UnsupportedError
        for words that are not understood.
        """
        found = {}
        for name in self.conditioning:
            value = conditioning.get(name) if conditioning.get(self.only_with.get(name, name)) is not None else None
            if isinstance(value, (list, tuple)):
                found |= {f"{name}.{number}": _as_tensor(each) for number, each in enumerate(value)}
            elif isinstance(value, str):
                words = self.choices.get(name, {})
                if value not in words:
                    raise UnsupportedError(f"xDiT runs {self.name} with {name} = {' or '.join(words) or 'nothing'}, "
                                           f"and this workflow's conditioning has {value}. Change it in the node that "
                                           f"sets it, or use Load Diffusion Model.")
                found[f"{name}.{words[value]}"] = torch.zeros(1)
            elif value is not None:
                found[name] = _as_tensor(value)
        return found

    def inputs(self, latent, timestep, conditioning, config, patch=None):
        """Arguments of the diffusers forward. timestep: as ComfyUI gives it, (B,), or one for each frame or token of
        the whole latent, (B, N). patch: a specs.Patch where the latent is one."""
        call = CallInputs(latent, timestep, conditioning, config, patch)
        return {name: rule(call) if callable(rule) else rule for name, rule in self.arguments.items()}

    def prediction(self, output, latent):
        """The forward's output as the latent's rows and columns, in ComfyUI's sign."""
        prediction = self.latent.unpack(output[0] if self.parts else output, latent)
        return prediction if self.sign == 1 else prediction * self.sign

    def part_predictions(self, output):
        """The forward's output of the latent's parts after the first: {name: like the part}."""
        return ({name: unpack(tokens) * self.sign for (name, unpack), tokens in zip(self.parts.items(), output[1:])}
                if self.parts else {})

    def token_counts(self, shape, conditioning, patch=None):
        """Tokens of every stream: {"image": ..., "text": ...}.
        shape: of the latent or the patch; conditioning: of a whole forward."""
        if self.is_unet:
            return {"image": self.latent.num_tokens(shape)}
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
        """{place: (T, C), or (C, rows, columns) of a U-Net}: what a ControlNet may add where, to each image of a latent
        of this shape.

        A place is a list of what ComfyUI's ControlNets give, and the number of the block there: "output.3". {} where
        ComfyUI's model takes none.
        """
        if self.is_unet:
            skips = [(channels, *(-(-length // 2 ** level) for length in shape[2:]))
                     for channels, level in self.plan.skips(config)]
            return {f"{name}.{number}": skip for name in ("input", "output")
                    for number, skip in enumerate(skips)} | {"middle.0": skips[-1]}
        tokens = self.latent.num_tokens(shape), self.width(config)
        skips = self.plan.skips(self.num_blocks(config))
        return {f"{list_.control}.{number}": tokens for list_ in self.blocks if list_.control
                for number in (sorted(skips.values()) if skips else range(config[list_.count]))}

    def patch_size(self, config):
        """Latent pixels of a token along each dim."""
        return self.latent.patch

    @property
    def is_unet(self):
        """Is it a U-Net?"""
        return isinstance(self.plan, UNetPlan)

    @property
    def blocks(self):
        """The plan's lists of blocks; a U-Net has none."""
        return () if self.is_unet else self.plan.blocks

    def num_blocks(self, config):
        return sum(config[list_.count] for list_ in self.blocks)


def _as_tensor(value):
    return value if torch.is_tensor(value) else torch.tensor([float(value)])


@dataclass(frozen=True)
class CallInputs:
    """One call of a model, as ComfyUI makes it: what the rules of `Family.arguments` read."""

    latent: object
    timestep: object
    conditioning: dict
    config: dict
    patch: object = None
