"""Description of a model family as data: recognition, configuration, inputs, plan and test configuration."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...protocol.errors import UnsupportedError
from .plan import ModelPlan, ReplicatedPlan, UNetPlan
from .split_linear import split_tensors


def derived(cls, instance, **changes):
    """Return an instance of a class with these changes to the fields of an instance of its base or subclass."""
    return cls(**vars(instance) | changes)


@dataclass(frozen=True)
class ConfigRules:
    """Derive a config from the shapes of a file, {name: shape}. rules: {key: a function of the shapes, or a
    constant}."""

    rules: dict

    def __call__(self, shapes):
        return {key: rule(shapes) if callable(rule) else rule for key, rule in self.rules.items()}


@dataclass(frozen=True)
class SmallConfig:
    """A small configuration of the family for tests and for comparisons with ComfyUI's classes.

    The keys of ComfyUI's class at this size are also used to convert the tensors of diffusers folders
    (nodes/bridge/model/diffusers_keys.py).
    """

    # arguments of the diffusers class; of ComfyUI's class where the family's transformer is one
    config: dict
    # ComfyUI's class, "module:Class"; "": ComfyUI has none (DiT)
    native: str = ""
    # arguments of ComfyUI's class
    arguments: dict = field(default_factory=dict)
    # latent frames of test inputs, where latents have a frame dim
    frames: int = 3
    # rows of every latent, where the model fixes them (ACE-Step); None: as many as a test wants
    rows: int | None = None
    # conditioning -> (config, shape of the latent, number of text tokens) -> its shape, where no width in the config
    # gives it. Required for every such input of a family that runs ComfyUI's class, or the self-check skips that input
    # (Wan S2V).
    input_shapes: dict[str, Callable] = field(default_factory=dict)
    # (model) -> None: replaces modules whose size the class fixes with small ones
    thin: Callable = lambda model: None
    # {name in ComfyUI's class: tensor} -> {name in a file: tensor}, where files have others
    in_file: Callable = lambda tensors: tensors
    # class in comfy.supported_models whose detection assumes published widths; tests patch it for this size
    detected: str | None = None
    # further arguments with which ComfyUI's class has all tensors that a file may have
    more: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Sampled:
    """Sampling settings of a family that ComfyUI has no model of. Such models are diffusers folders (DiT, Sana, Latte);
    their MODEL is a plain BaseModel (nodes/bridge/model/custom_base_model.py)."""

    prediction: str                        # name in comfy.model_base.ModelType
    settings: dict                         # ComfyUI's sampling_settings, equivalent to the model's own scheduler
    latent_format: str                     # name in comfy.latent_formats
    latent: dict = field(default_factory=dict)                 # attributes of the latent format to override
    memory: float = 1.0                    # ComfyUI's memory_usage_factor
    labels: str | None = None              # config argument with the number of classes, for class-conditional models


@dataclass(frozen=True)
class FolderRules:
    """Differences of a diffusers folder from a single file of ComfyUI's or the publisher's."""

    # config.json setting -> the tensor that expresses it in single files, by its presence or its length (Qwen-Image)
    marker_tensors: dict[str, str] = field(default_factory=dict)
    # subfolder with tensors of the model -> (name of a tensor there) -> ComfyUI's name, which begins with one of
    # Detection.text_prefixes, or None (Anima's text conditioner)
    extra_parts: dict[str, Callable] = field(default_factory=dict)
    # (checkpoints.diffusers_folder.Folder) -> its settings as the metadata of a single file, or None (LTX-Video)
    metadata: Callable = lambda folder: None
    arguments: tuple[str, ...] = ()        # config arguments that `metadata` has read
    # path suffix of the linears that adapt_model has split (split_linear.py): a folder has them fused (Ovis)
    split_linears: str = ""


@dataclass(frozen=True)
class Components:
    """Latents with several components, such as video and audio (LTX-2)."""

    # conditioning that holds a component after the first -> (the forward's output for it) -> the component. The forward
    # then returns a tuple with one output for each component.
    unpack: dict[str, Callable] = field(default_factory=dict)
    # (latents, times, config, transformer_options) -> (first component, its timestep, {conditioning: tensor of this
    # call only}). times: one for each component, or one for all.
    split: Callable | None = None
    # (config, shape of the first component, length of the second or None) -> {conditioning: shape} returned by split
    shapes: Callable | None = None
    # (prediction in the layout of split's first component) -> the prediction in ComfyUI's layout
    first: Callable = lambda prediction: prediction
    # keys of transformer_options that split reads, or nodes/bridge/compatibility/ltx_guidance.py
    options: tuple[str, ...] = ()
    # (latents, timestep, ComfyUI's arguments, transformer_options) -> (latents as the model takes them,
    # transformer_options for split, function from the model's prediction to that for the given latents). ComfyUI's
    # class does this outside the wrappers of its forward (MiniMax H3).
    rescale: Callable = lambda latents, timestep, arguments, options: (latents, options, lambda found: found)

    @property
    def names(self):
        """Conditioning that holds a component after the first, in order; (): latents have one component."""
        return tuple(self.unpack)


@dataclass(frozen=True)
class Detection:
    """Detection of a family in files, and conversion of their tensors to config and weights of the transformer.

    `shapes` is {name of a tensor in a file: its shape}. The first three fields are needed by every family; a comment
    names an example of the others. What one or two families need is an attribute or a method that a subclass in the
    model's file overrides.
    """

    recognise: Callable                    # (shapes) -> bool: does a file with these tensors belong to this family?
    config: ConfigRules                    # (shapes) -> arguments of the class
    convert: Callable                      # (tensors, config) -> tensors by the class's names; some are on meta
    # each (shapes) -> the reason why a file of this family cannot be run, or None
    refusals: tuple[Callable, ...] = ()
    # config arguments that ComfyUI infers from the tensors; they are not read from a folder's config.json
    config_from_tensors: tuple[str, ...] = ()
    # tensors whose values, not only shapes, ComfyUI reads to choose the sampling; a file may have them outside the
    # diffusion model (SDXL's v_pred)
    values: tuple[str, ...] = ()
    folder: FolderRules = field(default_factory=FolderRules)   # what a diffusers folder has otherwise than a file

    needed_values: ClassVar[tuple[str, ...]] = ()              # of `values`: ComfyUI cannot build its model without
    # settings of the transformer in a file's metadata that `recognise` requires too, where another family has the same
    # tensors (Wan Animate 2)
    described: ClassVar[dict] = {}
    # key of a file's metadata that ComfyUI's model reads -> the supported values, the default first. The config has the
    # value as "_" + key (LTX-Video).
    settings: ClassVar[dict[str, tuple]] = {}
    # prefixes of tensors with which ComfyUI processes the text once on the host, before LoRA hooks take effect (Anima)
    text_prefixes: ClassVar[tuple[str, ...]] = ()

    def refuse(self, shapes):
        """Return the reason why a file of this family cannot be run, or None."""
        return next((reason for refusal in self.refusals if (reason := refusal(shapes))), None)

    def with_split_linears(self, tensors):
        """Split the fused linears of a diffusers folder, {name: tensor}, that the model has as two."""
        return split_tensors(tensors, self.folder.split_linears)


@dataclass(frozen=True)
class Inputs:
    """Inputs of ComfyUI's model, and the rules that turn them into arguments of the transformer's forward.

    The first three fields are needed by every family; a comment names an example of the others. What one or two
    families need is an attribute or a method that a subclass in the model's file overrides.
    """

    latent: Any                            # inputs.Packed or inputs.Unpacked: latents to hidden states and back
    # argument of the class's forward -> its value, or a rule (CallInputs) -> value
    arguments: dict
    # supported conditioning of ComfyUI's model -> the config argument with its width, or None if it has none. Workers
    # receive no other; a workflow with any other conditioning is rejected unless `ignored` lists it.
    conditioning: dict[str, str | None]
    ignored: tuple[str, ...] = ()          # conditioning that ComfyUI's model ignores too
    # conditioning that is a string -> {supported value: its canonical name} (Flux's ref_latents_method)
    choices: dict[str, dict[str, str]] = field(default_factory=dict)
    # conditioning that is an integer. Workers receive it as the shape of a tensor, so that reading it does not wait for
    # the device (SVD's num_video_frames).
    counts: tuple[str, ...] = ()
    # conditioning -> the conditioning without which ComfyUI's model ignores it
    only_with: dict[str, str] = field(default_factory=dict)
    # stream other than the image -> (conditioning) -> number of its tokens. "text" defaults to the context's tokens.
    lengths: dict[str, Callable] = field(default_factory=dict)
    # image tokens are padded to a multiple of this by a stream "pad" after them (Z-Image)
    multiple: int = 1
    sign: float = 1.0                      # factor from the class's prediction to ComfyUI's: 1 or -1 (Lumina 2)
    time_scale: float = 1000.0             # ComfyUI's timestep at sigma 1
    # (timestep (B,), transformer_options) -> {conditioning: tensor (B, ...) of this call only}, such as the next sigma
    # of a step (MeanFlow models: Hunyuan Image distilled)
    per_call_inputs: Callable = lambda timestep, options: {}
    # (conditioning of ComfyUI) -> the same with the entries of a nested dict as keys of their own (MiniMax H3)
    unfold: Callable = lambda arguments: arguments
    # (conditioning of ComfyUI) -> the requested feature that the class does not implement, or None
    unsupported: Callable = lambda arguments: None
    components: Components = field(default_factory=Components)  # of a latent that has several

    runs_without_text: ClassVar = False    # ComfyUI's model accepts a branch whose context is None (Ideogram 4)
    # self-attention module of the image tokens -> rule (CallInputs) -> (1, T, 2) or None, T tokens of the latent or
    # patch. With the two numbers a and b of each token, a_q b_k + b_q a_k is added to the score of query q and key k
    # before the softmax (LTX-Video's guides).
    biases: ClassVar[dict[str, Callable]] = {}

    def check_size(self, shape, config):
        """Raise ConfigError for the shape of a latent that the model has no positions for (SD3)."""

    def rope_options(self, conditioning):
        """Return the RoPE options that ComfyUI's BaseModel of this family sets itself, or None (LongCat).
        conditioning: ComfyUI's."""


