"""Predictions on this rank: cached conditioning of runs, process groups, and communication between stages."""

from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..attention.backends import BackendUse
from ..distributed.mesh import build_mesh, with_speeds
from ..hooks.forward_context import ModelPatches
from ..memory.staging import on_device
from ..parallel.displaced_exchange import Exchange
from ..parallel.pipefusion import Link
from ..parallel.reference_kv_cache import References, ReferenceUse
from ..parallel.stale_kv_cache import KeyValues, Offload
from ..parallel.vae_memory import free_bytes
from ..partition import FULL, shard_sizes
from ..protocol.shared_memory import map_segment
from ..protocol.specs import BY_BACKEND, MODES, Branch
from ..system import accelerator
from .busy_time import Clock
from .cooperative_loading import WeightGroups
from .injected_networks import Networks


class ImageSlice(NamedTuple):
    """Images of a branch that go through the model together."""

    branch: Branch
    first: int
    last: int                      # exclusive


class Predictions:
    """Execution of Predict commands, and this rank's state between them: conditioning, cached keys and values, process
    groups and links of layouts, posted receives."""

    def __init__(self, models, world_size, device, staging, timeline, map_segment=map_segment, num_on_machine=1):
        """map_segment(segment) -> its tensor. num_on_machine: number of ranks on this machine."""
        self._num_on_machine = num_on_machine
        self._models, self._world_size, self._device, self._map = models, world_size, device, map_segment
        self._conditioning, self._key_values, self._exchanges = {}, {}, {}
        self._references = References()
        self._meshes, self._links, self._posted = {}, {}, {}
        self._unclaimed = []               # receives that nobody has waited for; gloo needs the references
        self._staging, self._clock, self._timeline = staging, Clock(device), timeline
        self.networks, self._backend = Networks(device), BackendUse()        # the latter: of the current command
        self._weight_groups = WeightGroups(world_size)
        self._most_cached_bytes = 0        # of the current or last run

    @property
    def links(self):
        """The links of all layouts that have stages."""
        return self._links.values()

    @property
    def num_conditionings(self):
        return len(self._conditioning)

    def memory(self):
        """Bytes of tensors cached between predictions, by name."""
        return {"cast_bytes": self._models.cast_bytes, "num_conditionings": self.num_conditionings,
                "conditioning_bytes": sum(tensor.nbytes for cached in self._conditioning.values()
                                          for tensor in cached.values()),
                "key_value_bytes": sum(cached.num_bytes for cached in (*self._key_values.values(), self._references)),
                "exchange_bytes": sum(exchange.num_bytes for exchange in self._exchanges.values()),
                "most_kept_bytes": max(self._most_cached_bytes, self._cached_bytes)}

    @property
    def _cached_bytes(self):
        """Bytes on the device that are cached from earlier calls."""
        return sum(cached.num_bytes for cached in (*self._key_values.values(), *self._exchanges.values(),
                                                   self._references))

    def take_busy_s(self):
        """Seconds that the device has worked since the last call of this method."""
        return self._clock.take()

    def keep_conditioning(self, command, traffic):
        if not self._conditioning:                             # a run begins
            self._most_cached_bytes = 0
        self._conditioning[command.name] = {
            name: self._staging.to_device(self._map(segment)) for name, segment in command.tensors.items()}

    def drop_conditioning(self, command, traffic):
        self._most_cached_bytes = max(self._most_cached_bytes, self._cached_bytes)
        self._references.drop(command.names)
        for name in command.names:
            self._conditioning.pop(name, None)
            key_values = self._key_values.pop(name, None)
            if key_values is not None:
                key_values.close()
            exchange = self._exchanges.pop(name, None)
            if exchange is not None:
                exchange.drain()
        if not self._key_values:                               # no run has pending patches
            self._models.drop_casts()
        if not self._conditioning:
            self._models.drop_versions()

    def prefetch(self, command):
        """Post the receives of a Predict ahead of time; returns False if its model, groups or conditioning are
        missing."""
        if command.layout not in self._meshes or command.model not in self._models:
            return False
        spec, copies = self._models[command.model].transformer.spec, command.options.copies
        if copies.is_shared and not self._weight_groups.has(spec):
            return False
        if any(branch.conditioning not in self._conditioning for branch in command.branches):
            return False
        self._post_receives(command)
        return True

    def predict(self, command, traffic):
        """Run this rank's branch, batch slice, stage and token shard. The first rank of the last stage writes the
        prediction."""
        loaded, mesh = self._models[command.model], self._entered_mesh(command, traffic)
        choice = command.options.backend
        self._backend = BackendUse(choice.name, choice.is_required, self._backend.modules,
                                   fastest=choice.fastest)
        clock, waits, offloaded = self._clock, [], loaded.transformer.offloaded
        start, weight_waits = clock.mark(), [] if offloaded is None else offloaded.time_waits(clock.mark)
        sharing = self._weight_groups.sharing(command, mesh, loaded.transformer.spec, traffic)
        if offloaded is not None:
            offloaded.copy_by(command.options.copies.is_pageable, sharing)
        try:
            self._post_receives(command)
        finally:
            handles = self._posted.pop(command.request, [])
            traffic.num_exchanges += len(handles)         # messages of other ranks cannot be cancelled
            for _ in handles:
                with traffic.entering(self._link(mesh, command.layout).arriving):
                    pass
            self._unclaimed = [handle for handle in self._unclaimed if not handle[1].is_completed()] + handles
        link = self._link(mesh, command.layout)
        if link is not None:
            link.let_go()
        for slices in self._concurrent_slices(command, mesh, offloaded is not None):
            receives = ([partial(self._receive, link, [handles.pop(0)], traffic, waits) for _ in slices] if handles
                        else [])
            self._run(command, slices, receives, traffic)
        if offloaded is not None:                              # after sending, so that no rank waits if this fails
            offloaded.check_files()
        # activations have allocated their memory by now
        if command.patch is not None and offloaded is None and not loaded.transformer.casts.are_cached:
            loaded.transformer.casts.keep(FULL * self.unused_bytes)
        end = clock.mark()
        clock.add(start, end, waits + weight_waits)
        self._record(command, start, end, {"wait": waits, "weights": weight_waits}, traffic)
        by_backend = {f"{BY_BACKEND}{name}": float(count) for name, count in self._backend.counts.items()}
        return {"sent_bytes": traffic.sent_bytes, "busy_s": clock.take(), **by_backend}

    def _run(self, command, slices, receives, traffic):
        """Run these slices concurrently, and release all tensors of their forwards that are not cached.

        receives: functions that return the previous stage's message, one per slice; empty on the first stage.
        """
        loaded, mesh = self._models[command.model], self._mesh(command)
        latents = [self._latent(loaded, mesh, images) for images in slices]
        exchanges = [self._exchange(command, mesh, images.branch.conditioning) for images in slices]
        contexts = [self._context(loaded, mesh, command, images, latent, traffic, exchange)
                    for images, latent, exchange in zip(slices, latents, exchanges)]
        for context, receive in zip(contexts, receives):
            context.receive_message = receive
        with ExitStack() as calls:
            for images, exchange in zip(slices, exchanges) if exchanges[0] is not None else ():
                calls.enter_context(self._call(exchange, command, images.branch, traffic))
            results = [loaded.hooks.run(contexts[0])] if len(slices) == 1 else loaded.hooks.run_in_turn(contexts)
        for images, latent, context, (output, message) in zip(slices, latents, contexts, results):
            if message is None:
                self._write(loaded.family, images, latent, context, output)
            else:
                self._link(mesh, command.layout).send(message, traffic)

    def _receive(self, link, handles, traffic, waits):
        """Wait for the message of the only handle in this list, and release the handle."""
        requested, handle = self._clock.mark(), handles.pop()
        message = link.receive(handle, traffic)
        self._unclaimed = [each for each in self._unclaimed if each is not handle]
        waits.append((requested, self._clock.mark()))
        return message

    def _write(self, family, images, latent, context, output):
        """Write the prediction for a slice to shared memory: this rank's rows, or all rows on the first rank that has
        them."""
        mesh, (branch, first, last) = context.mesh, images
        if context.bands is not None:
            band, next_band = context.bands[context.exchange.rank:][:2]
            rows = self._map(branch.prediction)[first:last].narrow(2, band, next_band - band)
            self._staging.to_host(family.prediction(output, latent), rows)
        elif mesh.sequence_rank == mesh.ranks["tensor"] == 0:
            self._staging.to_host(family.prediction(output, latent), self._map(branch.prediction)[first:last])
            for name, prediction in family.component_predictions(output).items():
                if name in branch.parts:
                    self._staging.to_host(prediction, self._map(branch.parts[name])[first:last])

    def _record(self, command, start, end, waits, traffic):
        """Add a step and its waits to the timeline. waits: {kind: pairs of marks}.

        NCCL's communication is work of the device, and not counted separately.
        """
        step = {"time": self._map(command.branches[0].timestep).flatten()[0].item(),
                "first_row": command.patch.start if command.patch else 0}
        self._timeline.add("patch" if command.patch else "whole", start, end, **step)
        for kind, pairs in (*waits.items(), ("exchange", traffic.waits if self._device.type == "cpu" else ())):
            for pair in pairs:
                self._timeline.add(kind, *pair, **step)

    def _concurrent_slices(self, command, mesh, is_offloaded):
        """Lists of slices of a command to run concurrently: one slice each; with tensor parallelism two branches, which
        are interleaved during all-reduces; with streamed weights all slices, so that weights are copied once."""
        slices, caches = self._slices(command, mesh), mesh.degrees["pipefusion"] * mesh.degrees["displaced"] > 1
        # images of one conditioning share a cache, so they run one after the other
        if is_offloaded and not (caches and len({images.branch.conditioning for images in slices}) < len(slices)):
            return [slices] if slices else []
        if caches:
            return [[images] for images in slices]
        interleaves = mesh.degrees["tensor"] > 1 and not command.by_image
        return ([slices[index:index + 2] for index in range(0, len(slices), 2)] if interleaves
                else [[images] for images in slices])

    def _latent(self, loaded, mesh, images):
        """A slice's latents on the device; zeros for stages that need only the shape, as most after the first."""
        (branch, first, last), stage = images, mesh.ranks["pipefusion"]
        if stage == 0 or loaded.family.plan.rereads_latent:
            return on_device(self._map(branch.latent)[first:last], self._device).to(loaded.dtype)
        return torch.zeros((last - first, *branch.latent.shape[1:]), dtype=loaded.dtype, device=self._device)

    def _slices(self, command, mesh):
        """The ImageSlices of a command that this rank runs, in the order of their messages."""
        slices = []
        for index, branch in enumerate(command.branches):
            if index % mesh.degrees["cfg"] != mesh.ranks["cfg"]:
                continue
            batch = branch.latent.shape[0]
            start, size = _own_images(batch, mesh)
            if command.by_image:
                slices += [ImageSlice(branch, image, image + 1) for image in range(start, start + size)]
            elif size:                                         # 0: fewer images than data ranks
                slices.append(ImageSlice(branch, start, start + size))
        return slices

    def _exchange(self, command, mesh, conditioning):
        """The displaced axis's Exchange, cached with the conditioning if later calls use it."""
        if mesh.degrees["displaced"] == 1:
            return None
        if conditioning in self._exchanges and (command.keep or command.stale):
            return self._exchanges[conditioning]
        # stale activations that are never updated are not extrapolated
        updates = command.keep and MODES[command.displaced_mode].publishes
        extrapolation = command.options.extrapolation if updates else 0.0
        exchange = Exchange(mesh.displaced_group, mesh.degrees["displaced"], mesh.ranks["displaced"],
                            extrapolation=extrapolation)
        if command.keep:
            self._exchanges[conditioning] = exchange
        return exchange

    def _context(self, loaded, mesh, command, images, latent, traffic, exchange):
        branch, first, last = images
        batch, rows = branch.latent.shape[0], slice(first, last)
        counts = loaded.family.inputs.counts
        conditioning = {name: _as_input(tensor[rows] if tensor.shape[0] == batch and name not in counts
                                        else tensor, loaded.dtype)
                        for name, tensor in self._conditioning[branch.conditioning].items()}
        call_conditioning = {name: on_device(tensor[rows] if tensor.shape[0] == batch else tensor, self._device)
                             for name, tensor in self._call_conditioning(branch).items()}
        conditioning |= {name: tensor.to(loaded.dtype) if name in loaded.family.inputs.components.names else tensor
                         for name, tensor in call_conditioning.items()}
        keeping = {} if exchange is None else {"exchange": exchange, "first_image": first}
        if exchange is None and (command.keep or command.patch is not None):
            start, size = _own_images(batch, mesh)
            keeping = {"key_values": self._cached(loaded, branch.conditioning), "first_image": first - start,
                       "num_images": size}
        if branch.cached is not None:
            keeping["references"] = ReferenceUse(self._references, branch.cached.rows[rows], branch.cached.fills,
                                                 loaded.family.plan.cached_references)
        # a tensor for several insertion points is mapped once
        maps = {segment.path: self._map(segment) for segment in branch.control.values()}
        added = {name: maps[segment.path] for name, segment in branch.control.items()}
        control = {name: tensor[rows] if tensor.shape[0] == batch else tensor for name, tensor in added.items()}
        scores = None if branch.scores is None else self._map(branch.scores)[:, rows]
        patches = ModelPatches(branch.operations, branch.guided, branch.free_u, branch.tiles,
                               self.networks.of(branch.networks, rows), scores, shuffled={
                                   block: on_device(self._map(order), self._device)
                                   for block, order in branch.shuffled.items()})
        return loaded.context(mesh, traffic, latent, self._map(branch.timestep)[rows], conditioning, command.patch,
                              control=control, patches=patches, options=command.options, backend=self._backend,
                              **keeping)

    def _call(self, exchange, command, branch, traffic):
        """Context of one call of a model with the command's displaced_mode."""
        mode = MODES[command.displaced_mode]
        is_stale = command.stale and mode.is_stale
        return exchange.call(traffic, is_stale, command.keep and (mode.publishes or not is_stale), mode.norms,
                             self._map(branch.timestep).max().item())

    def _call_conditioning(self, branch):
        """Conditioning of one call only, in system RAM."""
        return {name: self._map(segment) for name, segment in branch.call_conditioning.items()}

    def _cached(self, loaded, conditioning):
        """The cached keys and values of a conditioning, created on first use."""
        if conditioning not in self._key_values:
            offload = loaded.transformer.spec.stages is not None and loaded.transformer.spec.stages.offload
            self._key_values[conditioning] = KeyValues(Offload(self._device) if offload else None)
        return self._key_values[conditioning]

    def _post_receives(self, command):
        """Post a receive for the hidden states of each slice of a command, except on the first stage.

        After a failure, the next call continues where this one stopped: a receive that was posted takes a message, so
        posting it again would be one too many.
        """
        loaded, mesh = self._models[command.model], self._mesh(command)
        if mesh.ranks["pipefusion"] == 0:
            return
        link, handles = self._link(mesh, command.layout), self._posted.setdefault(command.request, [])
        for branch, first, last in self._slices(command, mesh)[len(handles):]:
            shape = (last - first, *branch.latent.shape[1:])
            size = loaded.received_size(mesh, shape,
                                        self._conditioning[branch.conditioning] | self._call_conditioning(branch),
                                        command.patch)
            handles.append(link.post_receive(size, loaded.dtype))

    @property
    def unused_bytes(self):
        """Unallocated bytes of the device; of system RAM, this rank's part among the CPU workers of the machine."""
        if self._device.type != "cpu":
            return accelerator.module(self._device).mem_get_info(self._device)[0]
        return free_bytes(self._device) // self._num_on_machine

    def _link(self, mesh, layout):
        if mesh.degrees["pipefusion"] > 1 and layout not in self._links:
            self._links[layout] = Link(mesh, self._device)
        return self._links.get(layout)

    def _entered_mesh(self, command, traffic):
        """`_mesh`, counted as a collective if groups have to be created. A single rank creates none, and its dry run
        has no process group."""
        if self._world_size == 1 or command.layout in self._meshes:
            return self._mesh(command)
        with traffic.entering(dist.group.WORLD):
            return self._mesh(command)

    def _mesh(self, command):
        """The Mesh of a command's layout. Process groups are created when it is first used; all ranks receive commands
        in the same order."""
        if command.layout not in self._meshes:
            self._meshes[command.layout] = build_mesh(command.layout, self._world_size)
        return with_speeds(self._meshes[command.layout], command.speeds)


def _own_images(batch, mesh):
    """(first, number) of the images of a batch for this rank's data group."""
    sizes = shard_sizes(batch, mesh.degrees["data"], mesh.data_speeds)
    return sum(sizes[:mesh.ranks["data"]]), sizes[mesh.ranks["data"]]


def _as_input(tensor, dtype):
    """Conditioning in the model's dtype; integer masks are unchanged."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
