"""The messages of a channel, as frozen dataclasses that travel as JSON. Nothing is ever pickled.

Commands go from the host to every rank, the same ones in the same order. Replies come back, each over its own channel.
A message is checked where it is made and again where it arrives: STRICT says how.
"""

import dataclasses

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from .errors import XDiTError
from .shared_memory import Segment
from .specs import (
    RESULT,
    WHOLE,
    AutoencoderSpec,
    BackendChoice,
    Branch,
    Change,
    Layout,
    ModelSpec,
    NetworkSpec,
    Patch,
    WeightCopies,
)
from .store_messages import StoreReply, StoreRequest
from .validation import STRICT, ByName, Exchange, Many, ManyListed, Natural, Printable, Rank, Share, Speed

JOINING = "joining the devices"                                # the Phase in which a worker joins the others
TRYING_LINKS = "trying the links between the devices"          # and in which they send each other something

# --- what commands speak of ---

# --- commands ---

@dataclass(frozen=True, config=STRICT)
class LoadModel:
    request: Natural
    spec: ModelSpec
    # for each part of the model (partition.ranks_by_part): spec.host_bytes of memory; none: ranks have their own
    segments: ManyListed[Segment] = dataclasses.field(default_factory=list)


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
    changes: ByName[str, Change]
    version: Natural = 0           # of the weights, which is left, and kept while there is room; 0: it is not
    begins: bool = True            # is it the first of several commands that lead from that version to the next?


@dataclass(frozen=True, config=STRICT)
class ReturnWeights:
    """Give a model the weights of a version that it has left, and keep those it has now as another;
    "kept" of the answer: was it kept?"""

    request: Natural
    name: str
    version: Natural
    left: Natural


@dataclass(frozen=True, config=STRICT)
class ParkModel:
    """Move weights of a model to host memory, where they stay until RestoreModel or DropModel."""

    request: Natural
    name: str
    targets: ManyListed[Natural]         # for each rank: bytes of its weights that are to be in host memory alone
    # for each part of the model (partition.ranks_by_part): memory for what has no place there yet
    segments: ManyListed[Segment]


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
    tensors: ByName[str, Segment]


@dataclass(frozen=True, config=STRICT)
class DropConditioning:
    request: Natural
    names: ManyListed[str]


@dataclass(frozen=True, config=STRICT)
class Predict:
    """Evaluate the model on one or two branches: whole latents, or one patch of them."""

    request: Natural
    model: str
    layout: Layout
    branches: ManyListed[Branch]
    patch: Patch | None = None     # None: the latents are whole
    # keep keys and values for the patches that follow; with displaced_degree, what the ranks tell
    keep: bool = False
    by_image: bool = False         # send the images of a batch through the stages one after the other
    extrapolation: Share = 0.0          # how far stale keys and values go on as they went before
    # with displaced_degree: use what the last call with the same conditioning left of other ranks
    stale: bool = False
    displaced_mode: str = "corrected_async_gn"                 # one of displaced_modes.MODES
    # of each rank, relative, the same for all calls of a run; (): alike
    speeds: Many[Speed] = ()
    compile_backend: str = ""      # of torch.compile: blocks run as its graphs; "": as they are
    backend: BackendChoice = dataclasses.field(default_factory=BackendChoice)      # of attention
    exchange: str = WHOLE          # in which form attention's tensors travel, one of exchanges.EXCHANGES
    copies: WeightCopies = dataclasses.field(default_factory=WeightCopies)      # of weights that come from host memory


@dataclass(frozen=True, config=STRICT)
class LoadAutoencoder:
    request: Natural
    spec: AutoencoderSpec


@dataclass(frozen=True, config=STRICT)
class LoadNetwork:
    """Hold a network until DropModel of its name."""

    request: Natural
    spec: NetworkSpec


@dataclass(frozen=True, config=STRICT)
class Estimate:
    """Tell how much memory a rank needs to decode (scale 1) or encode a tensor of this shape: "needed_bytes" of the
    answer, and "unblocked_bytes" to compute convolutions all at once. Where asked for, what there is to do, by the
    names of planner.vae_cost.Work."""

    request: Natural
    autoencoder: str
    shape: Many[Natural]
    scale: Natural                 # see parallel.vae_rows.encode_rows
    num_ranks: Natural = 0         # which would share it; 0: all
    with_work: bool = False