@dataclass(frozen=True)
class Family:
    """Everything that this project knows about one model family, in groups by who reads it: `detection` reads files,
    `inputs` what ComfyUI passes, `plan` runs the forward in parts, and `testing` is for tests. The family itself
    describes the transformer's class.

    `config` holds the arguments of the diffusers class (or of ComfyUI's). Fields without a default are needed by every
    family; a comment names an example of the others. What one or two families need is an attribute or a method that a
    subclass in the model's file overrides.
    """

    name: str                              # key in FAMILIES, and the name in error messages
    title: str                             # name in tables for users
    transformer: str                       # name of the diffusers class; or ComfyUI's, "comfy.ldm.module:Class"
    detection: Detection
    inputs: Inputs
    plan: ModelPlan | UNetPlan | ReplicatedPlan
    testing: SmallConfig

    # parallel method that the family cannot use, such as "ring" -> the reason, phrased to follow "because"
    refused: dict[str, str] = field(default_factory=dict)
    cfg: str = "yes"                       # entry of the table of models in the column on guidance
    sampled: Sampled | None = None         # for families that ComfyUI has no model of

    # --- numerics and construction ---
    # (model, config) -> None: changes a diffusers model, before its weights are loaded, where it computes differently
    # from ComfyUI's. State of a forward must be in a ContextVar or ForwardValue, since forwards can be interleaved.
    adapt_model: Callable = lambda model, config: None
    # ComfyUI's class computes tables in its constructor, and so cannot be built on the meta device (ACE-Step 1.5)
    computes_as_made: bool = False
    keep_in_compute_dtype: tuple[str, ...] = ()                # modules, parameters that ComfyUI does not store smaller
    unsupported_dtypes: tuple[str, ...] = ()                   # compute dtypes in which activations overflow
    # activations of the published model, as keywords of planner.memory_model.ActivationFootprint; {}: its defaults
    activation_factors: dict[str, float] = field(default_factory=dict)
    # modules of ComfyUI's class that nodes call themselves, by the ends of their paths, with the file's weights (Wan,
    # U-Nets)
    called_by_nodes: tuple[str, ...] = ()

    # --- sizes, as functions of the config ---
    num_heads: Callable = lambda config: config["num_attention_heads"]     # None: a U-Net, whose tokens are not sharded
    num_key_heads: Callable = lambda config: None                          # None: as many as num_heads
    width: Callable = lambda config: config["num_attention_heads"] * config["attention_head_dim"]      # of a token
    num_channels: Callable = lambda config: config.get("out_channels") or config["in_channels"]        # of a prediction
    in_channels: Callable = lambda config: config["in_channels"]           # of the class's input
    pixels: Callable = lambda config: (1, 8, 8)                # frames, rows, columns of pixels per latent pixel

    # stream whose tokens are not as wide as the image's -> the config argument with their width (Mochi)
    stream_widths: ClassVar[dict[str, str]] = {}
    # ComfyUI's class computes a branch differently when it is batched with the other; each branch then runs alone
    # (SeedVR2)
    branches_apart: ClassVar = False
    read_by_nodes: ClassVar[tuple[str, ...]] = ()          # buffers whose values nodes read from the MODEL (SeedVR2)

    def class_arguments(self, config):
        """Return the arguments of the constructor of ComfyUI's class (HiDream-O1: a dict of many)."""
        return config

    def taken_channels(self, config):
        """Channels of ComfyUI's input to its model: those of the latent, and those of images concatenated to it."""
        return self.inputs.latent.channels(self.in_channels(config))

    def tensors(self, conditioning):
        """Convert the supported conditioning of ComfyUI to tensors, which is what workers receive.

        A number becomes a tensor of one element, a list the keys `name.0`, `name.1`, ... without entries that are None,
        and a string a part of the key. Raises UnsupportedError for unsupported strings.
        """
        found, conditioning = {}, self.inputs.unfold(conditioning)
        for name in self.inputs.conditioning:
            is_read = conditioning.get(self.inputs.only_with.get(name, name)) is not None
            value = conditioning.get(name) if is_read else None
            if isinstance(value, (list, tuple)):
                as_tensor = _as_length if name in self.inputs.counts else _as_tensor
                found |= {f"{name}.{number}": as_tensor(each) for number, each in enumerate(value) if each is not None}
            elif isinstance(value, str):
                choices = self.inputs.choices.get(name, {})
                if value not in choices:
                    raise UnsupportedError("Change it in the node that sets it, or use Load Diffusion Model: xDiT "
                                           f"runs {self.name} with {name} = {' or '.join(choices) or 'nothing'}, and "
                                           f"this workflow's conditioning has {value}.")
                found[f"{name}.{choices[value]}"] = torch.zeros(1)
            elif value is not None:
                found[name] = _as_length(value) if name in self.inputs.counts else _as_tensor(value)
        return found

    def forward_arguments(self, latent, timestep, conditioning, config, patch=None):
        """Return the arguments of the forward.

        timestep: ComfyUI's, (B,), or one for each frame or token of the full latent, (B, N). patch: a specs.Patch if
        the latent is one.
        """
        call = CallInputs(latent, timestep, conditioning, config, patch)
        return {name: rule(call) if callable(rule) else rule for name, rule in self.inputs.arguments.items()}

    def argument(self, name, latent, timestep, conditioning, config):
        """Return one of the `forward_arguments` for a full latent."""
        return self.inputs.arguments[name](CallInputs(latent, timestep, conditioning, config))

    def biases_of(self, latent, timestep, conditioning, config, patch=None):
        """Evaluate `Inputs.biases` for a call, without those that are None; arguments as of `forward_arguments`."""
        call = CallInputs(latent, timestep, conditioning, config, patch)
        found = {name: rule(call) for name, rule in self.inputs.biases.items()}
        return {name: bias for name, bias in found.items() if bias is not None}

    def prediction(self, output, latent):
        """Convert the forward's output to the layout of the latent and ComfyUI's sign."""
        prediction = self.inputs.latent.unpack(output[0] if self.inputs.components.names else output, latent)
        return prediction if self.inputs.sign == 1 else prediction * self.inputs.sign

    def component_predictions(self, output):
        """Convert the forward's output for the latent's components after the first: {name: prediction shaped like
        the component}."""
        if not self.inputs.components.names:
            return {}
        return {name: unpack(tokens) * self.inputs.sign
                for (name, unpack), tokens in zip(self.inputs.components.unpack.items(), output[1:])}

    def token_counts(self, shape, conditioning, patch=None):
        """Count the tokens of every stream: {"image": ..., "text": ...}.

        shape: of the latent or the patch. conditioning: of a full forward.
        """
        full = [patch.whole if patch is not None and dim == patch.dim else length for dim, length in enumerate(shape)]
        latent, streams, lengths = self.inputs.latent, self.plan.stream_names, {
            "text": lambda conditioning: conditioning["context"].shape[1],
            "pad": lambda conditioning: -latent.num_tokens(full) % self.inputs.multiple} | self.inputs.lengths
        return {"image": latent.num_tokens(shape)} | {
            stream: length(conditioning) for stream, length in lengths.items() if stream in streams}

    def tokens_a_row(self, shape):
        """Smallest number of consecutive tokens that stay on one rank: a row of tokens for plans that need full
        rows, else 1."""
        return self.inputs.latent.counts(shape)[-1] if self.plan.row_count_argument else 1

    def stream_width(self, config, streams, block):
        """Width of a token of these streams, which are joined in one tensor that the block with this index returns."""
        list_ = [each for each in self.blocks for _ in range(config[each.count])][block]
        if list_.width is not None and "image" in streams:
            return config[list_.width]
        name = next((self.stream_widths[stream] for stream in streams if stream in self.stream_widths), None)
        return self.width(config) if name is None else config[name]

    def control_shapes(self, config, shape):
        """Shapes of what a ControlNet may add for each image of a latent of this shape: {key: (T, C)}, or (C, rows,
        columns) for a U-Net. A None stands for any number of rows or columns.

        A key is a list of ComfyUI's ControlNet output and the block's number in it: "output.3". Returns {} if ComfyUI's
        model takes no ControlNet.
        """
        return self.plan.control_shapes(self, config, shape)

    def patch_size(self, config):
        """Latent pixels of a token along each dim."""
        return self.inputs.latent.patch

    @property
    def is_comfyuis(self):
        """Whether the transformer is a class of ComfyUI's."""
        return ":" in self.transformer

    @property
    def takes_controlnets(self):
        """Whether ComfyUI's model adds the output of a ControlNet."""
        return self.plan.takes_controlnets(self.testing.config)

    @property
    def has_frames_as_batch(self):
        """Whether the images of a batch are the frames of one video."""
        return "num_video_frames" in self.inputs.counts

    @property
    def blocks(self):
        """The plan's block lists; () for a U-Net."""
        return self.plan.blocks

    def num_blocks(self, config):
        return sum(config[list_.count] for list_ in self.blocks)


def _as_length(value):
    return torch.zeros(int(value))


def _as_tensor(value):
    return value if torch.is_tensor(value) else torch.tensor([float(value)])


@dataclass(frozen=True)
class CallInputs:
    """One call of a model by ComfyUI: what the rules of `Inputs.arguments` read. patch: a specs.Patch if the latent
    is one."""

    latent: object
    timestep: object
    conditioning: dict
    config: dict
    patch: object = None
