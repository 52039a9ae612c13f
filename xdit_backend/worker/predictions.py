"""Predictions on this rank: conditioning that is kept for a run, process groups, and the traffic between stages.
Used by the engine."""

from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..attention.backends import BackendUse
from ..distributed.mesh import build_mesh, with_speeds
from ..memory.staging import on_device
from ..parallel.displaced_exchange import Exchange
from ..parallel.pipefusion import Link
from ..parallel.reference_kv_cache import References, ReferenceUse
from ..parallel.stale_kv_cache import KeyValues, Offload
from ..parallel.vae_memory import free_bytes
from ..partition import FULL, shard_sizes
from ..protocol.shared_memory import map_segment
from ..protocol.specs import BY_KERNEL, MODES, Branch
from .busy_time import Clock
from .cooperative_loading import WeightGroups
from .injected_networks import Networks


class Part(NamedTuple):
    """Images of a branch that go through the model together."""

    branch: Branch
    first: int
    last: int                      # the one after them


class Predictions:
    """What this rank keeps between predictions: conditioning, keys and values, groups and links of layouts,
    posted receives."""

    def __init__(self, models, world_size, device, staging, timeline, map_segment=map_segment, num_on_machine=1):
        """map_segment(segment) -> the tensor that a command means by it. num_on_machine: ranks on this machine."""
        self._num_on_machine = num_on_machine
        self._models, self._world_size, self._device, self._map = models, world_size, device, map_segment
        self._conditioning, self._key_values, self._exchanges = {}, {}, {}
        self._references = References()
        self._meshes, self._links, self._posted = {}, {}, {}
        self._unclaimed = []               # receives that nobody has waited for; gloo needs them kept
        self._staging, self._clock, self._timeline = staging, Clock(device), timeline
        self.networks, self._backend = Networks(device), BackendUse()        # the last: of the command at hand
        self._weight_groups = WeightGroups(world_size)
        self._most_cached_bytes = 0          # in the run at hand or the last one

    @property
    def links(self):
        """The links of all layouts that have stages."""
        return self._links.values()

    @property
    def num_conditionings(self):
        return len(self._conditioning)

    def memory(self):
        """Bytes of what is kept between predictions, by name."""
        return {"cast_bytes": self._models.cast_bytes, "num_conditionings": self.num_conditionings,
                "conditioning_bytes": sum(tensor.nbytes for cached in self._conditioning.values()
                                          for tensor in cached.values()),
                "key_value_bytes": sum(cached.num_bytes for cached in (*self._key_values.values(), self._references)),
                "exchange_bytes": sum(exchange.num_bytes for exchange in self._exchanges.values()),
                "most_kept_bytes": max(self._most_cached_bytes, self._cached_bytes)}

    @property
    def _cached_bytes(self):
        """Of earlier calls, on the device."""
        return sum(cached.num_bytes for cached in (*self._key_values.values(), *self._exchanges.values(),
                                                   self._references))

    def take_busy_s(self):
        """Seconds that the device has worked since this was asked last."""
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
        if not self._key_values:                               # no run has patches on their way
            self._models.drop_casts()
        if not self._conditioning:
            self._models.drop_versions()

    def prefetch(self, command):
        """Post the receives of a Predict ahead; False where what it needs is not here yet."""
        if command.layout not in self._meshes or command.model not in self._models:
            return False
        if command.copies.is_shared and not self._weight_groups.has(self._models[command.model].transformer.spec):
            return False
        if any(branch.conditioning not in self._conditioning for branch in command.branches):
            return False
        self._post_receives(command)
        return True

    def predict(self, command, traffic):
        """Run this rank's branch, batch share, stage and token shard;
        the first rank of the last stage writes the prediction."""
        loaded, mesh = self._models[command.model], self._entered_mesh(command, traffic)
        self._backend = BackendUse(command.backend.name, command.backend.is_required, self._backend.modules)
        clock, waits, offloaded = self._clock, [], loaded.transformer.offloaded
        start, weight_waits = clock.mark(), [] if offloaded is None else offloaded.time_waits(clock.mark)
        sharing = self._weight_groups.sharing(command, mesh, loaded.transformer.spec, traffic)
        if offloaded is not None:
            offloaded.copy_by(command.copies.is_pageable, sharing)
        try:
            self._post_receives(command)
        finally:
            handles = self._posted.pop(command.request, [])
            traffic.num_exchanges += len(handles)         # what others send cannot be called off
            for _ in handles:
                with traffic.entering(self._link(mesh, command.layout).arriving):
                    pass
            self._unclaimed = [handle for handle in self._unclaimed if not handle[1].is_completed()] + handles
        link = self._link(mesh, command.layout)
        if link is not None:
            link.let_go()
        for parts in self._together(command, mesh, offloaded is not None):
            receives = ([partial(self._receive, link, [handles.pop(0)], traffic, waits) for _ in parts] if handles
                        else [])
            self._run(command, parts, receives, traffic)
        if offloaded is not None:                              # others have by now what they wait for, and answer too
            offloaded.check_files()
        # by now activations have taken what they need
        if command.patch is not None and offloaded is None and not loaded.transformer.casts.are_cached:
            loaded.transformer.casts.keep(FULL * self.unused_bytes)
        end = clock.mark()
        clock.add(start, end, waits + weight_waits)
        self._record(command, start, end, {"wait": waits, "weights": weight_waits}, traffic)
        by_backend = {f"{BY_KERNEL}{name}": float(count) for name, count in self._backend.counts.items()}
        return {"sent_bytes": traffic.sent_bytes, "busy_s": clock.take(), **by_backend}

    def _run(self, command, parts, receives, traffic):
        """Run these parts at a time. When it returns, nothing of their forwards is left but what is kept. receives: for
        what the stage before has sent, of each part; none where nothing has."""
        loaded, mesh = self._models[command.model], self._mesh(command)
        latents = [self._latent(loaded, mesh, part) for part in parts]
        exchanges = [self._exchange(command, mesh, part.branch.conditioning) for part in parts]
        contexts = [self._context(loaded, mesh, command, part, latent, traffic, exchange)
                    for part, latent, exchange in zip(parts, latents, exchanges)]
        for context, receive in zip(contexts, receives):
            context.receive_message = receive
        with ExitStack() as calls:
            for part, exchange in zip(parts, exchanges) if exchanges[0] is not None else ():
                calls.enter_context(self._call(exchange, command, part.branch, traffic))
            results = [loaded.hooks.run(contexts[0])] if len(parts) == 1 else loaded.hooks.run_in_turn(contexts)
        for part, latent, context, (output, message) in zip(parts, latents, contexts, results):
            if message is None:
                self._write(loaded.family, part, latent, context, output)
            else:
                self._link(mesh, command.layout).send(message, traffic)

    def _receive(self, link, handles, traffic, waits):
        """The message of the only one of these handles, which is nowhere kept from then on."""
        requested, handle = self._clock.mark(), handles.pop()
        message = link.receive(handle, traffic)
        self._unclaimed = [each for each in self._unclaimed if each is not handle]
        waits.append((requested, self._clock.mark()))
        return message

    def _write(self, family, part, latent, context, output):
        """Write the prediction for a part's images to where the host reads it:
        this rank's rows, or all, by the first rank that has them."""
        mesh, (branch, first, last) = context.mesh, part
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
        """Put a step, and what it waited for, into the timeline. waits: {kind: pairs of marks}.
        Exchanges over NCCL are the device's own work, and not counted apart."""
        step = {"time": self._map(command.branches[0].timestep).flatten()[0].item(),
                "first_row": command.patch.start if command.patch else 0}
        self._timeline.add("patch" if command.patch else "whole", start, end, **step)
        for kind, pairs in (*waits.items(), ("exchange", traffic.waits if self._device.type == "cpu" else ())):
            for pair in pairs:
                self._timeline.add(kind, *pair, **step)

    def _together(self, command, mesh, is_offloaded):
        """Run the parts of a command one by one; where layers are split over ranks, two branches at a time, which take
        turns while sums travel; where weights come from host memory, all, so that these come once."""
        parts, keeps = self._parts(command, mesh), mesh.degrees["pipefusion"] * mesh.degrees["displaced"] > 1
        # images of one conditioning share what is kept, one after the other
        if is_offloaded and not (keeps and len({part.branch.conditioning for part in parts}) < len(parts)):
            return [parts] if parts else []
        if keeps:
            return [[part] for part in parts]
        interleaves = mesh.degrees["tensor"] > 1 and not command.by_image
        return ([parts[index:index + 2] for index in range(0, len(parts), 2)] if interleaves
                else [[part] for part in parts])

    def _latent(self, loaded, mesh, part):
        """A part's latents on the device. Of stages that use only the shape, as most after the first, zeros."""
        (branch, first, last), stage = part, mesh.ranks["pipefusion"]
        if stage == 0 or loaded.family.plan.rereads_latent:
            return on_device(self._map(branch.latent)[first:last], self._device).to(loaded.dtype)
        return torch.zeros((last - first, *branch.latent.shape[1:]), dtype=loaded.dtype, device=self._device)

    def _parts(self, command, mesh):
        """The Parts that this rank runs of a command, in the order in which they travel."""
        parts = []
        for index, branch in enumerate(command.branches):
            if index % mesh.degrees["cfg"] != mesh.ranks["cfg"]:
                continue
            batch = branch.latent.shape[0]
            start, size = _own_images(batch, mesh)
            if command.by_image:
                parts += [Part(branch, image, image + 1) for image in range(start, start + size)]
            elif size:                                         # fewer images than data ranks: this one rests
                parts.append(Part(branch, start, start + size))
        return parts

    def _exchange(self, command, mesh, conditioning):
        """What the ranks of the displaced axis tell each other:
        kept with the conditioning, where calls follow that use it."""
        if mesh.degrees["displaced"] == 1:
            return None
        if conditioning in self._exchanges and (command.keep or command.stale):
            return self._exchanges[conditioning]
        # what is frozen goes nowhere
        extrapolation = command.extrapolation if MODES[command.displaced_mode].publishes else 0.0
        exchange = Exchange(mesh.displaced_group, mesh.degrees["displaced"], mesh.ranks["displaced"],
                            extrapolation=extrapolation)
        if command.keep:
            self._exchanges[conditioning] = exchange
        return exchange

    def _context(self, loaded, mesh, command, part, latent, traffic, exchange):
        branch, first, last = part
        batch, rows = branch.latent.shape[0], slice(first, last)
        conditioning = {name: _as_input(tensor[rows] if tensor.shape[0] == batch and name not in loaded.family.counts
                                        else tensor, loaded.dtype)
                        for name, tensor in self._conditioning[branch.conditioning].items()}
        call_conditioning = {name: on_device(tensor[rows] if tensor.shape[0] == batch else tensor, self._device)
                  for name, tensor in self._call_conditioning(branch).items()}
        conditioning |= {name: tensor.to(loaded.dtype) if name in loaded.family.components else tensor
                         for name, tensor in call_conditioning.items()}
        keeping = {} if exchange is None else {"exchange": exchange, "first_image": first}
        if exchange is None and (command.keep or command.patch is not None):
            start, size = _own_images(batch, mesh)
            keeping = {"key_values": self._cached(loaded, branch.conditioning), "extrapolation": command.extrapolation,
                       "first_image": first - start, "num_images": size}
        if branch.cached is not None:
            keeping["references"] = ReferenceUse(self._references, branch.cached.rows[rows], branch.cached.fills,
                                                 loaded.family.plan.cached_references)
        # one tensor for many places is one map
        maps = {segment.path: self._map(segment) for segment in branch.control.values()}
        added = {place: maps[segment.path] for place, segment in branch.control.items()}
        control = {place: tensor[rows] if tensor.shape[0] == batch else tensor for place, tensor in added.items()}
        scores = None if branch.scores is None else self._map(branch.scores)[:, rows]
        return loaded.context(mesh, traffic, latent, self._map(branch.timestep)[rows], conditioning, command.patch,
                              control=control, operations=branch.operations, scores=scores, guided=branch.guided,
                              networks=self.networks.of(branch.networks, rows), free_u=branch.free_u,
                              tiles=branch.tiles, compile_backend=command.compile_backend, backend=self._backend,
                              attention_exchange=command.exchange, **keeping)

    def _call(self, exchange, command, branch, traffic):
        """One call of a model, as the command's mode has the ranks tell each other."""
        mode = MODES[command.displaced_mode]
        is_stale = command.stale and mode.is_stale
        return exchange.call(traffic, is_stale, command.keep and (mode.publishes or not is_stale), mode.norms,
                             self._map(branch.timestep).max().item())

    def _call_conditioning(self, branch):
        """Conditioning of one call alone, in host memory."""
        return {name: self._map(segment) for name, segment in branch.call_conditioning.items()}

    def _cached(self, loaded, conditioning):
        """The cached keys and values of a conditioning, made when they are first needed."""
        if conditioning not in self._key_values:
            offload = loaded.transformer.spec.stages is not None and loaded.transformer.spec.stages.offload
            self._key_values[conditioning] = KeyValues(Offload(self._device) if offload else None)
        return self._key_values[conditioning]

    def _post_receives(self, command):
        """See that there is a handle for the hidden states of each part of a command, but on the first stage.

        Where this fails, the next time goes on from there: what was posted takes a message, which one posted anew would
        lack.
        """
        loaded, mesh = self._models[command.model], self._mesh(command)
        if mesh.ranks["pipefusion"] == 0:
            return
        link, handles = self._link(mesh, command.layout), self._posted.setdefault(command.request, [])
        for branch, first, last in self._parts(command, mesh)[len(handles):]:
            shape = (last - first, *branch.latent.shape[1:])
            size = loaded.received_size(mesh, shape,
                                        self._conditioning[branch.conditioning] | self._call_conditioning(branch),
                                        command.patch)
            handles.append(link.post_receive(size, loaded.dtype))

    @property
    def unused_bytes(self):
        """Bytes of the device that nobody has asked for yet; CPU workers on one machine share what it has."""
        if self._device.type == "cuda":
            return torch.cuda.mem_get_info(self._device)[0]
        return free_bytes(self._device) // self._num_on_machine

    def _link(self, mesh, layout):
        if mesh.degrees["pipefusion"] > 1 and layout not in self._links:
            self._links[layout] = Link(mesh, self._device)
        return self._links.get(layout)

    def _entered_mesh(self, command, traffic):
        """As `_mesh`, where every rank of the world may have to make groups, which is an exchange. One rank alone
        makes none, and its dry run has no process group."""
        if self._world_size == 1 or command.layout in self._meshes:
            return self._mesh(command)
        with traffic.entering(dist.group.WORLD):
            return self._mesh(command)

    def _mesh(self, command):
        """The process groups of a command's layout, made when it is first used.
        Commands come in one order, so ranks agree."""
        if command.layout not in self._meshes:
            self._meshes[command.layout] = build_mesh(command.layout, self._world_size)
        return with_speeds(self._meshes[command.layout], command.speeds)


def _own_images(batch, mesh):
    """(first, number) of the images of a batch that this rank's data group has."""
    sizes = shard_sizes(batch, mesh.degrees["data"], mesh.data_speeds)
    return sum(sizes[:mesh.ranks["data"]]), sizes[mesh.ranks["data"]]


def _as_input(tensor, dtype):
    """Conditioning in the model's dtype; masks stay whole numbers."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
