"""The messages of a channel: frozen dataclasses, sent as JSON and never pickled.

Commands go from the host to every rank, the same ones in the same order. Each rank replies over its own channel. A
message is validated where it is constructed and again where it is received (validation.STRICT).
"""

import dataclasses

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from .errors import XDiTError
from .shared_memory import Segment
from .specs import (
    RESULT,
    AutoencoderSpec,
    Branch,
    Change,
    ForwardOptions,
    Layout,
    ModelSpec,
    NetworkSpec,
    Patch,
    Tile,
    UpscalerSpec,
)
from .store_messages import StoreReply, StoreRequest
from .validation import STRICT, ByName, Exchange, Many, ManyListed, Natural, Printable, Rank, Speed

STARTING = "starting workers"                                  # Phase until a worker has loaded its libraries
JOINING = "joining the devices"                                # Phase in which a worker joins the process group
TRYING_LINKS = "trying the links between the devices"          # Phase in which workers exchange test tensors


# --- commands ---

@dataclass(frozen=True, config=STRICT)
class LoadModel:
    request: Natural
    spec: ModelSpec
    # spec.host_bytes of memory for each partition of the model (partition.ranks_by_part); none: ranks allocate it
    segments: ManyListed[Segment] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, config=STRICT)
class DropModel:
    """Unload a model or VAE and free its memory."""

    request: Natural
    name: str


@dataclass(frozen=True, config=STRICT)
class ChangeWeights:
    """Set new values for these tensors of a model's file, replacing earlier changes of them; others stay."""

    request: Natural
    name: str
    changes: ByName[str, Change]
    version: Natural = 0           # current version of the weights, to be cached while memory allows; 0: do not cache
    begins: bool = True            # the first of the commands that lead from that version to the next


@dataclass(frozen=True, config=STRICT)
class ReturnWeights:
    """Restore a cached version of a model's weights, and cache the current ones as version `left`.

    "cached" in the reply's numbers: whether the version was still cached.
    """

    request: Natural
    name: str
    version: Natural
    left: Natural


@dataclass(frozen=True, config=STRICT)
class ParkModel:
    """Park weights of a model in system RAM until RestoreModel or DropModel."""

    request: Natural
    name: str
    targets: ManyListed[Natural]         # for each rank: bytes of its weights that are to be in system RAM only
    # for each partition of the model (partition.ranks_by_part): memory for weights that are not in system RAM yet
    segments: ManyListed[Segment]


@dataclass(frozen=True, config=STRICT)
class RestoreModel:
    """Load all parked weights of a model back to the devices."""

    request: Natural
    name: str


@dataclass(frozen=True, config=STRICT)
class Conditioning:
    """Tensors that are constant during a run: sent once, then referred to by name."""

    request: Natural
    name: str
    tensors: ByName[str, Segment]


@dataclass(frozen=True, config=STRICT)
class DropConditioning:
    request: Natural
    names: ManyListed[str]


@dataclass(frozen=True, config=STRICT)
class Predict:
    """Evaluate the model on one or two branches: on full latents, or on one patch of them."""

    request: Natural
    model: str
    layout: Layout
    branches: ManyListed[Branch]
    patch: Patch | None = None     # None: full latents
    # cache keys and values for the following patches; with displaced_degree, the activations of other ranks
    keep: bool = False
    by_image: bool = False         # pipeline the images of a batch through the stages
    # with displaced_degree: use other ranks' activations from the last call with the same conditioning
    stale: bool = False
    displaced_mode: str = "corrected_async_gn"                 # key of specs.MODES
    # relative speed of each rank, constant during a run; (): equal
    speeds: Many[Speed] = ()
    options: ForwardOptions = dataclasses.field(default_factory=ForwardOptions)


@dataclass(frozen=True, config=STRICT)
class LoadAutoencoder:
    request: Natural
    spec: AutoencoderSpec


@dataclass(frozen=True, config=STRICT)
class LoadNetwork:
    """Load an injected network, until DropModel of its name."""

    request: Natural
    spec: NetworkSpec


@dataclass(frozen=True, config=STRICT)
class Estimate:
    """Estimate the memory that a rank needs to decode (scale 1) or encode a tensor of this shape.

    Numbers of the reply: "needed_bytes"; "unblocked_bytes", without splitting convolutions into blocks; and with
    with_work the fields of planner.vae_cost.Work.
    """

    request: Natural
    autoencoder: str
    shape: Many[Natural]
    scale: Natural                 # see parallel.vae_rows.encode_rows
    num_ranks: Natural = 0         # that it would be split across; 0: all
    with_work: bool = False


@dataclass(frozen=True, config=STRICT)
class Decode:
    """Decode latents (B, C, H, W) to images (B, H', W', 3) with values in [0, 1], or latents of videos (B, C, F, H, W)
    to (B, F', H', W', 3)."""

    request: Natural
    autoencoder: str
    latent: Segment
    image: Segment = dataclasses.field(metadata=RESULT)
    measure_memory: bool = False   # measure the peak of live tensors, which is slow
    speeds: Many[Speed] = ()       # relative speed of each rank; (): equal
    num_ranks: Natural = 0         # that it is split across; 0: all
    first_rank: Natural = 0        # of those


@dataclass(frozen=True, config=STRICT)
class Encode:
    """Encode images (B, 3, H, W) or videos (B, 3, F, H, W) with values in [-1, 1] to the means of their latents."""

    request: Natural
    autoencoder: str
    image: Segment
    latent: Segment = dataclasses.field(metadata=RESULT)
    speeds: Many[Speed] = ()
    num_ranks: Natural = 0
    first_rank: Natural = 0


