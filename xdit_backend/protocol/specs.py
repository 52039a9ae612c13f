"""The dataclasses inside the commands of messages.py: layout, model, changes of weights, VAE and injected networks, and
one call of the model."""

import dataclasses
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass

from .shared_memory import Segment
from .validation import STRICT, ByName, Degree, Many, Natural, Rank, Share, Speed

# metadata of a field whose segments the workers write; the host fills all others
RESULT = {"is_result": True}


# --- layout ---

@dataclass(frozen=True, kw_only=True, config=STRICT)
class Layout:
    """Degrees of one run. Their product is the number of ranks that compute."""

    cfg_degree: Degree = 1
    data_degree: Degree = 1
    pipefusion_degree: Degree = 1
    displaced_degree: Degree = 1
    ring_degree: Degree = 1
    ulysses_degree: Degree = 1
    tensor_degree: Degree = 1

    @property
    def stage_ranks(self):
        """Ranks of one pipeline stage: Stages.sequence_degree."""
        return self.ring_degree * self.ulysses_degree * self.tensor_degree


@dataclass(frozen=True, config=STRICT)
class Stages:
    """PipeFusion's distribution of blocks: rank r runs stage r // sequence_degree % pipefusion_degree."""

    pipefusion_degree: Degree
    sequence_degree: Degree = 1          # ranks per stage
    num_blocks: Many[Natural] = ()       # blocks of each stage; (): balanced by cost
    every_block: bool = False            # load all blocks on every rank, so that warm-up can use sequence parallelism
    offload: bool = False                # keep stale keys and values in system RAM
    # measured relative speed of each rank; (): derived from the devices' properties
    speeds: Many[Speed] = ()


# --- models, changes of their weights, VAEs, injected networks ---

@dataclass(frozen=True, config=STRICT)
class ModelSpec:
    """A model and how it is loaded. Equal specs are the same model; a worker loads what it lacks."""

    name: str                      # unique for file, dtype, stages and tensor_degree
    family: str                    # key of models.FAMILIES
    path: str                      # a safetensors file, or a diffusers folder
    storage_dtype: str
    compute_dtype: str
    stages: Stages | None = None   # None: every rank runs every block
    tensor_degree: Degree = 1      # neighbouring ranks that each layer is sharded over
    # of linear layers, applied while loading; storage_dtype applies to the rest
    quantisation: Literal["", "int8", "nf4"] = ""
    # multiply linear layers stored as float8_e4m3fn in that type where the device can
    fast: bool = False
    # bytes of VRAM that the weights may take on each device, the rest being streamed at every step; 0: all resident
    weights_memory: Natural = 0
    # system RAM that each partition of the model needs for offloaded weights that are stored differently in the file
    host_bytes: Natural = 0
    # checkpoints.checkpoint.state_of the files where they are on another machine; "": it is part of the name
    state: str = ""


@dataclass(frozen=True, config=STRICT)
class LowRank:
    """A term added to a weight, or to a slice of it: scale * up @ down, computed in float32."""

    up: Segment                    # (rows, rank, ...)
    down: Segment                  # (rank, columns, ...)
    scale: float
    offset: tuple[Natural, Natural, Natural] | None = None     # the slice: its dim, start and length


@dataclass(frozen=True, config=STRICT)
class Change:
    """New value of one tensor of a model's file: a replacement, or terms added to it. Neither: as in the file."""

    whole: Segment | None
    terms: Many[LowRank]
    dtype: str = ""                # the tensor is cast to it before terms are added, and again afterwards
    sum_dtype: str = ""            # in which they are added
    # added in float32 to the result, which is rounded again: ComfyUI's hooks
    hooked: Many[LowRank] = ()


@dataclass(frozen=True, config=STRICT)
class AutoencoderSpec:
    """A VAE whose weights the host sends once, as segments."""

    name: str
    dtype: str
    weights: ByName[str, Segment]
    # configuration that cannot be derived from the tensors; see VaeFamily
    settings: ByName[str, str] = dataclasses.field(default_factory=dict)
    from_host: bool = False        # offload the weights and stream them as each layer runs


