"""What a rank holds (models, conditioning, process groups) and how it carries out each command. Used by serve."""

import math
import os
import time
from contextlib import nullcontext
from itertools import count as count_from

import torch
import torch.distributed as dist

from ..checkpoints.transformer import block_bytes, block_sizes, load_transformer
from ..checkpoints.vae import load_autoencoder
from ..models import FAMILIES
from ..parallel.collectives import Traffic, all_gather
from ..parallel.hooks import Hooks
from ..parallel.mesh import build_mesh
from ..parallel.pipefusion import KeyValues, Link, Offload
from ..parallel.vae import Ranks, decode_rows, encode_rows
from ..parallel.vae_memory import LiveBytes, RowPlanner, free_bytes
from ..partition import FULL, holders, shard_sizes, shard_start, split_stages, stage_blocks, stage_of
from ..protocol import messages
from ..protocol.errors import XDiTError
from ..protocol.segments import map_segment
from ..protocol.transfers import Ferry, on_device
from .clock import Clock
from .model import Loaded
from .residency import Residency, return_freed_memory


class Engine:
    """All state of one rank. Nothing outlives a command but what a command asked to keep."""

    def __init__(self, rank, device, report_phase):
        self.rank, self.device, self.report_phase = rank, device, report_phase
        self.world_size = dist.get_world_size()
        self._models, self._autoencoders, self._conditioning, self._meshes = {}, {}, {}, {}
        self._key_values, self._links, self._posted = {}, {}, {}
        self._unclaimed = []               # receives of commands that failed before they waited; gloo needs them kept
        self._ranks, self._planners = Ranks(dist.group.WORLD), {}
        self._ferry, self._clock = Ferry(device), Clock(device)
        self.traffic = Traffic()           # of the command at hand, or of the last one
        self._handlers = {
            messages.LoadModel: self._load_model, messages.DropModel: self._drop_model,
            messages.Estimate: self._estimate,
            messages.ParkModel: self._park_model, messages.RestoreModel: self._restore_model,
            messages.Conditioning: self._keep_conditioning, messages.DropConditioning: self._drop_conditioning,
            messages.Predict: self._predict, messages.LoadAutoencoder: self._load_autoencoder,
            messages.Decode: self._decode, messages.Encode: self._encode, messages.ReportMemory: self._report_memory,
        }

    def carry_out(self, command):
        """Carry out one command; returns measurements by name, or None."""
        self.traffic = Traffic()
        with torch.inference_mode():
            return self._handlers[type(command)](command)

    def _load_model(self, command):
        spec = command.spec
        if spec.name in self._models:
            return self._models[spec.name].residency.numbers
        family = FAMILIES[spec.family]
        report = lambda done, total: self.report_phase("loading weights", done, total)  # noqa: E731
        blocks = range(0)

        def held_blocks(model):
            nonlocal blocks
            blocks = every_block = range(len(block_sizes(model, family.plan)))
            if spec.stages is not None:
                counts = spec.stages.num_blocks or self._balanced(spec, model, family)
                blocks = stage_blocks(counts, stage_of(self.rank, spec.stages))
            return every_block if spec.stages is None or spec.stages.every_block else blocks

        files = {}
        model, config = load_transformer(spec, family, self.device, report, held_blocks, files)
        hooks = Hooks(model, family.plan)
        residency = Residency(model, files, self._bring, self._ferry.fetch)
        self._models[spec.name] = Loaded(model, config, family, hooks, getattr(torch, spec.compute_dtype), blocks, spec, residency)
        return residency.numbers

    def _balanced(self, spec, model, family):
        """Blocks of each stage, balanced by cost, by the speed of the stages' devices and by what they can hold.

        model: without weights. A collective: every rank calls it.
        """
        speed, free = 1.0, math.inf
        if self.device.type == "cuda":
            speed = torch.cuda.get_device_properties(self.device).multi_processor_count
            free = torch.cuda.mem_get_info(self.device)[0] * FULL
        mine = torch.tensor([[speed, free]], dtype=torch.float64, device=self.device)
        devices = all_gather(mine, [1] * self.world_size, 0, dist.group.WORLD, Traffic()).tolist()
        stages = [[device for rank, device in enumerate(devices) if stage_of(rank, spec.stages) == stage]
                  for stage in range(spec.stages.pipefusion_degree)]
        return split_stages([size * share for size, share in block_sizes(model, family.plan)], len(stages),
                            speeds=[min(speed for speed, _ in ranks) for ranks in stages],
                            sizes=block_bytes(model, family, spec),
                            limits=[min(free for _, free in ranks) for ranks in stages])

    def _drop_model(self, command):
        self._models.pop(command.name, None)
        self._autoencoders.pop(command.name, None)
        self._planners.pop(command.name, None)
        self.release_memory()

    def _park_model(self, command):
        loaded = self._loaded(command.name)
        parts = holders(self.world_size, loaded.spec.stages)
        number = next(number for number, ranks in enumerate(parts) if self.rank in ranks)
        targets = [command.targets[rank] for rank in parts[number]]
        loaded.residency.park(targets, parts[number].index(self.rank), command.segments[number])
        self.release_memory()
        return_freed_memory()
        return loaded.residency.numbers

    def _restore_model(self, command):
        residency = self._loaded(command.name).residency
        residency.restore(lambda done, total: self.report_phase("bringing weights back", done, total))
        return residency.numbers

    def _bring(self, weight):
        """A weight in host memory on the device, with the same order of dims."""
        if self.device.type == "cpu":
            return weight
        return self._ferry.bring(weight) if weight.is_contiguous() else weight.to(self.device)

    def _keep_conditioning(self, command):
        self._conditioning[command.name] = {
            name: self._ferry.bring(map_segment(segment)) for name, segment in command.tensors.items()}

    def _drop_conditioning(self, command):
        for name in command.names:
            self._conditioning.pop(name, None)
            self._key_values.pop(name, None)
        self.release_memory()                                 # a run has ended: ComfyUI and other groups can use the rest

    def foresee(self, command):
        """Post the receives of a command that is yet to be carried out, so that its transfers overlap what runs before it.

        Called in the order of commands. Returns False where that is not possible, and then later ones must wait too.
        """
        if not isinstance(command, messages.Predict) or command.layout not in self._meshes or command.model not in self._models:
            return False
        if any(branch.conditioning not in self._conditioning for branch in command.branches):
            return False
        if command.request not in self._posted:
            self._posted[command.request] = self._post_receives(command)
        return True

    def _predict(self, command):
        """Run this rank's branch, batch share, stage and token shard; the first rank of the last stage writes the prediction."""
        loaded, mesh = self._loaded(command.model), self._mesh(command.layout)
        clock, waits = self._clock, []
        start = clock.mark()
        handles = self._posted.pop(command.request, None) or self._post_receives(command)
        self.traffic.num_exchanges += len(handles)             # what others send cannot be called off
        link = self._link(mesh, command.layout)
        self._unclaimed = [handle for handle in self._unclaimed if not handle[1].is_completed()] + handles
        for branch, first, last in self._parts(command, mesh):
            is_first_stage = mesh.ranks["pipefusion"] == 0
            shape = (last - first, *branch.latent.shape[1:])
            latent = on_device(map_segment(branch.latent)[first:last], self.device).to(loaded.dtype) if is_first_stage \
                else torch.zeros(shape, dtype=loaded.dtype, device=self.device)        # only its shape is used
            context = self._context(loaded, mesh, command, branch, latent, first)
            if handles:
                handle = handles.pop(0)

                def arrive(handle=handle):
                    asked = clock.mark()
                    message = link.receive(handle)
                    waits.append((asked, clock.mark()))
                    return message
                context.arrive = arrive
            output, message = loaded.hooks.run(context)
            if message is not None:
                link.send(message, self.traffic)
            elif mesh.sequence_rank == 0:
                self._ferry.fetch(loaded.family.prediction(output, latent), map_segment(branch.prediction)[first:last])
        clock.add(start, clock.mark(), waits)
        return {"sent_bytes": self.traffic.sent_bytes, "busy_s": clock.take()}

    def _parts(self, command, mesh):
        """[(branch, first image, last image + 1)]: what this rank runs of a command, in the order in which it travels."""
        parts = []
        for index, branch in enumerate(command.branches):
            if index % mesh.degrees["cfg"] != mesh.ranks["cfg"]:
                continue
            batch = branch.latent.shape[0]
            start = shard_start(batch, mesh.degrees["data"], mesh.ranks["data"])
            size = shard_sizes(batch, mesh.degrees["data"])[mesh.ranks["data"]]
            if command.by_image:
                parts += [(branch, image, image + 1) for image in range(start, start + size)]
            elif size:                                         # fewer images than data ranks: this one rests
                parts.append((branch, start, start + size))
        return parts

    def _context(self, loaded, mesh, command, branch, latent, first):
        batch, rows = branch.latent.shape[0], slice(first, first + latent.shape[0])
        conditioning = {name: _as_input(tensor[rows] if tensor.shape[0] == batch else tensor, loaded.dtype)
                        for name, tensor in self._conditioning[branch.conditioning].items()}
        keeping = {}
        if command.keep or command.patch is not None:
            keeping = {"key_values": self._kept(loaded, branch.conditioning),
                       "first_image": first - shard_start(batch, mesh.degrees["data"], mesh.ranks["data"]),
                       "num_images": shard_sizes(batch, mesh.degrees["data"])[mesh.ranks["data"]]}
        return loaded.context(mesh, self.traffic, latent, map_segment(branch.timestep)[rows], conditioning, command.patch, **keeping)

    def _kept(self, loaded, conditioning):
        """The keys and values of a conditioning, made when they are first kept."""
        if conditioning not in self._key_values:
            offload = loaded.spec.stages is not None and loaded.spec.stages.offload
            self._key_values[conditioning] = KeyValues(Offload(self.device) if offload else None)
        return self._key_values[conditioning]

    def _post_receives(self, command):
        """Handles for the hidden states of each part of a command; [] on the first stage."""
        loaded, mesh = self._loaded(command.model), self._mesh(command.layout)
        if mesh.ranks["pipefusion"] == 0:
            return []
        link, handles = self._link(mesh, command.layout), []
        for branch, first, last in self._parts(command, mesh):
            shape = (last - first, *branch.latent.shape[1:])
            size = loaded.received_size(mesh, shape, self._conditioning[branch.conditioning], command.patch)
            handles.append(link.post_receive(size, loaded.dtype))
        return handles

    def _link(self, mesh, layout):
        if mesh.degrees["pipefusion"] > 1 and layout not in self._links:
            self._links[layout] = Link(mesh, self.device)
        return self._links.get(layout)

    def _load_autoencoder(self, command):
        spec = command.spec
        if spec.name not in self._autoencoders:
            tensors = {name: map_segment(segment) for name, segment in spec.weights.items()}
            self._autoencoders[spec.name] = load_autoencoder(tensors, getattr(torch, spec.dtype), self.device,
                                                             spec.settings)
            self._planners[spec.name] = RowPlanner(self._autoencoders[spec.name])

    def _estimate(self, command):
        return {"needed_bytes": self._planners[command.autoencoder].least_bytes(command.shape, command.scale, self._ranks.count)}

    def _decode(self, command):
        vae = self._autoencoders[command.autoencoder]
        latent, picture = map_segment(command.latent), map_segment(command.picture)
        block_size, num_steps = self._plan_rows(command.autoencoder, latent[:1].shape, 1)
        live, started_s, started_cpu_s = LiveBytes(), time.perf_counter(), time.process_time()
        for index in range(len(latent)):
            progress = self._progress("decoding", index, len(latent), num_steps)
            with live if command.measure_memory else nullcontext():
                share = decode_rows(vae, on_device(latent[index:index + 1], self.device).to(vae.dtype), self._ranks, self.traffic,
                                    block_size, progress)
            if share is not None:
                # BCHW in [-1, 1] -> BHWC in [0, 1], as ComfyUI's VAE gives it
                pixels = share.tensor[0].float().add_(1).div_(2).clamp_(0, 1).movedim(0, -1)
                self._ferry.fetch(pixels, picture[index].narrow(share.dim - 1, share.start, pixels.shape[share.dim - 1]))
        return {"sent_bytes": self.traffic.sent_bytes, "num_exchanges": self.traffic.num_exchanges,
                "busy_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - started_cpu_s, "peak_bytes": live.peak_bytes}

    def _encode(self, command):
        vae = self._autoencoders[command.autoencoder]
        picture, latent = map_segment(command.picture), map_segment(command.latent)
        scale = picture.shape[-1] // latent.shape[-1]
        block_size, num_steps = self._plan_rows(command.autoencoder, picture[:1].shape, scale)
        for index in range(len(picture)):
            progress = self._progress("encoding", index, len(picture), num_steps)
            share = encode_rows(vae, picture[index:index + 1], scale, self._ranks, self.traffic,
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
        """Bytes of weights on the device and parked in host memory, of device memory in use and free; when all before is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        residencies = [loaded.residency for loaded in self._models.values()]
        held = sum(t.nbytes for vae in self._autoencoders.values() for t in (*vae.parameters(), *vae.buffers()))
        allocated = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        return {"pid": os.getpid(), "weight_bytes": held + sum(residency.device_bytes for residency in residencies),
                "parked_bytes": sum(residency.parked_bytes for residency in residencies),
                "allocated_bytes": allocated, "free_bytes": free_bytes(self.device), "num_conditionings": len(self._conditioning),
                "busy_s": self._clock.take(),
                "key_value_bytes": sum(kept.num_bytes for kept in self._key_values.values())}

    def _loaded(self, name):
        if name not in self._models:
            raise XDiTError(f"The model {name} is not loaded on rank {self.rank}. Queue the prompt again.")
        return self._models[name]

    def _mesh(self, layout):
        """The process groups of a layout, made when it is first used. Commands come in one order, so ranks agree."""
        if layout not in self._meshes:
            self._meshes[layout] = build_mesh(layout, self.world_size)
        return self._meshes[layout]

    def release_memory(self):
        """Give memory that nothing uses back to the device, so that other processes can have it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _as_input(tensor, dtype):
    """Conditioning in the model's dtype; masks stay whole numbers."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
