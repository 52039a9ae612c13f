"""What a rank holds (models, conditioning, process groups) and how it carries out each command. Used by serve."""

import os
import time
from contextlib import nullcontext
from itertools import count as count_from

import torch
import torch.distributed as dist

from ..checkpoints.transformer import load_transformer
from ..checkpoints.vae import load_autoencoder
from ..models import FAMILIES
from ..parallel.apply import Seams
from ..parallel.collectives import Traffic
from ..parallel.mesh import build_mesh
from ..parallel.vae import Ranks, decode_rows, encode_rows
from ..parallel.vae_memory import LiveBytes, RowPlanner, free_bytes
from ..planner import shard_sizes, shard_start
from ..protocol import messages
from ..protocol.errors import XDiTError
from ..protocol.segments import map_segment, pinned


class Engine:
    """All state of one rank. Nothing outlives a command but what a command asked to keep."""

    def __init__(self, rank, device, report_phase):
        self.rank, self.device, self.report_phase = rank, device, report_phase
        self.world_size = dist.get_world_size()
        self._models, self._autoencoders, self._conditioning, self._meshes = {}, {}, {}, {}
        self._ranks, self._planners = Ranks(dist.group.WORLD), {}
        self._handlers = {
            messages.LoadModel: self._load_model, messages.DropModel: self._drop_model,
            messages.Conditioning: self._keep_conditioning, messages.DropConditioning: self._drop_conditioning,
            messages.Predict: self._predict, messages.LoadAutoencoder: self._load_autoencoder,
            messages.Decode: self._decode, messages.Encode: self._encode, messages.ReportMemory: self._report_memory,
        }

    def carry_out(self, command):
        """Carry out one command; returns measurements by name, or None."""
        with torch.inference_mode():
            return self._handlers[type(command)](command)

    def _load_model(self, command):
        spec = command.spec
        if spec.name in self._models:
            return
        family = FAMILIES[spec.family]
        report = lambda done, total: self.report_phase("loading weights", done, total)  # noqa: E731
        model, config = load_transformer(spec, family, self.device, report)
        self._models[spec.name] = (model, config, family, Seams(model, family.plan), getattr(torch, spec.compute_dtype))

    def _drop_model(self, command):
        self._models.pop(command.name, None)
        self._autoencoders.pop(command.name, None)
        self._planners.pop(command.name, None)
        self._release_memory()

    def _keep_conditioning(self, command):
        self._conditioning[command.name] = {
            name: map_segment(segment).to(self.device, copy=True) for name, segment in command.tensors.items()}

    def _drop_conditioning(self, command):
        for name in command.names:
            self._conditioning.pop(name, None)

    def _predict(self, command):
        """Run this rank's branch, batch share and token shard; the first sequence rank writes the prediction."""
        model, config, family, seams, dtype = self._loaded(command.model)
        mesh = self._mesh(command.layout)
        traffic, started_s = Traffic(), time.perf_counter()
        for index, branch in enumerate(command.branches):
            if index % mesh.degrees["cfg"] != mesh.ranks["cfg"]:
                continue
            batch = branch.latent.shape[0]
            start = shard_start(batch, mesh.degrees["data"], mesh.ranks["data"])
            rows = slice(start, start + shard_sizes(batch, mesh.degrees["data"])[mesh.ranks["data"]])
            if rows.start == rows.stop:                        # fewer images than data ranks: this one rests
                continue
            latent = map_segment(branch.latent)[rows].to(self.device, dtype)
            timestep = map_segment(branch.timestep)[rows].to(self.device)
            conditioning = {name: tensor[rows].to(dtype) if tensor.shape[0] == batch else tensor.to(dtype)
                            for name, tensor in self._conditioning[branch.conditioning].items()}
            inputs = family.inputs(latent, timestep, conditioning, config)
            with seams.serving(mesh, traffic, inputs):
                output = model(**inputs, return_dict=False)[0]
            if mesh.sequence_rank == 0:
                map_segment(branch.prediction)[rows].copy_(family.prediction(output, latent))
        return {"sent_bytes": traffic.sent_bytes, "busy_s": time.perf_counter() - started_s}

    def _load_autoencoder(self, command):
        spec = command.spec
        if spec.name not in self._autoencoders:
            tensors = {name: map_segment(segment) for name, segment in spec.weights.items()}
            self._autoencoders[spec.name] = load_autoencoder(tensors, getattr(torch, spec.dtype), self.device)
            self._planners[spec.name] = RowPlanner(self._autoencoders[spec.name])

    def _decode(self, command):
        vae = self._autoencoders[command.autoencoder]
        latent, picture = map_segment(command.latent), map_segment(command.picture)
        block_size, num_steps = self._plan_rows(command.autoencoder, latent[:1].shape, 1)
        traffic, live, started_s, started_cpu_s = Traffic(), LiveBytes(), time.perf_counter(), time.process_time()
        for index in range(len(latent)):
            progress = self._progress("decoding", index, len(latent), num_steps)
            with live if command.measure_memory else nullcontext():
                share = decode_rows(vae, latent[index:index + 1].to(self.device, vae.dtype), self._ranks, traffic,
                                    block_size, progress)
            if share is not None:
                # BCHW in [-1, 1] -> BHWC in [0, 1], as ComfyUI's VAE gives it
                pixels = share.tensor[0].float().add_(1).div_(2).clamp_(0, 1).movedim(0, -1)
                own = picture[index].narrow(share.dim - 1, share.start, pixels.shape[share.dim - 1])
                for frame, own_frame in zip(pixels, own) if pixels.dim() == 4 else [(pixels, own)]:
                    _copy_out(frame, own_frame)
        return {"sent_bytes": traffic.sent_bytes, "busy_s": time.perf_counter() - started_s,
                "cpu_s": time.process_time() - started_cpu_s, "peak_bytes": live.peak_bytes}

    def _encode(self, command):
        vae = self._autoencoders[command.autoencoder]
        picture, latent = map_segment(command.picture), map_segment(command.latent)
        scale = picture.shape[-1] // latent.shape[-1]
        block_size, num_steps = self._plan_rows(command.autoencoder, picture[:1].shape, scale)
        for index in range(len(picture)):
            progress = self._progress("encoding", index, len(picture), num_steps)
            share = encode_rows(vae, picture[index:index + 1], scale, self._ranks,
                                block_size=block_size, on_convolution=progress)
            if share is not None:
                latent[index].narrow(share.dim, share.start, share.tensor.shape[share.dim]).copy_(share.tensor[0])

    def _plan_rows(self, name, shape, scale):
        return self._planners[name].plan(shape, scale, self._ranks, free_bytes(self.device))

    def _progress(self, text, index, count, num_steps):
        """A function to call before each of num_steps steps of item `index` of `count`: it reports every twentieth."""
        steps = count_from(index * num_steps)
        total = count * max(1, num_steps)

        def step():
            done = next(steps)
            if done * 20 // total != (done - 1) * 20 // total:
                self.report_phase(text, done, total)
        self.report_phase(text, index * max(1, num_steps), total)
        return step

    def _report_memory(self, command):
        """Bytes of parameters and buffers held, and bytes of device memory in use."""
        modules = [entry[0] for entry in self._models.values()] + list(self._autoencoders.values())
        held = sum(t.numel() * t.element_size() for module in modules for t in (*module.parameters(), *module.buffers()))
        allocated = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        return {"pid": os.getpid(), "weight_bytes": held, "allocated_bytes": allocated, "num_conditionings": len(self._conditioning)}

    def _loaded(self, name):
        if name not in self._models:
            raise XDiTError(f"The model {name} is not loaded on rank {self.rank}. Queue the prompt again.")
        return self._models[name]

    def _mesh(self, layout):
        """The process groups of a layout, made when it is first used. Commands come in one order, so ranks agree."""
        if layout not in self._meshes:
            self._meshes[layout] = build_mesh(layout, self.world_size)
        return self._meshes[layout]

    def _release_memory(self):
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _copy_out(tensor, mapped):
    """Copy a result into its part of shared memory: page-locked where that part is in one piece."""
    if not mapped.is_contiguous():
        mapped.copy_(tensor)
        return
    with pinned(mapped) as target:
        target.copy_(tensor.contiguous(), non_blocking=True)
