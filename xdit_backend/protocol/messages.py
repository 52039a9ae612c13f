"""The messages of a channel, as frozen dataclasses that travel as JSON. Nothing is ever pickled.

Commands go from the host to every rank, the same ones in the same order. Replies come back, each over its own channel.
"""

import dataclasses
import functools
import json
import types
import typing
from dataclasses import dataclass

from .errors import XDiTError
from .segments import Segment


# --- what commands speak of ---

@dataclass(frozen=True)
class Stages:
    """How PipeFusion spreads a model's blocks: rank r runs stage r // sequence_degree % pipefusion_degree."""

    pipefusion_degree: int
    sequence_degree: int = 1       # ranks that share a stage
    num_blocks: tuple[int, ...] = ()           # blocks of each stage; (): balanced by cost
    every_block: bool = False      # hold all blocks on every rank, so that warm-up can run by sequence parallelism
    offload: bool = False          # keep stale keys and values in host memory


@dataclass(frozen=True)
class ModelSpec:
    """Which model, in which form. Two equal specs are the same model; a worker loads what it lacks."""

    name: str                      # unique for file, dtype, stages and model patches
    family: str                    # key of models.FAMILIES
    path: str                      # a safetensors file, or a diffusers folder
    storage_dtype: str
    compute_dtype: str
    stages: Stages | None = None   # None: every rank runs every block


@dataclass(frozen=True)
class AutoencoderSpec:
    """A VAE whose weights the host sends as segments, once."""

    name: str
    dtype: str
    weights: dict[str, Segment]
    settings: dict[str, str] = dataclasses.field(default_factory=dict)     # what its tensors do not tell; Kind says which


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of one run. Their product is the number of ranks that work."""

    cfg_degree: int = 1
    data_degree: int = 1
    pipefusion_degree: int = 1
    ring_degree: int = 1
    ulysses_degree: int = 1


@dataclass(frozen=True)
class Patch:
    """Which rows of a whole latent a piece of it holds: those from `start` on, of `whole`, along `dim`."""

    dim: int
    start: int
    whole: int


@dataclass(frozen=True)
class Branch:
    """One call of the model: a latent, its timesteps and its conditioning, and where the prediction goes."""

    latent: Segment                # (B, C, H, W) or (B, C, F, H, W)
    timestep: Segment              # (B,)
    conditioning: str              # name given by Conditioning
    prediction: Segment            # like latent


# --- commands ---

@dataclass(frozen=True)
class LoadModel:
    request: int
    spec: ModelSpec


@dataclass(frozen=True)
class DropModel:
    """Forget a model (or VAE) and give its memory back."""

    request: int
    name: str


@dataclass(frozen=True)
class Conditioning:
    """Tensors that stay the same for a run, sent once and then named."""

    request: int
    name: str
    tensors: dict[str, Segment]


@dataclass(frozen=True)
class DropConditioning:
    request: int
    names: list[str]


@dataclass(frozen=True)
class Predict:
    """Evaluate the model on one or two branches: whole latents, or one patch of them."""

    request: int
    model: str
    layout: Layout
    branches: list[Branch]
    patch: Patch | None = None     # None: the latents are whole
    keep: bool = False             # keep keys and values for the patches that follow
    by_image: bool = False         # send the images of a batch through the stages one after the other


@dataclass(frozen=True)
class LoadAutoencoder:
    request: int
    spec: AutoencoderSpec


@dataclass(frozen=True)
class Decode:
    """Decode latents (B, C, H, W) to pictures (B, H', W', 3) with values in [0, 1]; of videos, (B, C, F, H, W) to
    (B, F', H', W', 3)."""

    request: int
    autoencoder: str
    latent: Segment
    picture: Segment
    measure_memory: bool = False   # count what lives, which takes time


@dataclass(frozen=True)
class Encode:
    """Encode pictures (B, 3, H, W), or videos (B, 3, F, H, W), with values in [-1, 1], to latents: the means."""

    request: int
    autoencoder: str
    picture: Segment
    latent: Segment


@dataclass(frozen=True)
class ReportMemory:
    request: int


@dataclass(frozen=True)
class Stop:
    request: int = 0


# --- replies ---

@dataclass(frozen=True)
class Ready:
    """The worker has joined the process group and takes commands."""

    rank: int
    pid: int
    device: str


@dataclass(frozen=True)
class Phase:
    """What a worker is doing, for a person, e.g. "loading weights" 12 of 40."""

    rank: int
    text: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True)
class Done:
    request: int
    rank: int
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)   # measurements, by name


@dataclass(frozen=True)
class Failed:
    request: int
    rank: int
    device: str
    kind: str                      # name of the exception's class
    message: str
    traceback: str


MESSAGES = {cls.__name__: cls for cls in (
    LoadModel, DropModel, Conditioning, DropConditioning, Predict, LoadAutoencoder, Decode, Encode, ReportMemory, Stop,
    Ready, Phase, Done, Failed)}


def encode(message):
    """Turn a message into bytes."""
    return json.dumps({"type": type(message).__name__, **dataclasses.asdict(message)}).encode()


def decode(raw):
    """Turn bytes back into a message, checking every field's type. Raises XDiTError for anything else."""
    try:
        fields = json.loads(raw)
        cls = MESSAGES[fields.pop("type")]
        return _build(cls, fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise XDiTError(f"Not a message of this project: {raw[:200]!r} ({error})") from error


@functools.cache
def _hints(kind):
    return typing.get_type_hints(kind)


def _build(kind, value):
    """Make `value`, as JSON gives it, an instance of the annotation `kind`."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise TypeError(f"{kind.__name__} has no {sorted(unknown)}")
        return kind(**{name: _build(hints[name], item) for name, item in value.items()})
    if origin is list:
        return [_build(typing.get_args(kind)[0], item) for item in value]
    if origin is tuple:
        return tuple(_build(typing.get_args(kind)[0], item) for item in value)
    if origin is dict:
        return {str(key): _build(typing.get_args(kind)[1], item) for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _build(typing.get_args(kind)[0], value)
    if kind is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value
