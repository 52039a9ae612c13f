"""VAEs loaded on a group's workers: decoding, encoding and their memory estimates."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch

from ..planner.vae_cost import Work
from ..protocol import messages, specs
from .workers import Loaded


@dataclass(frozen=True)
class Autoencoder:
    """A VAE for the workers to load."""

    name: str
    dtype: str                             # compute dtype, "bfloat16"
    weights: Callable[[], dict]            # returns its tensors; called only if the group has not loaded it
    settings: dict = field(default_factory=dict)               # see AutoencoderSpec
    from_host: bool = False                # see AutoencoderSpec


class Autoencoders:
    """The VAEs of a worker group. workers: its Workers."""

    def __init__(self, workers):
        self._workers, self.loaded = workers, Loaded(workers)
        # rank -> measurements of the last decode or encode, by name
        self.last_numbers = {}

    @property
    def names(self):
        """Names of the VAEs loaded by the running group."""
        return self.loaded.names

    def decode(self, vae, latent, image_shape, measure_memory=False, num_ranks=0, first_rank=0):
        """Decode latents (B, C, H, W) or (B, C, F, H, W) to images of this shape, float32 in [0, 1].

        vae: an Autoencoder, or an object with its fields. image_shape: (B, H', W', 3) or (B, F', H', W', 3).
        measure_memory: record each rank's peak_bytes in last_numbers. num_ranks: number of workers, from first_rank on,
        that the work is split across; 0: all.
        """
        self.load(vae)
        return self._transform(messages.Decode, vae.name, latent, image_shape, measure_memory=measure_memory,
                               num_ranks=num_ranks, first_rank=first_rank)

    def encode(self, vae, image, latent_shape, num_ranks=0, first_rank=0):
        """Encode images (B, 3, H, W) or videos (B, 3, F, H, W) in [-1, 1] to latents of this shape, float32."""
        self.load(vae)
        return self._transform(messages.Encode, vae.name, image, latent_shape, num_ranks=num_ranks,
                               first_rank=first_rank)

    def load(self, vae):
        """Load the Autoencoder on every worker unless it is loaded."""
        self.loaded.load(vae, lambda segments: specs.AutoencoderSpec(vae.name, vae.dtype, segments, vae.settings,
                                                                     vae.from_host),
                         messages.LoadAutoencoder)

    def _transform(self, command, name, tensor, shape, **options):
        """Run a Decode or Encode; returns a view of the shared memory that the workers wrote."""
        group = self._workers.holding
        with group.segments.removed_on_failure() as segments:
            source = group.segments.share(tensor)
            segments.append(source)
            result, view = group.segments.create(shape, torch.float32)
        done = self._workers.request(
            lambda request: command(request, name, source, result, speeds=self._workers.speeds, **options),
            [source, result], group)
        self.last_numbers = {rank: reply.numbers for rank, reply in done.items()}
        return view

    def estimate(self, name, shape, scale, num_ranks=0):
        """Bytes that a rank needs in addition to weights to decode (scale 1) or encode a tensor of this shape with a
        loaded VAE.

        num_ranks: see decode.
        """
        return int(self._estimate(name, shape, scale, num_ranks)["needed_bytes"])

    def work_of(self, name, shape, scale):
        """Work of decoding (scale 1) or encoding one item of a batch of this shape with a loaded VAE."""
        numbers = self._estimate(name, shape, scale, with_work=True)
        return Work(**{each.name: numbers[each.name] for each in fields(Work)})

    def free_bytes(self, num_ranks, first_rank=0):
        """Free bytes of the worker that has the fewest; workers on one device split its memory."""
        devices = self._workers.devices[first_rank:first_rank + num_ranks]
        return min(int(free) // devices.count(device)
                   for free, device in zip(self._free(num_ranks, first_rank), devices))

    def fits_unblocked(self, name, shape, scale, num_ranks, first_rank=0):
        """Whether these workers have enough free memory to compute convolutions without splitting them into blocks."""
        free = self._free(num_ranks, first_rank)
        return self._estimate(name, shape, scale, num_ranks)["unblocked_bytes"] <= min(free)

    def _free(self, num_ranks, first_rank):
        """Free bytes that each of these workers reports for its device."""
        memory = self._workers.request(messages.ReportMemory)
        return [memory[rank].numbers["free_bytes"] for rank in range(first_rank, first_rank + num_ranks)]

    def _estimate(self, name, shape, scale, num_ranks=0, with_work=False):
        done = self._workers.request(
            lambda request: messages.Estimate(request, name, tuple(shape), scale, num_ranks, with_work),
            group=self._workers.holding)
        return done[0].numbers
