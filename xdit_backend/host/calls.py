"""Calls of a model as the bridge makes them, how they reach the workers, and the handles of those on their way.
Used by the client."""

from dataclasses import dataclass, field

import torch

from ..protocol import specs
from ..protocol.errors import UnsupportedError
from .launcher import WorkerGroup


@dataclass(frozen=True)
class Call:
    """One call of the model: what ComfyUI hands to a diffusion model."""

    latent: torch.Tensor                   # (B, C, H, W) or (B, C, F, H, W)
    timestep: torch.Tensor                 # (B,)
    conditioning: dict[str, torch.Tensor]
    name: str = ""                         # of the conditioning, where Client.name_conditioning gave it one
    # what a ControlNet adds where: Family.control_shapes
    control: dict[str, torch.Tensor] = field(default_factory=dict)

    operations: dict[str, str] = field(default_factory=dict)               # what blocks do instead: specs.Branch
    scores: torch.Tensor | None = None     # to be filled, as Branch.scores
    guided: tuple[specs.Nag, ...] = ()  # what is done to attentions: specs.Branch
    free_u: tuple[specs.FreeU | specs.Shrink, ...] = ()    # of a U-Net: specs.Branch
    tiles: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)          # of a U-Net: specs.Branch
    # ((specs.NetworkUse, injected_networks.Network), ...): what is added inside the model
    networks: tuple = ()
    call_conditioning: dict[str, torch.Tensor] = field(default_factory=dict)          # conditioning of this call alone
    # predictions for the latent's other parts, to be filled
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    # keys and values of references that workers keep for later calls, or have kept: specs.Branch
    cached: specs.CachedReferences | None = None
    left_out: dict[str, torch.Tensor] = field(default_factory=dict)        # of the conditioning, since those are kept
    compile_backend: str = ""              # of torch.compile: blocks run as its graphs; "": as they are
    backend: specs.BackendChoice = field(default_factory=specs.BackendChoice)  # of attention
    exchange: str = specs.WHOLE        # in which form attention's tensors travel, one of specs.EXCHANGES
    copies: specs.WeightCopies = field(default_factory=specs.WeightCopies)  # of weights that come from host memory

    @property
    def given(self):
        """All conditioning, {name: tensor}."""
        return self.conditioning | self.call_conditioning | self.left_out

    @property
    def is_changed(self):
        """Is the model in this call another than the file's? Then nothing is kept of it for other calls."""
        return bool(self.operations or self.guided)

    def control_by(self, make):
        """{place: what `make` gives for the tensor of `control` there},
        made once of a tensor that is for many places."""
        made = {key: make(tensor) for key, tensor in {id(tensor): tensor for tensor in self.control.values()}.items()}
        return {place: made[id(tensor)] for place, tensor in self.control.items()}


@dataclass(frozen=True)
class ForwardPass:
    """How calls go through the workers: whole or by patches, and what is kept of them for others of the run."""

    patch: specs.Patch | None = None       # which rows of the whole latent the calls' latents hold; None: all
    # calls of the same conditioning will follow that need this one's keys and values, or what ranks tell
    keep: bool = False
    by_image: bool = False                 # the images of a batch go through the stages one after the other
    extrapolation: float = 0.0                  # docs/design/pipefusion.md; the same for all calls of a run
    stale: bool = False                    # displaced patches: use what the last call left of other ranks
    displaced_mode: str = "corrected_async_gn"                 # one of displaced_modes.MODES


WHOLE = ForwardPass()                      # nothing is kept of it


@dataclass(frozen=True, eq=False)
class CallHandle:
    """Calls that are on their way."""

    group: WorkerGroup
    request: int
    predictions: tuple
    # [(what workers have written beside predictions, what of a Call is to be filled with it)]
    extra_outputs: tuple


def share_call(call, name, num_channels, store, segments):
    """Put a call into shared memory; what is made there is added to `segments`. name: of its conditioning.

    Returns (the specs.Branch, its prediction, which the workers write, and what else they write: extra_outputs of a
    CallHandle).
    """
    def create(shape):
        segment, view = store.create(shape, torch.float32)
        segments.append(segment)
        return segment, view

    def share(tensor):
        segments.append(store.share(tensor))
        return segments[-1]

    prediction, view = create((call.latent.shape[0], num_channels, *call.latent.shape[2:]))
    latent, timestep, control = share(call.latent), share(call.timestep), call.control_by(share)
    filled, extra_outputs = {}, []
    for key, tensor in (*call.parts.items(), ("scores", call.scores)):
        if tensor is not None:
            filled[key], written = create(tensor.shape)
            extra_outputs.append((written, tensor))
    scores, call_conditioning = filled.pop("scores", None), {key: share(tensor) for key,
                                                             tensor in call.call_conditioning.items()}
    branch = specs.Branch(latent, timestep, name, prediction, control, call.operations, scores, call.guided,
                          call.free_u, call.tiles, tuple(use for use, _ in call.networks), call_conditioning,
                          call.cached,
                          filled)
    return branch, view, extra_outputs


def refuse_unusable(backend, unusable, devices):
    """Refuse a BackendChoice that some worker cannot carry out. unusable: {rank: what its Ready says}. Raises
    UnsupportedError, before anything is sent."""
    if backend.is_required:
        for rank, why in sorted((rank, whys.get(backend.name, "")) for rank, whys in unusable.items()):
            if why:
                raise UnsupportedError(f"Set attention to sdpa in xDiT Parallel Config: {backend.name} on "
                                       f"{devices[rank]} {why}.")
