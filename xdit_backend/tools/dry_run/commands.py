"""Commands that a host sends to one rank in two steps of a run, with tensors of this process instead of shared
memory."""

from dataclasses import dataclass, field

import torch

from ...partition import cut_patches
from ...planner.planner import choose_num_patches, warmup_layout
from ...protocol import messages
from ...protocol.shared_memory import Segment, dtype_name
from ...protocol.specs import Branch, ForwardOptions, Layout, ModelSpec, WeightCopies
from ...worker.models import Loaded

SIGMAS = 0.9, 0.8                          # of the two steps; keys and values are extrapolated between different ones


@dataclass(frozen=True)
class Run:
    """A step of sampling. shape: of the latents of one branch, (B, C, H, W) or (B, C, F, H, W). conditioning: {name:
    shape with batch}; integers if the name ends in "mask" or "ids". call_conditioning: likewise, for tensors of a
    single call. branches: of guidance. num_patches: of PipeFusion; 0: two per stage. extrapolation: of keys and values,
    as in messages.Predict. has_control: whether a ControlNet adds a residual at every insertion point. shards_weights:
    whether each rank copies a shard of the offloaded weights and all-gathers the others.
    """

    shape: tuple[int, ...]
    conditioning: dict[str, tuple[int, ...]]
    call_conditioning: dict[str, tuple[int, ...]] = field(default_factory=dict)
    branches: int = 1
    num_patches: int = 0
    extrapolation: float = 0.0
    has_control: bool = False
    shards_weights: bool = False


class HostMemory:
    """Stands for shared memory segments: tensors of this process."""

    def __init__(self):
        self._tensors = {}

    def share(self, tensor):
        path = str(len(self._tensors))
        self._tensors[path] = tensor
        return Segment(path, dtype_name(tensor.dtype), tuple(tensor.shape))

    def map(self, segment):
        return self._tensors[segment.path]


@dataclass
class Calls:
    """The commands of a host for two steps of a run."""

    loaded: Loaded
    spec: ModelSpec
    layout: Layout
    run: Run
    memory: HostMemory
    compile_backend: str = ""
    num_requests: int = 0
    sigma: float = 1.0

    @property
    def are_apart(self):
        """Whether guidance branches are separate calls; otherwise they are one batch."""
        return (self.layout.cfg_degree > 1 or self.layout.pipefusion_degree > 1 or self.layout.displaced_degree > 1
                or self.run.branches == 1)

    @property
    def names(self):
        return [f"conditioning-{index}" for index in range(self.run.branches if self.are_apart else 1)]

    @property
    def num_patches(self):
        layout = self.layout
        return choose_num_patches(self.run.num_patches, layout.pipefusion_degree, self.run.shape,
                                  self.loaded.family.inputs.latent.patch, layout.ring_degree * layout.ulysses_degree)

    @property
    def keeps(self):
        return self.layout.displaced_degree > 1 or self.layout.pipefusion_degree > 1 and self.num_patches > 1

    def sized(self, shape, name=""):
        """The shape with both branches if they are one batch. A number common to all rows, such as vace_strength.0,
        stays as it is."""
        batch = self.run.shape[0]
        if "." in name and len(shape) == 1 or name in self.loaded.family.inputs.counts:
            return shape
        times = 1 if self.are_apart else self.run.branches
        return (batch * times, *shape[1:]) if shape and shape[0] == batch else shape

    def conditionings(self):
        dtype = self.loaded.dtype
        for name in self.names:
            tensors = {key: self.memory.share(torch.ones(
                self.sized(shape, key), dtype=torch.int64 if key.endswith(("mask", "ids")) else dtype))
                       for key, shape in self.run.conditioning.items()}
            yield messages.Conditioning(self._request(), name, tensors)

    def first_step(self):
        self.sigma = SIGMAS[0]
        layout = self.layout if self.spec.stages is None else warmup_layout(self.layout, self.spec.stages)
        yield self._predict(None, 0, keep=self.keeps, layout=layout)

    def next_step(self):
        self.sigma = SIGMAS[1]
        if self.layout.pipefusion_degree == 1 or self.num_patches == 1:
            yield self._predict(None, 0, keep=self.keeps, stale=self.layout.displaced_degree > 1)
            return
        for patch, rows in cut_patches(self.run.shape, self.loaded.family.inputs.latent.patch, self.num_patches):
            yield self._predict(patch, rows)

    def _predict(self, patch, rows, layout=None, **fields):
        shape = list(self.sized(self.run.shape))
        if patch is not None:
            shape[patch.dim] = rows
        branches = [self._branch(name, shape) for name in self.names]
        return messages.Predict(self._request(), self.spec.name, layout or self.layout, branches, patch,
                                options=ForwardOptions(
                                    compile_backend=self.compile_backend,
                                    extrapolation=self.run.extrapolation if self.keeps else 0.0,
                                    copies=WeightCopies(is_shared=self.run.shards_weights)), **fields)

    def _branch(self, name, shape):
        latent = self.memory.share(torch.zeros(shape, dtype=torch.float32))
        family, config = self.loaded.family, self.loaded.transformer.config
        written = self.memory.share(torch.zeros(shape[0], family.num_channels(config), *shape[2:]))
        timestep = self.memory.share(torch.full((shape[0],), self.sigma * family.inputs.time_scale))
        here = {key: self.memory.share(torch.ones(self.sized(size)))
                for key, size in self.run.call_conditioning.items()}
        latents = {key: self.memory.share(torch.zeros(self.sized(self.run.call_conditioning[key])))
                   for key in family.inputs.components.names if key in here}
        residuals = family.control_shapes(config, shape) if self.run.has_control else {}
        control = {point: self.memory.share(torch.zeros(shape[0], *size)) for point, size in residuals.items()}
        return Branch(latent, timestep, name, written, control, call_conditioning=here, parts=latents)

    def _request(self):
        self.num_requests += 1
        return self.num_requests