@dataclass(frozen=True, config=STRICT)
class Decode:
    """Decode latents (B, C, H, W) to pictures (B, H', W', 3) with values in [0, 1]; of videos, (B, C, F, H, W) to
    (B, F', H', W', 3)."""

    request: Natural
    autoencoder: str
    latent: Segment
    image: Segment = dataclasses.field(metadata=RESULT)
    measure_memory: bool = False   # count what lives, which takes time
    speeds: Many[Speed] = ()                          # of each rank, relative; (): alike
    num_ranks: Natural = 0         # which share it; 0: all
    first_rank: Natural = 0        # of those


@dataclass(frozen=True, config=STRICT)
class Encode:
    """Encode pictures (B, 3, H, W), or videos (B, 3, F, H, W), with values in [-1, 1], to latents: the means."""

    request: Natural
    autoencoder: str
    image: Segment
    latent: Segment = dataclasses.field(metadata=RESULT)
    speeds: Many[Speed] = ()
    num_ranks: Natural = 0
    first_rank: Natural = 0


@dataclass(frozen=True, config=STRICT)
class Probe:
    """Measure this rank's device and its links to the others;
    worker/device_probe.py says what the numbers of the answer are."""

    request: Natural
    dtype: str                     # that models compute in
    per_machine: Natural = 0         # config.devices_per_machine


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
class Abort:
    """Nobody waits for this LoadModel (a DropModel follows), Decode or Encode any more.
    It overtakes the commands before it."""

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
    # of attention: a name of BackendChoice -> why it cannot run here; "": it can
    unusable_backends: ByName[str, Printable] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class StartFailed:
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
class Heartbeat:
    """A worker is still at a command. One that says nothing for long is stopped;
    where all wait for others and none gets on, they hang."""

    rank: Rank
    request: Natural
    num_passed: Natural            # how often it has waited for other ranks, and got what it waited for
    waits: bool                    # does it wait for one now?
    # of memory, as it is meanwhile; see worker/memory.py
    numbers: ByName[str, float] = dataclasses.field(default_factory=dict)
    # exchanges of the request, by the ranks that take part: how many this rank has entered; see collectives.Traffic
    entered: ByName[Exchange, Natural] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, config=STRICT)
class Span:
    """What a rank did for a while. Times are those of time.perf_counter, which the processes of a machine share."""

    # "whole" or "patch" of a step; "wait" for the stage before, or for "weights" from host memory; "exchange" with
    # others; "decode", "encode"; "measure"
    kind: str
    start_s: float
    end_s: float
    time: float = -1.0             # the timestep of the step it belongs to; below 0: of none
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
    # bytes by name, where memory ran out: Engine.shortage
    numbers: ByName[str, float] = dataclasses.field(default_factory=dict)
    entered: ByName[Exchange, Natural] = dataclasses.field(default_factory=dict)      # see Heartbeat
    is_broken: bool = False        # did an exchange fail on this rank?
    block: Printable = ""          # of the model, that this rank was at: "3 of 12"


MESSAGES = {cls.__name__: cls for cls in (
    LoadModel, DropModel, ChangeWeights, ReturnWeights, ParkModel, RestoreModel, Conditioning, DropConditioning,
    Predict, LoadAutoencoder, LoadNetwork,
    Estimate, Decode, Encode, Probe, ReportMemory, GiveBack, Abort, Stop, Ready, StartFailed, Phase, Heartbeat, Done,
    Failed, StoreRequest, StoreReply)}


ADAPTERS = {name: TypeAdapter(cls) for name, cls in MESSAGES.items()}


def encode(message, adapters=ADAPTERS):
    """Turn a message into bytes: the name of its class, a space, its fields as JSON.
    adapters: of the messages there are, by name."""
    name = type(message).__name__
    return name.encode() + b" " + adapters[name].dump_json(message)


def decode(raw, adapters=ADAPTERS):
    """Turn bytes back into a message. Raises XDiTError for anything else:
    an unknown name or field, a wrong type or size."""
    name, _, fields = raw.partition(b" ")
    try:
        return adapters[name.decode()].validate_json(fields)
    except (KeyError, UnicodeDecodeError, ValidationError) as error:
        raise XDiTError(f"Not a message of this project: {raw[:200]!r} ({str(error)[:1000]})") from error
