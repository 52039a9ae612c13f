"""The messages of a channel, as frozen dataclasses that travel as JSON. Nothing is ever pickled.

Commands go from the host to every rank, the same ones in the same order. Replies come back, each over its own channel.
A message is checked where it is made and again where it arrives: STRICT says how.
"""

import dataclasses
from typing import Literal

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from .errors import XDiTError
from .segments import Segment
from .strict import STRICT, Degree, Natural, Printable, Rank, Share, Speed

JOINING = "joining the devices"                                # the Phase in which a worker joins the others
TRYING_LINKS = "trying the links between the devices"          # and in which they send each other something

RESULT = {"is_result": True}                                   # of a field whose segments the workers write; the host fills all others

# --- what commands speak of ---

@dataclass(frozen=True, config=STRICT)
class Stages:
    """How PipeFusion spreads a model's blocks: rank r runs stage r // sequence_degree % pipefusion_degree."""

    pipefusion_degree: Degree
    sequence_degree: Degree = 1       # ranks that share a stage
    num_blocks: tuple[Natural, ...] = ()       # blocks of each stage; (): balanced by cost
    every_block: bool = False      # hold all blocks on every rank, so that warm-up can run by sequence parallelism
    offload: bool = False          # keep stale keys and values in host memory
    speeds: tuple[Speed, ...] = ()          # of each rank, relative, as measured; (): told by what the devices say of themselves


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
    quantisation: Literal["", "int8", "nf4"] = ""              # of linear layers, when they are loaded; storage_dtype is of the rest
    state: str = ""                # checkpoints.header.state_of the files, where they are another machine's; "": the name tells it


@dataclass(frozen=True, config=STRICT)
class LowRank:
    """What is added to a weight, or to a slice of it: scale * up @ down, computed in float32."""

    up: Segment                    # (rows, rank, ...)
    down: Segment                  # (rank, columns, ...)
    scale: float
    offset: tuple[Natural, Natural, Natural] | None = None     # the slice: its dim, start and length


@dataclass(frozen=True, config=STRICT)
class Change:
    """What becomes of one tensor of a model's file: another in its place, or products added to it. Neither: it is as in the file."""

    whole: Segment | None
    terms: tuple[LowRank, ...]
    dtype: str = ""                # which the tensor is cast to before anything is added to it, and after
    sum_dtype: str = ""            # in which it is added
    hooked: tuple[LowRank, ...] = ()                           # added to that in float32, and rounded again: ComfyUI's hooks


@dataclass(frozen=True, config=STRICT)
class AutoencoderSpec:
    """A VAE whose weights the host sends as segments, once."""

    name: str
    dtype: str
    weights: dict[str, Segment]
    settings: dict[str, str] = dataclasses.field(default_factory=dict)     # what its tensors do not tell; Kind says which


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
class Nag:
    """Normalized Attention Guidance between two of the parts of a batch, which has num_parts of the same size."""

    scale: float
    alpha: float
    tau: float
    positive: Natural
    negative: Natural
    num_parts: Natural


@dataclass(frozen=True, config=STRICT)
class Branch:
    """One call of the model: a latent, its timesteps and its conditioning, and where the prediction goes."""

    latent: Segment                # (B, C, H, W) or (B, C, F, H, W)
    timestep: Segment              # (B,), or (B, N): one for each frame or token of the whole latent
    conditioning: str              # name given by Conditioning
    prediction: Segment = dataclasses.field(metadata=RESULT)   # like latent
    control: dict[str, Segment] = dataclasses.field(default_factory=dict)  # what a ControlNet adds, by models.plan.Family.control_shapes
    # block, as ComfyUI's patches call it -> what instead: it is passed by; its self-attention gives its values, whatever the queries; or it
    # also tells `scores`
    operations: dict[str, Literal["skip", "values", "scores"]] = dataclasses.field(default_factory=dict)
    # (ranks of the displaced axis, B, keys), where an operation asks for them: the share of attention that each pixel gets, of all heads on
    # average, from each rank's queries together
    scores: Segment | None = dataclasses.field(default=None, metadata=RESULT)
    guided: tuple[Nag, ...] = ()   # done to what every self-attention gives, one after the other
    beside: dict[str, Segment] = dataclasses.field(default_factory=dict)   # conditioning of this call alone, such as parts of the latent
    parts: dict[str, Segment] = dataclasses.field(default_factory=dict, metadata=RESULT)   # where the predictions for those go, in float32


