"""Which file a MODEL is of, on which devices it runs, and by which methods. Made by proxy_model.py, read by what runs
the model."""

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
    dims: ModelDims | None                        # what forecasts compute with; None of a U-Net
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
        """How many classes a prompt may name; None where it is a text."""
        sampled = self.family.sampled
        return self.transformer_config[sampled.labels] if sampled and sampled.labels else None

    @property
    def num_channels(self):
        """Of the latent that it predicts."""
        return self.family.num_channels(self.transformer_config)

    @property
    def shards_tokens(self):
        """Can several ranks compute one picture, each a part of its tokens?"""
        return "ulysses" not in self.family.refused

    @property
    def has_stages_for_speed(self):
        """Is it spread over stages though it fits on each device?"""
        return self.spec.stages is not None and has_stages_for_speed(self.config, self.dims, min(self.device_bytes))

    def layout(self, num_branches):
        """The Layout of a run without a forecast."""
        heads, key_heads = (count(self.transformer_config)
                            for count in (self.family.num_heads, self.family.num_key_heads))
        return choose_layout(self.config, len(self.devices), num_branches,
                             AttentionHeads(self.family.name, heads, key_heads, self.shards_tokens),
                             WeightPlacement(self.spec.stages, self.spec.tensor_degree),
                             devices_per_machine(self.devices))

    def job(self, latent_shape, conditioning, num_steps, num_branches):
        """The Job of a run on latents of this shape, one branch's; None of a U-Net.
        conditioning: {name: tensor}, as workers get it."""
        return self.dims and job_of(self.family, self.dims, latent_shape, conditioning, num_steps, num_branches)
