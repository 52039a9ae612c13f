"""What commands are about: a model and how it is spread, a call of it, a change of its weights.
Part of messages.py's messages."""

import dataclasses
from typing import Literal

from pydantic.dataclasses import dataclass

from .shared_memory import Segment
from .validation import STRICT, ByName, Degree, Many, Natural, Speed

WHOLE, KEYS, ALL = "whole", "keys and values in fp8", "all in fp8"
EXCHANGES = WHOLE, KEYS, ALL


def describe_exchange(exchange, layout):
    """What a run says of it; "" where all travels as it is."""
    return f", {exchange}" if exchange != WHOLE and layout.ulysses_degree * layout.ring_degree > 1 else ""


# of a field whose segments the workers write; the host fills all others
RESULT = {"is_result": True}
SDPA = "sdpa"                              # torch's own attention
BY_KERNEL = "attention by "                # begins the names of a prediction's numbers that count attentions
# what a person may choose: what ComfyUI was started with, or a kernel of attention/backends.py
ATTENTIONS = "as ComfyUI", SDPA, "flash", "flash3", "sage", "xformers"


@dataclass(frozen=True, config=STRICT)
class Stages:
    """How PipeFusion spreads a model's blocks: rank r runs stage r // sequence_degree % pipefusion_degree."""

    pipefusion_degree: Degree
    sequence_degree: Degree = 1       # ranks that share a stage
    num_blocks: Many[Natural] = ()       # blocks of each stage; (): balanced by cost
    every_block: bool = False      # hold all blocks on every rank, so that warm-up can run by sequence parallelism
    offload: bool = False          # keep stale keys and values in host memory
    # of each rank, relative, as measured; (): from what the devices say of themselves
    speeds: Many[Speed] = ()


@dataclass(frozen=True, config=STRICT)
class ModelSpec:
    """Which model, in which form. Two equal specs are the same model; a worker loads what it lacks."""

    name: str                      # unique for file, dtype, stages and tensor_degree
    family: str                    # key of models.FAMILIES
    path: str                      # a safetensors file, or a diffusers folder
    storage_dtype: str
    compute_dtype: str
    stages: Stages | None = None   # None: every rank runs every block
    tensor_degree: Degree = 1      # ranks that share each layer; neighbours
    # of linear layers, when they are loaded; storage_dtype is of the rest
    quantisation: Literal["", "int8", "nf4"] = ""
    # are linear layers that are held in float8_e4m3fn multiplied so, where the device can?
    fast: bool = False
    # bytes of each device that its weights may take, where those of some blocks come from host memory in every step;
    # 0: all are on the devices
    weights_memory: Natural = 0
    # of those, bytes that each part of the model needs in host memory for weights that the file has otherwise
    host_bytes: Natural = 0
    # checkpoints.checkpoint.state_of the files, where they are another machine's; "": it is in the name
    state: str = ""


@dataclass(frozen=True, config=STRICT)
class LowRank:
    """What is added to a weight, or to a slice of it: scale * up @ down, computed in float32."""

    up: Segment                    # (rows, rank, ...)
    down: Segment                  # (rank, columns, ...)
    scale: float
    offset: tuple[Natural, Natural, Natural] | None = None     # the slice: its dim, start and length


@dataclass(frozen=True, config=STRICT)
class Change:
    """What becomes of one tensor of a model's file: another in its place, or products added to it.
    Neither: it is as in the file."""

    whole: Segment | None
    terms: Many[LowRank]
    dtype: str = ""                # which the tensor is cast to before anything is added to it, and after
    sum_dtype: str = ""            # in which it is added
    # added to that in float32, and rounded again: ComfyUI's hooks
    hooked: Many[LowRank] = ()


@dataclass(frozen=True, config=STRICT)
class AutoencoderSpec:
    """A VAE whose weights the host sends as segments, once."""

    name: str
    dtype: str
    weights: ByName[str, Segment]
    # what its tensors do not tell; Kind says which
    settings: ByName[str, str] = dataclasses.field(default_factory=dict)
    from_host: bool = False                # do weights come from host memory, as each layer runs?


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Layout:
    """Degrees of one run. Their product is the number of ranks that work."""

    cfg_degree: Degree = 1
    data_degree: Degree = 1
    pipefusion_degree: Degree = 1
    displaced_degree: Degree = 1
    ring_degree: Degree = 1
    ulysses_degree: Degree = 1
    tensor_degree: Degree = 1


@dataclass(frozen=True, config=STRICT)
class Patch:
    """Which rows of a whole latent a piece of it holds: those from `start` on, of `whole`, along `dim`."""

    dim: Natural
    start: Natural
    whole: Natural


@dataclass(frozen=True, config=STRICT)
class BackendChoice:
    """By which kernel attention is to run: SDPA, or one of attention/backends.py."""

    name: Literal["sdpa", "flash", "flash3", "sage", "xformers"] = "sdpa"
    is_required: bool = False      # what it does not take is refused; else torch's own attends there


@dataclass(frozen=True, config=STRICT)
class WeightCopies:
    """How weights of blocks come from host memory to a device."""

    is_pageable: bool = False      # by CUDA's driver from where they are; else through page-locked pieces
    # ranks that hold the same bring a part each, and send it to the others; where these are not all busy alike, each
    # brings all
    is_shared: bool = False


@dataclass(frozen=True, config=STRICT)
class Nag:
    """Normalized Attention Guidance between two of the parts of a batch, which has num_parts of the same size."""

    scale: float
    alpha: float
    tau: float
    positive: Natural
    negative: Natural
    num_parts: Natural


