"""Setup of a MODEL: its file, its devices and the parallel methods that it is run by."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from ....xdit_backend.checkpoints.checkpoint import Checkpoint
from ....xdit_backend.checkpoints.model_dims import job_of
from ....xdit_backend.config import ParallelConfig
from ....xdit_backend.planner.cost_model import ModelDims
from ....xdit_backend.planner.planner import AttentionHeads, WeightPlacement, choose_layout, has_stages_for_speed
from ....xdit_backend.protocol.devices import devices_per_machine
from ....xdit_backend.protocol.specs import ModelSpec


@dataclass(frozen=True)
class Setup:
    """A MODEL's file, devices and settings."""

    spec: ModelSpec
    checkpoint: Checkpoint
    latent_format: Any                     # ComfyUI's
    config: ParallelConfig
    devices: tuple
    dims: ModelDims | None                 # for estimates; None for a U-Net
    device_bytes: list                     # memory of each rank's device

    @property
    def family(self):
        return self.checkpoint.family

    @property
    def transformer_config(self):
        """Arguments of the family's diffusers class."""
        return self.checkpoint.config

    @property
    def num_classes(self):
        """Number of classes of a class-conditional model; None if the prompt is a text."""
        sampled = self.family.sampled
        return self.transformer_config[sampled.labels] if sampled and sampled.labels else None

    @property
    def num_channels(self):
        """Channels of the predicted latent."""
        return self.family.num_channels(self.transformer_config)

    @property
    def shards_tokens(self):
        """Whether several ranks can generate one image, with a shard of its tokens each."""
        return "ulysses" not in self.family.refused

    @property
    def has_stages_for_speed(self):
        """Whether the model is split into stages although it fits on each device."""
        return self.spec.stages is not None and has_stages_for_speed(self.config, self.dims, min(self.device_bytes))

    def layout(self, num_branches):
        """Return the Layout of a run without an estimate."""
        heads, key_heads = (count(self.transformer_config)
                            for count in (self.family.num_heads, self.family.num_key_heads))
        return choose_layout(self.config, len(self.devices), num_branches,
                             AttentionHeads(self.family.name, heads, key_heads, self.shards_tokens),
                             WeightPlacement(self.spec.stages, self.spec.tensor_degree),
                             devices_per_machine(self.devices))

    def job(self, latent_shape, conditioning, num_steps, num_branches):
        """Return the Job of a run on latents of this shape, of one branch; None for a U-Net.
        conditioning: {name: tensor}, as sent to the workers."""
        job = self.dims and job_of(self.family, self.dims, latent_shape, conditioning, num_steps, num_branches)
        return job and dataclasses.replace(job, sparse=self.config.sparse)
