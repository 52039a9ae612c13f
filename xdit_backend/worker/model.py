"""A model on this rank, with its hooks: what a forward of it needs, and what it receives from the stage before. Used by the engine."""

from dataclasses import dataclass

import torch

from ..models.plan import Family
from ..parallel.context import ForwardContext, rows_of, tokens_of
from ..parallel.hooks import Hooks
from ..parallel.regions import message_size
from ..protocol.messages import ModelSpec
from ..protocol.transfers import on_device
from .residency import Residency


@dataclass
class Loaded:
    """A model on this rank."""

    model: torch.nn.Module
    config: dict
    family: Family
    hooks: Hooks
    dtype: torch.dtype             # of its arithmetic
    blocks: range                  # the blocks of this rank's stage; all, where there are no stages
    spec: ModelSpec | None = None
    residency: Residency | None = None

    def context(self, mesh, traffic, latent, timestep, conditioning, patch=None, **keeping):
        """The ForwardContext of a latent or its patch. keeping: where keys and values are kept, ForwardContext's fields for that."""
        family, num_blocks = self.family, self.hooks.num_blocks
        if keeping:
            keeping |= {"kept_blocks": self.blocks, "step": tuple(timestep.tolist())}
        return ForwardContext(
            family.inputs(latent, on_device(timestep, latent.device), conditioning, self.config, patch), mesh, traffic,
            self.blocks if mesh.degrees["pipefusion"] > 1 else range(num_blocks), num_blocks,
            tokens_of(family, mesh, latent.shape, conditioning, patch), patch,
            None if patch is None else rows_of(family, latent.shape, patch), **keeping)

    def received_size(self, mesh, shape, conditioning, patch=None):
        """Elements of the message that the stage before sends for a latent (or patch) of this shape."""
        tokens = tokens_of(self.family, mesh, shape, conditioning, patch)
        return message_size(self.hooks.message_units(self.blocks.start), shape[0], self.family.width(self.config), tokens)