# --- commands ---

@dataclass(frozen=True, config=STRICT)
class LoadModel:
    request: Natural
    spec: ModelSpec


@dataclass(frozen=True, config=STRICT)
class DropModel:
    """Forget a model (or VAE) and give its memory back."""

    request: Natural
    name: str


@dataclass(frozen=True, config=STRICT)
class ChangeWeights:
    """Give these tensors of a model's file other values, whatever they have been changed to before; others stay."""

    request: Natural
    name: str
    changes: dict[str, Change]
    version: Natural = 0           # of the weights, which is left, and kept while there is room; 0: it is not
    begins: bool = True            # is it the first of several commands that lead from that version to the next?


@dataclass(frozen=True, config=STRICT)
class ReturnWeights:
    """Give a model the weights of a version that it has left, and keep those it has now as another; "kept" of the answer: was it kept?"""

    request: Natural
    name: str
    version: Natural
    left: Natural


@dataclass(frozen=True, config=STRICT)
class ParkModel:
    """Move weights of a model to host memory, where they stay until RestoreModel or DropModel."""

    request: Natural
    name: str
    targets: list[Natural]         # for each rank: bytes of its weights that are to be in host memory alone
    segments: list[Segment]        # for each part of the model (partition.holders): memory for what has no place there yet


@dataclass(frozen=True, config=STRICT)
class RestoreModel:
    """Bring all weights of a model back to the devices."""

    request: Natural
    name: str


@dataclass(frozen=True, config=STRICT)
class Conditioning:
    """Tensors that stay the same for a run, sent once and then named."""

    request: Natural
    name: str
    tensors: dict[str, Segment]


@dataclass(frozen=True, config=STRICT)
class DropConditioning:
    request: Natural
    names: list[str]


@dataclass(frozen=True, config=STRICT)
class Predict:
    """Evaluate the model on one or two branches: whole latents, or one patch of them."""

    request: Natural
    model: str
    layout: Layout
    branches: list[Branch]
    patch: Patch | None = None     # None: the latents are whole
    keep: bool = False             # keep keys and values for the patches that follow; with displaced_degree, what the ranks tell
    by_image: bool = False         # send the images of a batch through the stages one after the other
    forecast: Share = 0.0          # how far stale keys and values go on as they went before
    stale: bool = False            # with displaced_degree: use what the last call with the same conditioning left of other ranks
    displaced_mode: str = "corrected_async_gn"                 # one of displaced_modes.MODES
    speeds: tuple[Speed, ...] = ()                          # of each rank, relative, the same for all calls of a run; (): alike


@dataclass(frozen=True, config=STRICT)
class LoadAutoencoder:
    request: Natural
    spec: AutoencoderSpec


@dataclass(frozen=True, config=STRICT)
class Estimate:
    """Tell how much memory a rank needs to decode (scale 1) or encode a tensor of this shape: "needed_bytes" of the answer, and
    "roomy_bytes" to compute convolutions all at once. Where asked for, what there is to do, by the names of forecast.decoding.Work."""

    request: Natural
    autoencoder: str
    shape: tuple[Natural, ...]
    scale: Natural                 # see parallel.vae.encode_rows
    num_ranks: Natural = 0         # which would share it; 0: all
    with_work: bool = False


@dataclass(frozen=True, config=STRICT)
class Decode:
    """Decode latents (B, C, H, W) to pictures (B, H', W', 3) with values in [0, 1]; of videos, (B, C, F, H, W) to
    (B, F', H', W', 3)."""

    request: Natural
    autoencoder: str
    latent: Segment
    picture: Segment = dataclasses.field(metadata=RESULT)
    measure_memory: bool = False   # count what lives, which takes time
    speeds: tuple[Speed, ...] = ()                          # of each rank, relative; (): alike
    num_ranks: Natural = 0         # which share it; 0: all
    first_rank: Natural = 0        # of those


@dataclass(frozen=True, config=STRICT)
class Encode:
    """Encode pictures (B, 3, H, W), or videos (B, 3, F, H, W), with values in [-1, 1], to latents: the means."""

    request: Natural
    autoencoder: str
    picture: Segment
    latent: Segment = dataclasses.field(metadata=RESULT)
    speeds: tuple[Speed, ...] = ()
    num_ranks: Natural = 0
    first_rank: Natural = 0


