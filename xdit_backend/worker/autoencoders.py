"""VAEs loaded on this rank, and decoding and encoding with them."""

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

# convolutions (a block of a VAE has about this many), or rounds of tiles, between checks for an abort
CHECKED = 4
NUM_REPORTS = 20                           # of progress for an image or a short video
FRAMES_PER_REPORT = 16                     # of a long video: a second at Wan's frame rate


def num_reports(shape):
    """Number of progress reports of a decode to (B, H, W, 3) or (B, F, H, W, 3)."""
    return NUM_REPORTS if len(shape) == 4 else max(NUM_REPORTS, -(-shape[0] * shape[1] // FRAMES_PER_REPORT))


class Autoencoders:
    """The VAEs loaded on this rank, by spec name. Each image is split across ranks by rows or tiles."""

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
        """Numbers of the reply to messages.Estimate."""
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
        """Bytes on the device."""
        streamed = [layers.offloaded for layers in self._streamed.values()]
        offloaded_keys = {key for offloaded in streamed for key in offloaded.weights}
        return sum(offloaded.device_bytes for offloaded in streamed) + sum(
            tensor.nbytes for vae in self._loaded.values() for tensor in (*vae.parameters(), *vae.buffers())
            if id(tensor) not in offloaded_keys)

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
            progress = self._progress("decoding", index, len(latent), num_steps, check, num_reports(image.shape))
            write = self._writer(vae, image[index])
            options = SplitOptions(speeds=speeds, block_size=block_size, on_convolution=progress, on_frames=write)
            with self._running(command), footprint if command.measure_memory else nullcontext():
                share = decode_rows(vae, on_device(latent[index:index + 1], self._device).to(vae.dtype), ranks, traffic,
                                    options)
            if share is not None:
                write(share)
        self._record("decode", start, traffic)
        return {"sent_bytes": traffic.sent_bytes, "num_exchanges": traffic.num_exchanges,
                "busy_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - started_cpu_s,
                "peak_bytes": footprint.peak_bytes}

    def _writer(self, vae, image):
        """Return a function that writes a Share of an image or video, or of a video's next frames, to shared memory.

        image: (H, W, 3) or (F, H, W, 3).
        """
        num_written = 0

        def write(share):
            nonlocal num_written
            # CHW -> HWC, as ComfyUI's VAE returns it
            pixels = family_of(vae).pixels(vae, share.tensor[0]).movedim(0, -1)
            target = image.narrow(share.dim - 1, share.start, pixels.shape[share.dim - 1])
            if pixels.ndim == 4 and share.dim != -3:
                target = target.narrow(0, num_written, pixels.shape[0])
                num_written += pixels.shape[0]
            self._staging.to_host(pixels, target)
        return write

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
        """The Ranks of a command that have work to do. A collective: every rank calls it."""
        requested = command.num_ranks or self._ranks.count
        num_working = self._planners[command.autoencoder].num_working(shape, scale, requested)
        with traffic.entering(self._ranks.first(self._ranks.count)):          # every rank may have to create a group
            return self._ranks.only(num_working, command.first_rank)

    def _plan_rows(self, command, shape, scale, ranks, traffic):
        return self._planners[command.autoencoder].plan(shape, scale, ranks, free_bytes(self._device),
                                                        command.speeds[command.first_rank:], traffic)

    def _progress(self, text, index, count, num_steps, check, num_reported=NUM_REPORTS):
        """Return a function to call before each of num_steps steps of item `index` of `count`, to report progress
        num_reported times.

        Every CHECKED steps it calls check(agreed), which may raise, on all ranks of its RowSplit or none, so that no
        rank waits for another. This synchronises the device, so that an aborted command ends soon.
        """
        steps = count_from(index * num_steps)
        total = count * max(1, num_steps)

        def step(split):
            def agreed(requested):
                return bool(all_sums(torch.tensor([float(requested)], device=self._device), split))
            done = next(steps)
            if done % CHECKED == 0:
                check(agreed)
            if done * num_reported // total != (done - 1) * num_reported // total:
                self._report_phase(text, done, total)
        self._report_phase(text, index * max(1, num_steps), total)
        return step