@dataclass(frozen=True, config=STRICT)
class NetworkSpec:
    """A network that a node injects into a model (hooks/injected_networks.py); the host sends its weights as
    segments."""

    name: str
    weights: ByName[str, Segment]
    # hypernetwork: "320.0" (width, 0 for keys or 1 for values) -> its layers in order, "linear relu linear";
    # audio cross-attention: "heads" -> number of attention heads; guidance: "scale", "alpha" and "tau" of nag.py
    settings: ByName[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class UpscalerSpec:
    """An upscale model that spandrel loads from a state dict; the host sends it as segments."""

    name: str
    weights: ByName[str, Segment]
    facts: ByName[str, str]        # of checkpoints.build_upscaler.facts_of


@dataclass(frozen=True, config=STRICT)
class Tile:
    """A tile of an image to upscale, on one rank."""

    rank: Rank
    image: Segment                 # (1, C, H, W), float32 in [0, 1]
    upscaled: Segment = dataclasses.field(metadata=RESULT)     # (1, C', H * scale, W * scale), float32


# --- options of a call ---

SDPA = "sdpa"                              # torch's own attention
BY_BACKEND = "attention by "               # prefix of the names of a prediction's attention counts
# choices of the setting: the measured fastest exact operator, the backend that ComfyUI was started with, or one of
# attention/backends.py
FASTEST, AS_COMFYUI = "auto", "as ComfyUI"
ATTENTIONS = FASTEST, AS_COMFYUI, SDPA, "flash", "flash3", "sage", "xformers", "comfy_kitchen_int8"
# operators that compute attention exactly, up to rounding: SDPA and keys of attention/backends.py
Operator: TypeAlias = Literal["sdpa", "flash", "flash3", "xformers", "torch_cudnn", "torch_flash", "torch_efficient"]
OPERATORS = get_args(Operator)
# head sizes and numbers of keys for which the probe times operators; more keys count as the last
OPERATOR_HEADS, OPERATOR_KEYS = (64, 128), (1024, 4096, 16384)


def operator_key(head_size, num_keys, with_lse):
    """Key in BackendChoice.fastest of attention with such tensors; None where operators are not timed."""
    if head_size not in OPERATOR_HEADS:
        return None
    keys = next((keys for keys in OPERATOR_KEYS if num_keys <= keys), OPERATOR_KEYS[-1])
    return f"{head_size} {keys} lse" if with_lse else f"{head_size} {keys}"


@dataclass(frozen=True, config=STRICT)
class BackendChoice:
    """Attention backend: SDPA, or one of attention/backends.py."""

    name: Literal["sdpa", "flash", "flash3", "sage", "xformers", "comfy_kitchen_int8"] = "sdpa"
    is_required: bool = False      # reject inputs that the backend does not support; False: SDPA computes them
    # operator_key -> operator that computes unmasked attention in place of `name`, the same on every rank
    fastest: ByName[str, Operator] = dataclasses.field(default_factory=dict)


# dtype in which Ulysses and Ring attention send their tensors
WHOLE, KEYS, ALL = "whole", "keys and values in fp8", "all in fp8"
EXCHANGES = WHOLE, KEYS, ALL


def describe_exchange(exchange, layout):
    """Suffix of a run's status text: ", all in fp8"; "" where nothing is quantised."""
    return f", {exchange}" if exchange != WHOLE and layout.ulysses_degree * layout.ring_degree > 1 else ""


@dataclasses.dataclass(frozen=True)
class Mode:
    """Behaviour of a displaced_mode (DistriFusion). norms: moments of a group norm are stale ones corrected by the
    rank's own ("corrected"), the stale ones of other ranks and the rank's own fresh ones ("stale"), all-reduced in the
    step ("once"), or the rank's alone ("own")."""

    norms: str = "corrected"
    is_stale: bool = True
    publishes: bool = True                 # send this call's activations to later calls


MODES = {"corrected_async_gn": Mode(), "stale_gn": Mode("stale"), "sync_gn": Mode("once"), "separate_gn": Mode("own"),
         "no_sync": Mode("own", publishes=False), "full_sync": Mode(is_stale=False)}
AUTO = "auto"                              # resolved by chosen_for
ROWS_FOR_CORRECTION = 4


def chosen_for(num_rows):
    """Choose the displaced_mode of a run; returns (mode, reason to show to the user).

    num_rows: the fewest rows that a rank has of a U-Net's smallest feature maps; None for a transformer, which has no
    norms over the image, so that the modes are equivalent. By the figures of docs/benchmarks.md, "U-Nets under
    DistriFusion": with four rows the corrected moments reach 37 dB against one device, 2 dB less than synchronous ones,
    for which all ranks wait in every norm; with one or two rows they reach 31 to 33 dB, up to 4 dB less. Uncorrected
    stale moments are worse in all of these cases.
    """
    if num_rows is None:
        return "corrected_async_gn", ""
    rows = f"a device has {num_rows} row{'' if num_rows == 1 else 's'} of the smallest images"
    if num_rows < ROWS_FOR_CORRECTION:
        return "sync_gn", f"norms exchanged at once: {rows}, fewer than {ROWS_FOR_CORRECTION}"
    return "corrected_async_gn", f"norms corrected: {rows}"


@dataclass(frozen=True, config=STRICT)
class WeightCopies:
    """Options of the copies of streamed weights from system RAM to a device."""

    is_pageable: bool = False      # by the CUDA driver directly from pageable memory; else through page-locked buffers
    # ranks with the same weights copy one shard each and all-gather them; False: each copies everything, which is
    # better where these ranks are not equally busy
    is_shared: bool = False


SOL_ATTN = "sol-attn"
METHODS_OF_SPARSE = SOL_ATTN, "sla"
SPARSE_BLOCK = 64                          # tokens of a block
SINKS = "exact_kv_and_rows", "exact_kv", "off"


@dataclass(frozen=True, config=STRICT)
class SparseOptions:
    """Block-sparse self-attention (attention/block_sparse.py), with the parameters of ComfyUI's node
    BlockSparseAttention. Also start_percent and end_percent, which the host applies."""

    method: Literal["sol-attn", "sla"]
    tau: Annotated[float, Field(ge=0, le=4)] = 1.3             # "sol-attn": threshold in standard deviations
    keep_percent: Annotated[float, Field(ge=0.5, le=95)] = 10.0            # "sla": of the blocks of keys
    start_percent: Share = 0.2             # of the run; attention is dense before and afterwards
    end_percent: Share = 1.0
    dense_blocks: Many[Natural] = ()       # blocks of the model whose attention is dense
    min_tokens: Natural = 12288            # shorter sequences are dense
    # tokens of text, references and audio: all queries attend to them, and they attend to all; only the former; neither
    sink_conditioning: Literal["exact_kv_and_rows", "exact_kv", "off"] = "exact_kv_and_rows"


@dataclass(frozen=True, config=STRICT)
class ForwardOptions:
    """Options of a model's forwards, the same for all branches of a command. They are passed on as one object, from the
    user's settings (config.ParallelConfig) to the forward (hooks.forward_context.ForwardContext)."""

    backend: BackendChoice = dataclasses.field(default_factory=BackendChoice)  # attention backend
    compile_backend: str = ""      # of torch.compile, for the blocks; "": not compiled
    exchange: str = WHOLE          # communication dtype of attention, one of EXCHANGES
    # factor of the last change that is added to stale keys, values and activations; constant during a run
    extrapolation: Share = 0.0
    copies: WeightCopies = dataclasses.field(default_factory=WeightCopies)     # of streamed weights
    sparse: SparseOptions | None = None    # None: dense attention


# --- one call of the model ---

@dataclass(frozen=True, config=STRICT)
class Patch:
    """Rows of a full latent that a patch has: those from `start` on, of `whole`, along `dim`."""

    dim: Natural
    start: Natural
    whole: Natural


@dataclass(frozen=True, config=STRICT)
class Nag:
    """Normalized Attention Guidance between two of the num_parts equal slices of a batch."""

    scale: float
    alpha: float
    tau: float
    positive: Natural
    negative: Natural
    num_parts: Natural


@dataclass(frozen=True, config=STRICT)
class FreeU:
    """FreeU in the decoder of a U-Net. scales: number of channels -> (factor of half of the backbone's channels, factor
    of the lowest frequencies of the skip)."""

    scales: ByName[str, tuple[float, float]]
    by_mean: bool = False          # FreeU v2: stronger where the mean over channels is high


@dataclass(frozen=True, config=STRICT)
class Shrink:
    """Kohya's Deep Shrink: the feature map is downscaled by a factor after a block of a U-Net's encoder, and resized to
    each skip in the decoder. Methods are those of torch.nn.functional.interpolate."""

    block: Natural
    factor: float
    is_after_skip: bool            # False: the skip of this block is downscaled too
    is_active: bool                # at the noise level of the call
    method: Literal["bicubic", "nearest-exact", "bilinear", "area"]
    back: Literal["bicubic", "nearest-exact", "bilinear", "area"]


@dataclass(frozen=True, config=STRICT)
class Blur:
    """Smoothed Energy Guidance: the queries of a self-attention are blurred over the image by a Gaussian of sigma
    tokens, or replaced by their mean if sigma is negative. rows, columns: of the latent."""

    sigma: float
    rows: Natural
    columns: Natural


@dataclass(frozen=True, config=STRICT)
class Entmax:
    """PLADIS: the weights of an attention to the text are extrapolated from softmax by `scale` towards entmax
    (attention/entmax.py)."""

    scale: float
    alpha: float                           # 1.5, or 2: sparsemax


@dataclass(frozen=True, config=STRICT)
class Enhance:
    """Enhance-A-Video: the output of a block's self-attention is multiplied by a factor (hooks/enhance_video.py).
    frames: of the latent, at least 2."""

    frames: Natural
    weight: float


@dataclass(frozen=True, config=STRICT)
class NetworkUse:
    """Insertion point of an injected network, whose output times strength is added to: the image tokens after each
    block ("blocks"), the inputs of layers of blocks ("layers", the LLLite targets ModelPlan.led), the inputs of the key
    and value projections of self-attention ("attn1") or cross-attention ("attn2"), the output of cross-attention
    ("text"), or the hidden states after it, as audio cross-attention ("audio", ModelPlan.heard). With "guide", the
    output of cross-attention is guided away from that to the network's text (ModelPlan.text_attention), or in a U-Net
    from that to its keys and values."""

    network: str                   # NetworkSpec.name
    where: Literal["blocks", "layers", "attn1", "attn2", "text", "audio", "guide"]
    strength: float
    image: str = ""                # "blocks", "layers": key in Branch.control of its input, (B or 1, T, C)
    # "text": for each image of the call, its prompt (0 positive, 1 negative) and its number among that prompt's images;
    # "guide": 0 for images that are guided, 1 for others, and 0
    rows: Many[tuple[Natural, Natural]] = ()


@dataclass(frozen=True, config=STRICT)
class CachedReferences:
    """Keys and values of reference images' tokens (parallel/reference_kv_cache.py): this call fills the cache for later
    calls of its run, or attends to the cached ones instead of the reference images."""

    rows: Many[tuple[str, Natural]]          # for each image of the call, its key in the cache: name and number
    fills: bool


@dataclass(frozen=True, config=STRICT)
class Branch:
    """One call of the model: latent, timesteps, conditioning, and the segment of the prediction."""

    latent: Segment                # (B, C, H, W) or (B, C, F, H, W)
    timestep: Segment              # (B,), or (B, N): one for each frame or token of the full latent
    conditioning: str              # name sent by Conditioning
    prediction: Segment = dataclasses.field(metadata=RESULT)   # like latent
    # ControlNet residuals, see Family.control_shapes in models/common
    control: ByName[str, Segment] = dataclasses.field(default_factory=dict)
    # block, named as in ComfyUI's patches -> skip the block; return the values from its self-attention, whatever the
    # queries; or also write `scores`; or blur the queries. Enhance: by the path of the block in ComfyUI's model.
    # Entmax: by "attn2." and the transformer block of a U-Net, "attn2.input.4.0"
    operations: ByName[str, Literal["skip", "values", "scores"] | Blur | Enhance | Entmax] = dataclasses.field(
        default_factory=dict)
    # (ranks of the displaced axis, B, keys), if an operation is "scores": attention weights that each key receives,
    # mean over heads, summed over each rank's queries
    scores: Segment | None = dataclasses.field(default=None, metadata=RESULT)
    guided: Many[Nag] = ()                   # applied in order to the output of every self-attention
    free_u: Many[FreeU | Shrink] = ()        # of a U-Net, applied in order
    # HyperTile: number of tokens of a U-Net's self-attention -> rows and columns of tiles, rows and columns of one tile
    # (hooks/unet_patches.py)
    tiles: ByName[str, tuple[Natural, Natural, Natural, Natural]] = dataclasses.field(default_factory=dict)
    networks: Many[NetworkUse] = ()          # applied in order
    # conditioning of this call only, such as components of the latent
    call_conditioning: ByName[str, Segment] = dataclasses.field(default_factory=dict)
    cached: CachedReferences | None = None
    # predictions of further components of the latent, float32
    parts: ByName[str, Segment] = dataclasses.field(default_factory=dict, metadata=RESULT)
    # transformer block of a U-Net, "input.4.0" -> order in which it gets its tokens, (T,) int64
    shuffled: ByName[str, Segment] = dataclasses.field(default_factory=dict)
