"""Model calls as the ComfyUI side makes them, their transfer into shared memory, and handles of pending ones."""

from dataclasses import dataclass, field

import torch

from ..protocol import specs
from ..protocol.errors import UnsupportedError
from .launcher import WorkerGroup


@dataclass(frozen=True)
class Call:
    """One call of the model: ComfyUI's inputs of a diffusion model."""

    latent: torch.Tensor                   # (B, C, H, W) or (B, C, F, H, W)
    timestep: torch.Tensor                 # (B,)
    conditioning: dict[str, torch.Tensor]
    name: str = ""                         # of the conditioning, if Client.name_conditioning assigned one
    # ControlNet residuals by insertion point: Family.control_shapes
    control: dict[str, torch.Tensor] = field(default_factory=dict)

    operations: dict = field(default_factory=dict)         # replaced blocks: specs.Branch
    scores: torch.Tensor | None = None     # output: specs.Branch
    guided: tuple[specs.Nag, ...] = ()     # guidance inside self-attention: specs.Branch
    free_u: tuple[specs.FreeU | specs.Shrink, ...] = ()                    # of a U-Net: specs.Branch
    tiles: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)          # of a U-Net: specs.Branch
    shuffled: dict[str, torch.Tensor] = field(default_factory=dict)        # of a U-Net: specs.Branch
    # ((specs.NetworkUse, injected_networks.Network), ...)
    networks: tuple = ()
    call_conditioning: dict[str, torch.Tensor] = field(default_factory=dict)           # conditioning of this call only
    # output: predictions of further components of the latent
    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    # cache of reference images' keys and values to fill or to read: specs.Branch
    cached: specs.CachedReferences | None = None
    # conditioning that is not sent, since its keys and values are cached
    left_out: dict[str, torch.Tensor] = field(default_factory=dict)
    options: specs.ForwardOptions = field(default_factory=specs.ForwardOptions)

    @property
    def given(self):
        """All conditioning, {name: tensor}."""
        return self.conditioning | self.call_conditioning | self.left_out

    @property
    def is_changed(self):
        """Whether this call patches the model, so that nothing of it may be cached for other calls."""
        return bool(self.operations or self.guided or self.shuffled)

    @property
    def compares_images(self):
        """Whether layers compare or average the images of this call, which must then stay in one batch."""
        return bool(self.guided) or any(isinstance(each, specs.Enhance) for each in self.operations.values())

    def control_by(self, make):
        """Apply `make` to the tensors of `control`, once per distinct tensor; returns {insertion point: result}."""
        made = {key: make(tensor) for key, tensor in {id(tensor): tensor for tensor in self.control.values()}.items()}
        return {name: made[id(tensor)] for name, tensor in self.control.items()}


@dataclass(frozen=True)
class ForwardPass:
    """Options of a forward pass: full latents or a patch, and caching for later calls of the run."""

    patch: specs.Patch | None = None       # rows of the full latent that the calls' latents have; None: all
    # cache keys and values, or other ranks' activations, for later calls with the same conditioning
    keep: bool = False
    by_image: bool = False                 # pipeline the images of a batch through the stages
    stale: bool = False                    # displaced patches: use other ranks' activations from the last call
    displaced_mode: str = "corrected_async_gn"                 # key of specs.MODES


SYNCHRONOUS = ForwardPass()                # full latents, nothing cached


@dataclass(frozen=True, eq=False)
class CallHandle:
    """Handle of pending calls."""

    group: WorkerGroup
    request: int
    predictions: tuple
    # [(tensor that workers write in addition to predictions, output tensor of the Call to copy it to)]
    extra_outputs: tuple


def share_call(call, name, num_channels, store, segments):
    """Copy a call into shared memory. Segments that this creates are appended to `segments`.

    name: of its conditioning. Returns (specs.Branch, prediction that the workers write, CallHandle.extra_outputs).
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
                          filled, {block: share(order) for block, order in call.shuffled.items()})
    return branch, view, extra_outputs


def refuse_unusable(backend, unusable, devices):
    """Reject a required attention backend that a worker cannot run: raises UnsupportedError, before anything is sent.

    unusable: {rank: Ready.unusable_backends}.
    """
    if backend.is_required:
        for rank, why in sorted((rank, whys.get(backend.name, "")) for rank, whys in unusable.items()):
            if why:
                raise UnsupportedError("Install the package, or select another attention in xDiT Parallel Config and "
                                       f"in nodes that select one: {backend.name} on {devices[rank]} {why}.")