@dataclass(frozen=True, config=STRICT)
class FreeU:
    """FreeU on a U-Net's way up: where it has so many channels (the key), how strong half of them are made, and what
    the lowest frequencies of the skip are multiplied with."""

    scales: ByName[str, tuple[float, float]]
    by_mean: bool = False          # its second version: stronger where the mean over channels is high


@dataclass(frozen=True, config=STRICT)
class Shrink:
    """Kohya's Deep Shrink: after a block on a U-Net's way down its image is made smaller by a factor, and on the way
    up as large as each skip. Methods: of torch's interpolate."""

    block: Natural
    factor: float
    is_after_skip: bool            # else what the way up gets of this block is smaller too
    is_active: bool                # at the noise level of the call
    method: Literal["bicubic", "nearest-exact", "bilinear", "area"]
    back: Literal["bicubic", "nearest-exact", "bilinear", "area"]


@dataclass(frozen=True, config=STRICT)
class NetworkSpec:
    """A network that a node puts inside a model (hooks/injected_networks.py), whose weights the host sends as
    segments."""

    name: str
    weights: ByName[str, Segment]
    # of a hypernetwork: "320.0" (width, 0 for keys and 1 for values) -> its layers, in order: "linear relu linear";
    # of one that hears: "heads" -> how many its attention has
    settings: ByName[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class NetworkUse:
    """Where a call has what a network gives added, times strength: to the image after each block, to what goes into
    layers of blocks (ModelPlan.led), to what keys and values of self-attention (attn1) or of attention to the text
    (attn2) are made of, to what attention to the text gives (text), or after that, of sound (ModelPlan.heard)."""

    network: str                   # NetworkSpec.name
    where: Literal["blocks", "layers", "attn1", "attn2", "text", "audio"]
    strength: float
    image: str = ""              # of blocks and layers: what of Branch.control it follows, (B or 1, T, C)
    # of text: for each image of the call, the prompt it is drawn for (0 positive, 1 negative), and its number there
    rows: Many[tuple[Natural, Natural]] = ()


@dataclass(frozen=True, config=STRICT)
class CachedReferences:
    """Keys and values of the tokens of reference pictures (parallel/reference_kv_cache.py), which a call keeps for
    later ones of its run (fills), or which it attends to in the place of the pictures."""

    rows: Many[tuple[str, Natural]]          # of each image of the call, the name and number they are kept under
    fills: bool


@dataclass(frozen=True, config=STRICT)
class Branch:
    """One call of the model: a latent, its timesteps and its conditioning, and where the prediction goes."""

    latent: Segment                # (B, C, H, W) or (B, C, F, H, W)
    timestep: Segment              # (B,), or (B, N): one for each frame or token of the whole latent
    conditioning: str              # name given by Conditioning
    prediction: Segment = dataclasses.field(metadata=RESULT)   # like latent
    # what a ControlNet adds, by models.plan.Family.control_shapes
    control: ByName[str, Segment] = dataclasses.field(default_factory=dict)
    # block, as ComfyUI's patches call it -> what instead: it is passed by; its self-attention gives its values,
    # whatever the queries; or it also returns `scores`
    operations: ByName[str, Literal["skip", "values", "scores"]] = dataclasses.field(default_factory=dict)
    # (ranks of the displaced axis, B, keys), where an operation asks for them: the share of attention that each pixel
    # gets, of all heads on average, from each rank's queries together
    scores: Segment | None = dataclasses.field(default=None, metadata=RESULT)
    guided: Many[Nag] = ()   # done to what every self-attention gives, one after the other
    free_u: Many[FreeU | Shrink] = ()        # of a U-Net, one after the other
    # tokens of a U-Net's self-attention -> rows and columns of its tiles, rows and columns of one
    # (hooks/unet_patches.py)
    tiles: ByName[str, tuple[Natural, Natural, Natural, Natural]] = dataclasses.field(default_factory=dict)
    networks: Many[NetworkUse] = ()  # one after the other
    # conditioning of this call alone, such as parts of the latent
    call_conditioning: ByName[str, Segment] = dataclasses.field(default_factory=dict)
    cached: CachedReferences | None = None
    # where the predictions for parts go, in float32
    parts: ByName[str, Segment] = dataclasses.field(default_factory=dict, metadata=RESULT)


@dataclasses.dataclass(frozen=True)
class Mode:
    """norms: moments of a group norm are "corrected" stale ones, "stale" ones with the own fresh, exchanged at "once",
    or the rank's "own"."""

    norms: str = "corrected"
    is_stale: bool = True
    publishes: bool = True                 # are later calls sent what this one has?


MODES = {"corrected_async_gn": Mode(), "stale_gn": Mode("stale"), "sync_gn": Mode("once"), "separate_gn": Mode("own"),
         "no_sync": Mode("own", publishes=False), "full_sync": Mode(is_stale=False)}
AUTO = "auto"                              # chosen_for
ROWS_FOR_CORRECTION = 4


def chosen_for(num_rows):
    """(the mode for a run, why in a person's words).

    num_rows: the fewest that a rank has of a U-Net's smallest images; None: of a transformer, which has no norms over
    the picture, so that these modes are one. By the figures of docs/benchmarks.md: with four rows
    the correction is as near to one device as 37 dB, 2 dB behind moments exchanged at once, for which all ranks wait in
    every norm; with two and with one it is at 31 to 33 dB, up to 4 dB behind. Stale moments are behind the correction
    in all of these.
    """
    if num_rows is None:
        return "corrected_async_gn", ""
    rows = f"a device has {num_rows} row{'' if num_rows == 1 else 's'} of the smallest images"
    if num_rows < ROWS_FOR_CORRECTION:
        return "sync_gn", f"norms exchanged at once: {rows}, fewer than {ROWS_FOR_CORRECTION}"
    return "corrected_async_gn", f"norms corrected: {rows}"