@dataclass(frozen=True, config=STRICT)
class LoadUpscaler:
    """Load an upscale model, until DropModel of its name."""

    request: Natural
    spec: UpscalerSpec


@dataclass(frozen=True, config=STRICT)
class Upscale:
    """Upscale tiles, each on its rank."""

    request: Natural
    upscaler: str
    tiles: ManyListed[Tile]
    first: Natural = 0             # number of the first of them among the `total` tiles of the node's images
    total: Natural = 0


@dataclass(frozen=True, config=STRICT)
class Probe:
    """Measure this rank's device and its links to the others. worker/device_probe.py documents the reply's numbers."""

    request: Natural
    dtype: str                     # compute dtype of models
    per_machine: Natural = 0         # config.devices_per_machine


@dataclass(frozen=True, config=STRICT)
class ReportMemory:
    """Report this rank's memory, and the spans of its work from since_s on."""

    request: Natural
    since_s: float = -1.0          # by time.perf_counter; below 0: no spans


@dataclass(frozen=True, config=STRICT)
class GiveBack:
    """Free unused memory for other programs."""

    request: Natural


@dataclass(frozen=True, config=STRICT)
class Abort:
    """Cancel a LoadModel (a DropModel follows), Decode, Encode or Upscale that the host no longer waits for. It
    overtakes the commands before it."""

    request: Natural


@dataclass(frozen=True, config=STRICT)
class Stop:
    request: Natural = 0


# --- replies ---

@dataclass(frozen=True, config=STRICT)
class Ready:
    """The worker has joined the process group and accepts commands."""

    rank: Rank
    pid: Natural
    device: str
    # attention backends: a name of BackendChoice -> why it cannot run here; "": it can
    unusable_backends: ByName[str, Printable] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class StartFailed:
    """The worker could not start, and waits to be ended."""

    rank: Rank
    message: Printable             # the reason
    by_links: bool = False         # the transfer between ranks failed


@dataclass(frozen=True, config=STRICT)
class Phase:
    """Progress of a worker to show to the user, e.g. "loading weights" 12 of 40."""

    rank: Rank
    text: Printable
    done: Natural = 0
    total: Natural = 0
    counts_bytes: bool = False     # done and total are bytes


@dataclass(frozen=True, config=STRICT)
class Heartbeat:
    """Sign of life of a worker during a command. A worker that is silent for too long is stopped; if all of them wait
    for other ranks and none makes progress, the group hangs."""

    rank: Rank
    request: Natural
    num_passed: Natural            # completed waits for other ranks
    waits: bool                    # waits for another rank now
    # current memory; see worker/memory.py
    numbers: ByName[str, float] = dataclasses.field(default_factory=dict)
    # participating ranks -> number of their collectives and transfers that this rank has entered during the request;
    # see collectives.Traffic
    entered: ByName[Exchange, Natural] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class Span:
    """An interval of a rank's work, by time.perf_counter, which is the same clock in all processes of a machine."""

    # "whole" (full latent) or "patch" of a step; "wait" for the previous stage; "weights" being streamed; "exchange"
    # with other ranks; "decode"; "encode"; "upscale"; "measure"
    kind: str
    start_s: float
    end_s: float
    time: float = -1.0             # timestep of its step; below 0: none
    first_row: Natural = 0         # of the patch


@dataclass(frozen=True, config=STRICT)
class Done:
    request: Natural
    rank: Rank
    numbers: ByName[str, float] = dataclasses.field(default_factory=dict)   # measurements, by name
    spans: ManyListed[Span] = dataclasses.field(default_factory=list)           # of ReportMemory
    entered: ByName[Exchange, Natural] = dataclasses.field(default_factory=dict)      # see Heartbeat


@dataclass(frozen=True, config=STRICT)
class Failed:
    request: Natural
    rank: Rank
    device: str
    kind: str                      # name of the exception's class
    message: Printable
    traceback: Printable
    # bytes by name, if memory ran out: Engine.out_of_memory
    numbers: ByName[str, float] = dataclasses.field(default_factory=dict)
    entered: ByName[Exchange, Natural] = dataclasses.field(default_factory=dict)      # see Heartbeat
    is_broken: bool = False        # a collective or transfer failed on this rank
    block: Printable = ""          # of the model that this rank was running: "3 of 12"


MESSAGES = {cls.__name__: cls for cls in (
    LoadModel, DropModel, ChangeWeights, ReturnWeights, ParkModel, RestoreModel, Conditioning, DropConditioning,
    Predict, LoadAutoencoder, LoadNetwork, LoadUpscaler, Upscale,
    Estimate, Decode, Encode, Probe, ReportMemory, GiveBack, Abort, Stop, Ready, StartFailed, Phase, Heartbeat, Done,
    Failed, StoreRequest, StoreReply)}


ADAPTERS = {name: TypeAdapter(cls) for name, cls in MESSAGES.items()}


def encode(message, adapters=ADAPTERS):
    """Serialise a message: its class name, a space, its fields as JSON. adapters: {class name: TypeAdapter}."""
    name = type(message).__name__
    return name.encode() + b" " + adapters[name].dump_json(message)


def decode(raw, adapters=ADAPTERS):
    """Deserialise a message. Raises XDiTError for an unknown name or field, and for a wrong type or size."""
    name, _, fields = raw.partition(b" ")
    try:
        return adapters[name.decode()].validate_json(fields)
    except (KeyError, UnicodeDecodeError, ValidationError) as error:
        raise XDiTError(f"Invalid message: {raw[:200]!r} ({str(error)[:1000]})") from error
