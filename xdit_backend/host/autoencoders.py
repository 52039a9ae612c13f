"""The VAEs that a group's workers hold, and what they decode and encode. Used by client.py."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch

from ..planner.vae_cost import Work
from ..protocol import messages, specs
from .workers import Loaded


@dataclass(frozen=True)
class Autoencoder:
    """A VAE that workers are to hold."""

    name: str
    dtype: str                             # of its arithmetic, "bfloat16"
    weights: Callable[[], dict]            # gives its tensors; called only where the group does not hold it
    settings: dict = field(default_factory=dict)               # see AutoencoderSpec
    from_host: bool = False                # likewise


class Autoencoders:
    """Of the group of these Workers."""

    def __init__(self, workers):
        self._workers, self.loaded = workers, Loaded(workers)
        # rank -> measurements of the last decode or encode, by name
        self.last_numbers = {}

    @property
    def names(self):
        """The VAEs the running group holds."""
        return self.loaded.names

    def decode(self, vae, latent, image_shape, measure_memory=False, num_ranks=0, first_rank=0):
        """Decode latents (B, C, H, W) or (B, C, F, H, W) to pictures of this shape, float32 in [0, 1].

        vae: an Autoencoder, or what has its fields. picture_shape: (B, H', W', 3) or (B, F', H', W', 3).
        measure_memory: last_numbers then has each rank's peak_bytes. num_ranks: of the workers from first_rank on,
        which share it while the others rest; 0: all.
        """
        self.load(vae)
        return self._transform(messages.Decode, vae.name, latent, image_shape, measure_memory=measure_memory,
                               num_ranks=num_ranks, first_rank=first_rank)

    def encode(self, vae, image, latent_shape, num_ranks=0, first_rank=0):
        """Encode pictures (B, 3, H, W) or videos (B, 3, F, H, W) in [-1, 1] to latents of this shape, float32."""
        self.load(vae)
        return self._transform(messages.Encode, vae.name, image, latent_shape, num_ranks=num_ranks,
                               first_rank=first_rank)

    def load(self, vae):
        """Make sure that every worker holds the Autoencoder."""
        self.loaded.load(vae, lambda segments: specs.AutoencoderSpec(vae.name, vae.dtype, segments, vae.settings,
                                                                          vae.from_host),
                         messages.LoadAutoencoder)

    def _transform(self, command, name, tensor, shape, **options):
        """Have the workers turn a tensor into one of this shape; the result is a view of the memory they wrote."""
        group = self._workers.holding
        with group.segments.removed_on_failure() as segments:
            given = group.segments.share(tensor)
            segments.append(given)
            result, view = group.segments.create(shape, torch.float32)
        done = self._workers.request(
            lambda request: command(request, name, given, result, speeds=self._workers.speeds, **options),
                             [given, result], group)
        self.last_numbers = {rank: reply.numbers for rank, reply in done.items()}
        return view

    def estimate(self, name, shape, scale, num_ranks=0):
        """Bytes that a rank needs, beside weights, to decode (scale 1) or encode a tensor of this shape with a VAE it
        holds.

        num_ranks: as decode's.
        """
        return int(self._estimate(name, shape, scale, num_ranks)["needed_bytes"])

    def work_of(self, name, shape, scale):
        """The Work of one item of a batch of this shape,
        to be decoded (scale 1) or encoded with a VAE that the workers hold."""
        numbers = self._estimate(name, shape, scale, with_work=True)
        return Work(**{each.name: numbers[each.name] for each in fields(Work)})

    def free_bytes(self, num_ranks, first_rank=0):
        """Bytes that each of these workers may use at the least. Those on one device share what it has."""
        devices = self._workers.devices[first_rank:first_rank + num_ranks]
        return min(int(free) // devices.count(device)
                   for free, device in zip(self._free(num_ranks, first_rank), devices))

    def fits_unblocked(self, name, shape, scale, num_ranks, first_rank=0):
        """Have these workers so much memory free that they would compute convolutions all at once?"""
        free = self._free(num_ranks, first_rank)
        return self._estimate(name, shape, scale, num_ranks)["unblocked_bytes"] <= min(free)

    def _free(self, num_ranks, first_rank):
        """Bytes that each of these workers finds free on its device."""
        memory = self._workers.request(messages.ReportMemory)
        return [memory[rank].numbers["free_bytes"] for rank in range(first_rank, first_rank + num_ranks)]

    def _estimate(self, name, shape, scale, num_ranks=0, with_work=False):
        done = self._workers.request(
            lambda request: messages.Estimate(request, name, tuple(shape), scale, num_ranks, with_work),
                             group=self._workers.holding)
        return done[0].numbers
