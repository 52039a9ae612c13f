"""A family of models, as data: all that its file in models/ says, in the words of inputs.py, key_mapping.py,
plan.py and position_slicing.py."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...protocol.errors import UnsupportedError
from .plan import ModelPlan, ReplicatedPlan, UNetPlan
from .split_linear import halved


@dataclass(frozen=True)
class ConfigRules:
    """A config of diffusers from {name: shape} of a file: {key: a function of the shapes, or the value itself}."""

    rules: dict

    def __call__(self, shapes):
        return {key: rule(shapes) if callable(rule) else rule for key, rule in self.rules.items()}


@dataclass(frozen=True)
class Tiny:
    """The family at a size for tests. ComfyUI's class also says what it calls the tensors of a diffusers folder
    (nodes/bridge/model/diffusers_keys.py)."""

    config: dict                           # arguments of the diffusers class
    native: str = ""                       # ComfyUI's class, "module:Class"
    arguments: dict = field(default_factory=dict)              # of ComfyUI's class
    frames: int = 3                        # of a latent that has a dim for them
    rows: int | None = None                # of a latent that has so many, whatever it is of
    # conditioning -> (config, shape of the latent, tokens of text) -> its shape, where a width in the config does not
    # say it; of a family that is ComfyUI's own module, without which that is not compared before it runs
    input_shapes: dict[str, Callable] = field(default_factory=dict)
    thin: Callable = lambda model: None    # puts something small in the place of what the class has of one size alone
    detected: str | None = None            # name in comfy.supported_models that takes published widths for granted
    more: dict = field(default_factory=dict)                   # arguments with which ComfyUI's class has more tensors


@dataclass(frozen=True)
class Sampled:
    """How ComfyUI is to sample a family that it has no model of (nodes/bridge/model/custom_base_model.py). Such models
    are diffusers folders."""

    prediction: str                        # name in comfy.model_base.ModelType
    settings: dict                         # of ComfyUI's sampling: those of the model's own scheduler
    latent_format: str                     # name in comfy.latent_formats
    latent: dict = field(default_factory=dict)                 # what differs from that format
    memory: float = 1.0                    # ComfyUI's memory_usage_factor
    labels: str | None = None              # config argument with the number of classes, of models that take no text


@dataclass(frozen=True)
class Family:
    """Everything this project knows of one model family.

    `shapes` is {name of a tensor in a file: its shape}, `config` the arguments of the diffusers class.
    """

    name: str
    title: str                             # what a person reads in tables
    transformer: str                       # name of the class in diffusers; or ComfyUI's, "comfy.ldm.module:Class"
    plan: ModelPlan | UNetPlan | ReplicatedPlan
    recognise: Callable                    # (shapes) -> does a file with these tensors belong to this family?
    config: ConfigRules                    # (shapes) -> arguments of the diffusers class
    convert: Callable                      # (tensors, config) -> tensors under diffusers' names; some are on meta
    latent: Any                            # inputs.Packed or inputs.Unpacked: latents to hidden states and back
    # argument of diffusers' forward -> its value, or a function of CallInputs
    arguments: dict
    # argument of ComfyUI's model that is supported -> the config's argument that says how wide it is, or None
    conditioning: dict[str, str | None]
    test_config: Tiny
    # attention whose queries and keys are the image -> (CallInputs) -> (1, T of the latent or patch, 2), or None: query
    # q has a_q b_k + b_q a_k added to what key k weighs, before the softmax, for the two numbers a and b of each token
    biases: dict[str, Callable] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()          # arguments that ComfyUI's model ignores too
    runs_without_text: bool = False        # has ComfyUI's model a branch whose context is None?
    # conditioning that is a word -> {a word that is supported: the word that it means}
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    counts: tuple[str, ...] = ()           # conditioning that is a number, which workers get as a shape: (number,)
    # conditioning -> the conditioning without which ComfyUI's model ignores it
    only_with: dict[str, str] = field(default_factory=dict)
    # each (shapes) -> why a file of this family cannot be run, or None
    refusals: tuple[Callable, ...] = ()
    # tensor in or beside the diffusion model -> why a file with it cannot be run
    refused_tensors: dict[str, str] = field(default_factory=dict)
    # stream beside the image -> (conditioning) -> number of its tokens. "text": the tokens of the context
    lengths: dict[str, Callable] = field(default_factory=dict)
    # stream whose tokens have another width than the image's -> the config's argument that says which
    stream_widths: dict[str, str] = field(default_factory=dict)
    multiple: int = 1                      # image tokens are padded to a multiple of this, by a stream "pad" after them
    sign: float = 1.0                      # of the prediction
    time_scale: float = 1000.0             # ComfyUI's timestep at sigma 1
    cfg: str = "yes"                       # what the table of models says of guidance
    sampled: Sampled | None = None         # of a family that ComfyUI has no model of
    # method that it cannot run under, such as "ring" -> why, as it follows "because"
    refused: dict[str, str] = field(default_factory=dict)
    branches_apart: bool = False           # ComfyUI's class gives a branch others in a batch with the other
    # Changes diffusers' model, before it has weights, where it computes otherwise than ComfyUI's. What it remembers
    # while blocks run must be in a ContextVar, since another forward may take turns with this one.
    adapt_model: Callable = lambda model, config: None
    # the arguments of ComfyUI's class, of the config's
    class_arguments: Callable = lambda config: config
    computes_as_made: bool = False         # ComfyUI's class computes with its tables as it is made: not on meta
    # how the paths of linears end that amend has halved (split_linear.py): a folder has them whole
    split_linears: str = ""
    # config arguments that ComfyUI reads from the tensors; config.json of a folder is not asked for them
    config_from_tensors: tuple[str, ...] = ()
    keep_in_compute_dtype: tuple[str, ...] = ()                # modules, parameters that ComfyUI does not store smaller
    unsupported_dtypes: tuple[str, ...] = ()                   # in which its numbers overflow
    # tensors whose values tell ComfyUI how to sample; they may stand beside the diffusion model in a file
    values: tuple[str, ...] = ()
    read_by_nodes: tuple[str, ...] = ()    # buffers whose numbers nodes of ComfyUI take from the MODEL
    needed_values: tuple[str, ...] = ()    # those of them without which ComfyUI makes no model
    # of names of tensors with which ComfyUI prepares the text once, before LoRA hooks take effect
    text_prefixes: tuple[str, ...] = ()
    # setting in a file's metadata that ComfyUI's model reads -> the values that are run; the first is the default.
    # The config has it under "_" and its name.
    settings: dict[str, tuple] = field(default_factory=dict)
    # (ComfyUI's arguments) -> what they ask for that diffusers' model does not do, or None
    unsupported_arguments: Callable = lambda arguments: None
    # (ComfyUI's arguments) -> the rope options that ComfyUI's BaseModel of this family sets itself, or None
    rope_options: Callable = lambda arguments: None
    # setting in a folder's config.json -> the tensor by which single files say the same: its presence, or its length
    marker_tensors: dict[str, str] = field(default_factory=dict)
    # part of a folder that belongs to the model -> (name of a tensor there) -> ComfyUI's name, which begins with one of
    # text_prefixes; or None
    extra_parts: dict[str, Callable] = field(default_factory=dict)
    # (checkpoints.diffusers_folder.Folder) -> its settings in the words of a file's metadata, or None
    folder_metadata: Callable = lambda folder: None
    folder_arguments: tuple[str, ...] = ()                     # config arguments that folder_metadata has read
    # Of latents with several parts: conditioning that holds a part after the first -> (the forward's output of it) ->
    # the part. The forward then returns a tuple.
    parts: dict[str, Callable] = field(default_factory=dict)
    # (latents, times, config, transformer_options) -> (the first part, its timestep, {conditioning: tensor of this call
    # alone}). times: of each part, or one of all
    split_parts: Callable | None = None
    # (prediction of the first part, as split_parts has that) -> as ComfyUI has it
    first_part: Callable = lambda prediction: prediction
    # (config, shape of the first part, length of the second or None) -> {name: shape} of what split_parts makes
    call_shapes: Callable | None = None
    options: tuple[str, ...] = ()          # keys of ComfyUI's transformer_options that split_parts reads
    # (latents, timestep, ComfyUI's arguments, transformer_options) -> (latents as the model takes them,
    # transformer_options for split_parts, function of the prediction -> the prediction for the latents as given).
    # ComfyUI's class does this outside of the wrappers of its forward.
    rescale_audio: Callable = lambda latents, timestep, arguments, options: (latents, options, lambda found: found)
    # (timestep (B,), transformer_options) -> {conditioning: tensor (B, ...) of this call alone}
    per_call_inputs: Callable = lambda timestep, options: {}
    # (ComfyUI's arguments) -> the same, with what is in a dict of many under names of its own
    unfold: Callable = lambda arguments: arguments
    # what lives at once of its published model, as planner.memory_model.ActivationFootprint has it; {}: as of most
    activation_factors: dict[str, float] = field(default_factory=dict)
    # --- sizes: functions of the config ---
    num_heads: Callable = lambda config: config["num_attention_heads"]     # None: a U-Net, which shares out no tokens
    num_key_heads: Callable = lambda config: None                          # None: as many as num_heads
    width: Callable = lambda config: config["num_attention_heads"] * config["attention_head_dim"]      # of a token
    num_channels: Callable = lambda config: config.get("out_channels") or config["in_channels"]        # of a prediction
    in_channels: Callable = lambda config: config["in_channels"]           # of what the class takes
    pixels: Callable = lambda config: (1, 8, 8)                # frames, rows, columns of the picture per latent pixel

    def with_split_linears(self, tensors):
        """Tensors of a folder, {name: tensor}, with halves of what the model has in halves."""
        return halved(tensors, self.split_linears)

    def taken_channels(self, config):
        """Channels of what ComfyUI hands to its model: those of the latent, and of pictures that it adds to them."""
        return self.latent.channels(self.in_channels(config))

    def refuse(self, shapes, other_tensors=()):
        """Why a file of this family cannot be run; None where it can. other_tensors: names of what else is in it."""
        return next((reason for refusal in self.refusals if (reason := refusal(shapes))),
                    next((reason for name,
                          reason in self.refused_tensors.items() if name in shapes or name in other_tensors),
                         None))

    def tensors(self, conditioning):
        """What is understood of ComfyUI's conditioning as tensors, which is what workers take.

        A number is a tensor of one. Of a list, `name.0` and so on, but for what is None; a word is part of a name.
        Raises UnsupportedError for words that are not understood.
        """
        found, conditioning = {}, self.unfold(conditioning)
        for name in self.conditioning:
            value = conditioning.get(name) if conditioning.get(self.only_with.get(name, name)) is not None else None
            if isinstance(value, (list, tuple)):
                as_tensor = _as_length if name in self.counts else _as_tensor
                found |= {f"{name}.{number}": as_tensor(each) for number, each in enumerate(value) if each is not None}
            elif isinstance(value, str):
                words = self.choices.get(name, {})
                if value not in words:
                    raise UnsupportedError("Change it in the node that sets it, or use Load Diffusion Model: xDiT "
                                           f"runs {self.name} with {name} = {' or '.join(words) or 'nothing'}, and "
                                           f"this workflow's conditioning has {value}.")
                found[f"{name}.{words[value]}"] = torch.zeros(1)
            elif value is not None:
                found[name] = _as_length(value) if name in self.counts else _as_tensor(value)
        return found

    def inputs(self, latent, timestep, conditioning, config, patch=None):
        """Arguments of the diffusers forward. timestep: as ComfyUI gives it, (B,), or one for each frame or token of
        the whole latent, (B, N). patch: a specs.Patch where the latent is one."""
        call = CallInputs(latent, timestep, conditioning, config, patch)
        return {name: rule(call) if callable(rule) else rule for name, rule in self.arguments.items()}

    def argument(self, name, latent, timestep, conditioning, config):
        """One of `inputs`, of a whole latent."""
        return self.arguments[name](CallInputs(latent, timestep, conditioning, config))

    def biases_of(self, latent, timestep, conditioning, config, patch=None):
        """What of `biases` such a call has, given as `inputs` is."""
        call = CallInputs(latent, timestep, conditioning, config, patch)
        found = {name: rule(call) for name, rule in self.biases.items()}
        return {name: bias for name, bias in found.items() if bias is not None}

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

    def tokens_a_row(self, shape):
        """How many tokens of a latent of this shape one rank has together: those of a row, or 1."""
        return self.latent.counts(shape)[-1] if not self.is_unet and self.plan.rows else 1

    def stream_width(self, config, streams, block):
        """Of a token of these streams, which are one tensor that this block gives."""
        list_ = [each for each in self.blocks for _ in range(config[each.count])][block]
        if list_.width is not None and "image" in streams:
            return config[list_.width]
        name = next((self.stream_widths[stream] for stream in streams if stream in self.stream_widths), None)
        return self.width(config) if name is None else config[name]

    def control_shapes(self, config, shape):
        """{place: (T, C), or (C, rows, columns) of a U-Net}: what a ControlNet may add where, to each image of a latent
        of this shape. None where any number of rows or columns will do.

        A place is a list of what ComfyUI's ControlNets give, and the number of the block there: "output.3". {} where
        ComfyUI's model takes none.
        """
        if self.is_replicated:
            return {f"input.{number}": (channels, None, None)
                    for number, channels in enumerate(self.plan.control(config))}
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
    def is_comfyuis(self):
        """Is its transformer a class of ComfyUI's?"""
        return ":" in self.transformer

    @property
    def is_unet(self):
        """Is it a U-Net, without lists of blocks that tokens pass from end to end?"""
        return isinstance(self.plan, UNetPlan | ReplicatedPlan)

    @property
    def is_replicated(self):
        """Is it a network that each rank runs whole?"""
        return isinstance(self.plan, ReplicatedPlan)

    @property
    def takes_unet_patches(self):
        """Does ComfyUI's model heed what nodes put into U-Nets?"""
        return isinstance(self.plan, UNetPlan)

    @property
    def takes_controlnets(self):
        """Does ComfyUI's model add what a ControlNet gives?"""
        return (bool(self.plan.control(self.test_config.config)) if self.is_replicated
                else self.is_unet or any(list_.control for list_ in self.blocks))

    @property
    def has_frames_as_batch(self):
        """Are the images of a latent the frames of one video?"""
        return "num_video_frames" in self.counts

    @property
    def blocks(self):
        """The plan's lists of blocks; a U-Net has none."""
        return () if self.is_unet else self.plan.blocks

    def num_blocks(self, config):
        return sum(config[list_.count] for list_ in self.blocks)


def _as_length(value):
    return torch.zeros(int(value))


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
