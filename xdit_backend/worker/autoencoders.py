"""The VAEs on this rank, and decoding and encoding with them. Used by the engine."""

import time
from contextlib import nullcontext
from itertools import count as count_from

import torch

from ..autoencoders import family_of
from ..checkpoints.build_vae import load_autoencoder
from ..checkpoints.offload.layer_offload import StreamedLayers
from ..distributed.spatial_ops import all_sums
from ..memory.copy_thread import CopyThread
from ..memory.staging import StagingBuffers, on_device
from ..parallel.vae_memory import ActivationBytes, free_bytes
from ..parallel.vae_rows import SplitOptions, decode_rows, encode_rows
from ..parallel.vae_tile_memory import planner_of
from ..protocol.shared_memory import map_segment
from .busy_time import Clock

# convolutions from one moment to give up to the next: a block of a VAE has about so many; or rounds of tiles
CHECKED = 4


class Autoencoders:
    """The VAEs that this rank holds, by the names of their specs. All ranks share each picture, by rows or tiles."""

    def __init__(self, ranks, device, staging, report_phase, timeline):
        self._device, self._report_phase = device, report_phase
        self._loaded, self._planners, self._streamed = {}, {}, {}
        self._ranks, self._staging = ranks, staging
        self._timeline, self._clock = timeline, Clock(device)

    def load(self, spec):
        if spec.name in self._loaded:
            return
        tensors = {name: map_segment(segment) for name, segment in spec.weights.items()}
        vae = load_autoencoder(tensors, getattr(torch, spec.dtype), None if spec.from_host else self._device,
                               spec.settings)
        if spec.from_host:
            copies = CopyThread(self._device, StagingBuffers(self._device))
            self._streamed[spec.name] = StreamedLayers(vae, self._device, copies)
        self._loaded[spec.name], self._planners[spec.name] = vae, planner_of(vae)

    def estimate(self, command, traffic):
        """The least bytes that a decode or encode needs on this rank, and more of it."""
        planner, count = self._planners[command.autoencoder], command.num_ranks or self._ranks.count
        return {"needed_bytes": planner.least_bytes(command.shape, command.scale, count),
                "unblocked_bytes": planner.unblocked_bytes(command.shape, command.scale, count),
                **(planner.work(command.shape, command.scale) if command.with_work else {})}

    def drop(self, name):
        self._loaded.pop(name, None)
        self._planners.pop(name, None)
        self._streamed.pop(name, None)

    @property
    def weight_bytes(self):
        """On the device."""
        streamed = [layers.offloaded for layers in self._streamed.values()]
        coming = {key for offloaded in streamed for key in offloaded.weights}
        return sum(offloaded.device_bytes for offloaded in streamed) + sum(
            tensor.nbytes for vae in self._loaded.values() for tensor in (*vae.parameters(), *vae.buffers())
            if id(tensor) not in coming)

    def decode(self, command, traffic, check):
        """check: see _progress."""
        vae = self._loaded[command.autoencoder]
        latent, image = map_segment(command.latent), map_segment(command.image)
        ranks = self._working(command, latent.shape, 1, traffic)
        if not ranks.is_member:
            return dict.fromkeys(("sent_bytes", "num_exchanges", "busy_s", "cpu_s", "peak_bytes"), 0)
        block_size, num_steps, speeds = self._plan_rows(command, latent[:1].shape, 1, ranks, traffic)
        footprint, started_s, started_cpu_s, start = (ActivationBytes(), time.perf_counter(), time.process_time(),
                                                 self._clock.mark())
        for index in range(len(latent)):
            progress = self._progress("decoding", index, len(latent), num_steps, check)
            options = SplitOptions(speeds=speeds, block_size=block_size, on_convolution=progress)
            with self._running(command), footprint if command.measure_memory else nullcontext():
                share = decode_rows(vae, on_device(latent[index:index + 1], self._device).to(vae.dtype), ranks, traffic,
                                    options)
            if share is not None:
                # BCHW -> BHWC, as ComfyUI's VAE gives it
                pixels = family_of(vae).pixels(vae, share.tensor[0]).movedim(0, -1)
                self._staging.to_host(
                    pixels, image[index].narrow(share.dim - 1, share.start, pixels.shape[share.dim - 1]))
        self._record("decode", start, traffic)
        return {"sent_bytes": traffic.sent_bytes, "num_exchanges": traffic.num_exchanges,
                "busy_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - started_cpu_s,
                "peak_bytes": footprint.peak_bytes}

    def encode(self, command, traffic, check):
        vae = self._loaded[command.autoencoder]
        image, latent = map_segment(command.image), map_segment(command.latent)
        scale, start = image.shape[-1] // latent.shape[-1], self._clock.mark()
        ranks = self._working(command, image.shape, scale, traffic)
        if not ranks.is_member:
            return
        block_size, num_steps, speeds = self._plan_rows(command, image[:1].shape, scale, ranks, traffic)
        for index in range(len(image)):
            progress = self._progress("encoding", index, len(image), num_steps, check)
            options = SplitOptions(speeds=speeds, block_size=block_size, on_convolution=progress)
            with self._running(command):
                share = encode_rows(vae, image[index:index + 1], scale, ranks, traffic, options)
            if share is not None:
                latent[index].narrow(share.dim, share.start, share.tensor.shape[share.dim]).copy_(share.tensor[0])

        self._record("encode", start, traffic)

    def _running(self, command):
        layers = self._streamed.get(command.autoencoder)
        return nullcontext() if layers is None else layers.running()

    def _record(self, kind, start, traffic):
        self._timeline.add(kind, start, self._clock.mark())
        for pair in traffic.waits if self._device.type == "cpu" else ():
            self._timeline.add("exchange", *pair)

    def _working(self, command, shape, scale, traffic):
        """The Ranks that a command asks for, as many of them as have something to do. Every rank calls it."""
        requested = command.num_ranks or self._ranks.count
        num_working = self._planners[command.autoencoder].num_working(shape, scale, requested)
        with traffic.entering(self._ranks.first(self._ranks.count)):          # every rank may have to make a group
            return self._ranks.only(num_working, command.first_rank)

    def _plan_rows(self, command, shape, scale, ranks, traffic):
        return self._planners[command.autoencoder].plan(shape, scale, ranks, free_bytes(self._device),
                                                        command.speeds[command.first_rank:], traffic)

    def _progress(self, text, index, count, num_steps, check):
        """A function to call before each of num_steps steps of item `index` of `count`: it reports every twentieth.

        On every few it calls check(agreed), which may raise, alike on all ranks of its RowSplit: none leaves another
        alone. A device is waited for then, so that what is given up ends soon.
        """
        steps = count_from(index * num_steps)
        total = count * max(1, num_steps)

        def step(split):
            def agreed(requested):
                return bool(all_sums(torch.tensor([float(requested)], device=self._device), split))
            done = next(steps)
            if done % CHECKED == 0:
                check(agreed)
            if done * 20 // total != (done - 1) * 20 // total:
                self._report_phase(text, done, total)
        self._report_phase(text, index * max(1, num_steps), total)
        return step