@dataclass(frozen=True, config=STRICT)
class Probe:
    """Measure this rank's device and its links to the others; worker/probe.py says what the numbers of the answer are."""

    request: Natural
    dtype: str                     # that models compute in
    a_machine: Natural = 0         # config.devices_a_machine


@dataclass(frozen=True, config=STRICT)
class ReportMemory:
    """Tell what memory this rank holds, and, from since_s on, what it has done when: the spans of the answer."""

    request: Natural
    since_s: float = -1.0          # by time.perf_counter; below 0: no spans


@dataclass(frozen=True, config=STRICT)
class GiveBack:
    """Give the memory back that nothing uses: others need it."""

    request: Natural


@dataclass(frozen=True, config=STRICT)
class Abandon:
    """Nobody waits for this LoadModel (a DropModel follows), Decode or Encode any more. It overtakes the commands before it."""

    request: Natural


@dataclass(frozen=True, config=STRICT)
class Stop:
    request: Natural = 0


# --- replies ---

@dataclass(frozen=True, config=STRICT)
class Ready:
    """The worker has joined the process group and takes commands."""

    rank: Rank
    pid: Natural
    device: str


@dataclass(frozen=True, config=STRICT)
class Unready:
    """The worker cannot take commands, and waits to be ended."""

    rank: Rank
    message: Printable             # why
    by_links: bool = False         # is it the transfer between the ranks that failed?


@dataclass(frozen=True, config=STRICT)
class Phase:
    """What a worker is doing, for a person, e.g. "loading weights" 12 of 40."""

    rank: Rank
    text: Printable
    done: Natural = 0
    total: Natural = 0
    counts_bytes: bool = False     # are done and total bytes?


@dataclass(frozen=True, config=STRICT)
class Beat:
    """A worker is still at a command. One that says nothing for long is stopped; where all wait for others and none gets on, they hang."""

    rank: Rank
    request: Natural
    num_passed: Natural            # how often it has waited for other ranks, and got what it waited for
    waits: bool                    # does it wait for one now?
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)   # of memory, as it is meanwhile; see worker/memory.py


@dataclass(frozen=True, config=STRICT)
class Span:
    """What a rank did for a while. Times are those of time.perf_counter, which the processes of a machine share."""

    kind: str                      # "whole" or "patch" of a step; "wait" for the stage before; "exchange" with others; "decode", "encode"
    start_s: float
    end_s: float
    time: float = -1.0             # the timestep of the step it belongs to; below 0: of none
    first_row: Natural = 0         # of the patch


@dataclass(frozen=True, config=STRICT)
class Done:
    request: Natural
    rank: Rank
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)   # measurements, by name
    spans: list[Span] = dataclasses.field(default_factory=list)           # of ReportMemory


@dataclass(frozen=True, config=STRICT)
class Failed:
    request: Natural
    rank: Rank
    device: str
    kind: str                      # name of the exception's class
    message: Printable
    traceback: Printable
    exchanged: bool = True         # had it begun an exchange with other ranks, which they may still be in?
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)   # bytes by name, where memory ran out: Engine.shortage


MESSAGES = {cls.__name__: cls for cls in (
    LoadModel, DropModel, ChangeWeights, ReturnWeights, ParkModel, RestoreModel, Conditioning, DropConditioning, Predict, LoadAutoencoder,
    Estimate, Decode, Encode, Probe, ReportMemory, GiveBack, Abandon, Stop, Ready, Unready, Phase, Beat, Done, Failed)}


ADAPTERS = {name: TypeAdapter(cls) for name, cls in MESSAGES.items()}


def encode(message, adapters=ADAPTERS):
    """Turn a message into bytes: the name of its class, a space, its fields as JSON. adapters: of the messages there are, by name."""
    name = type(message).__name__
    return name.encode() + b" " + adapters[name].dump_json(message)


def decode(raw, adapters=ADAPTERS):
    """Turn bytes back into a message. Raises XDiTError for anything else: an unknown name or field, a wrong type or size."""
    name, _, fields = raw.partition(b" ")
    try:
        return adapters[name.decode()].validate_json(fields)
    except (KeyError, UnicodeDecodeError, ValidationError) as error:
        raise XDiTError(f"Not a message of this project: {raw[:200]!r} ({str(error)[:1000]})") from error
