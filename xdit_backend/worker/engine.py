"""How a rank carries out each command: what it holds, and who of those does the work. Used by serve."""

import gc
import os
import re
import time
from functools import partial

import torch
import torch.distributed as dist

from ..distributed.collectives import Traffic
from ..memory.staging import StagingBuffers
from ..parallel.vae_memory import free_bytes
from ..parallel.vae_rows import Ranks
from ..protocol import messages
from . import device_probe
from .autoencoders import Autoencoders
from .memory import Memory
from .models import Models
from .predictions import Predictions
from .timeline import Timeline

MEMORY_PARTS = ("weight_bytes", "cast_bytes", "key_value_bytes", "exchange_bytes", "conditioning_bytes")
VERSIONS_SHARE = 0.5                       # of unused memory, that versions of weights may take
ALLOCATING = (messages.LoadModel, messages.ChangeWeights, messages.ReturnWeights, messages.RestoreModel,
               messages.LoadAutoencoder)
TRIED_TO_ALLOCATE = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)  # in torch's words
UNITS = {"bytes": 1, "KiB": 2 ** 10, "MiB": 2 ** 20, "GiB": 2 ** 30}


class Aborted(Exception):
    """Nobody waits for the command at hand any more."""


class Engine:
    """All state of one rank. Nothing outlives a command but what a command asked to keep."""

    def __init__(self, rank, device, report_phase, aborted=frozenset(), machines=()):
        """machines: the name of each rank's machine; (): all ranks are on one."""
        self.rank, self.device = rank, device
        # requests that nobody waits for, which another thread may add to
        self._aborted = aborted
        world_size = dist.get_world_size()
        staging = StagingBuffers(device)
        self._models = Models(rank, world_size, device, staging, report_phase)
        self.memory, self._timeline = Memory(device), Timeline(device)
        self._predictions = Predictions(self._models, world_size, device, staging, self._timeline,
                                        num_on_machine=machines.count(machines[rank]) if machines else world_size)
        self._autoencoders = Autoencoders(Ranks(dist.group.WORLD, machines), device, staging, report_phase,
                                          self._timeline)
        self.request, self.traffic = 0, Traffic()              # of the command at hand, or of the last one
        self._handlers = {
            messages.LoadModel: self._load,
            messages.DropModel: self._drop,
            messages.ChangeWeights: lambda command, traffic:
            self._models.change(command, VERSIONS_SHARE * self._predictions.unused_bytes),
            messages.ReturnWeights: lambda command, traffic: self._models.go_back(command),
            messages.ParkModel: self._park,
            messages.RestoreModel: lambda command, traffic: self._models.restore(command),
            messages.Estimate: self._autoencoders.estimate,
            messages.Conditioning: self._keep_conditioning,
            messages.DropConditioning: self._drop_conditioning,
            messages.Predict: self._predictions.predict,
            messages.LoadAutoencoder: lambda command, traffic: self._autoencoders.load(command.spec),
            messages.LoadNetwork: lambda command, traffic: self._predictions.networks.load(command.spec),
            messages.Decode: lambda command, traffic: self._transform(self._autoencoders.decode, command, traffic),
            messages.Encode: lambda command, traffic: self._transform(self._autoencoders.encode, command, traffic),
            messages.Probe: lambda command, traffic: self._probe(command, traffic, report_phase),
            messages.ReportMemory: self._report_memory,
            messages.GiveBack: lambda command, traffic: self.memory.give_back(),
        }

    def execute(self, command):
        """Carry out one command; returns measurements by name, or None."""
        # in this order: what another thread reads as a request's is never an earlier one's
        self.traffic, self.request = Traffic(), command.request
        empties_cache = isinstance(command, ALLOCATING) and not self._predictions.num_conditionings
        # it may have what runs have left; what they take then counts from there
        if empties_cache:
            self.memory.give_back()
        try:
            with torch.inference_mode():
                return self._handlers[type(command)](command, self.traffic)
        except Aborted:
            return None
        finally:
            if empties_cache:
                self.memory.give_back()

    def prefetch(self, command):
        """Post the receives of a command that is yet to be carried out, so that its transfers overlap what runs before
        it.

        Called in the order of commands. Returns False where that is not possible, and then later ones must wait too.
        """
        return isinstance(command, messages.Predict) and self._predictions.prefetch(command)

    @property
    def links(self):
        """This rank's place in each pipeline that has run."""
        return self._predictions.links

    def spans_for(self, command):
        """The spans of this rank's time that a command asks for."""
        requested = isinstance(command, messages.ReportMemory) and command.since_s >= 0
        return self._timeline.since(command.since_s) if requested else []

    def _load(self, command, traffic):
        return self._models.load(command.spec, partial(self._check, command), command.segments, traffic)

    def _check(self, command, agreed=lambda requested: requested):
        """Raise Aborted where nobody waits for a command any more.
        agreed(asked): does any of the ranks that leave it together ask to?"""
        if agreed(command.request in self._aborted):
            raise Aborted

    def _keep_conditioning(self, command, traffic):
        if not self._predictions.num_conditionings:            # a run begins
            self.memory.begin_run()
        self._predictions.keep_conditioning(command, traffic)

    def _drop(self, command, traffic):
        self._models.drop(command.name)
        self._autoencoders.drop(command.name)
        self._predictions.networks.drop(command.name)
        gc.collect()                                           # its hooks and its modules refer to each other
        self.memory.give_back()

    def _park(self, command, traffic):
        numbers = self._models.park(command)
        self.memory.give_back()
        return numbers

    def _drop_conditioning(self, command, traffic):
        self._predictions.drop_conditioning(command, traffic)
        if not self._predictions.num_conditionings:            # the last run at hand has ended
            self.memory.end_run(self._predictions.unused_bytes)

    def _transform(self, transform, command, traffic):
        try:
            return transform(command, traffic, partial(self._check, command))
        finally:
            if not self._predictions.num_conditionings:
                self.memory.end_run(self._predictions.unused_bytes)

    def _probe(self, command, traffic, report_phase):
        try:
            return device_probe.measure(self.rank, dist.get_world_size(), self.device, getattr(torch, command.dtype),
                                        traffic,
                                 report_phase, command.per_machine)
        except Exception:
            traffic.is_broken = dist.get_world_size() > 1      # ranks begin each measurement together
            raise
        finally:
            self.memory.give_back()

    def _report_memory(self, command, traffic):
        """Bytes of weights on the device and parked in host memory, of device memory in use and free, and seconds that
        the device has worked and that processors have on this process; when all before is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return {"pid": os.getpid(), "parked_bytes": self._models.parked_bytes,
                "busy_s": self._predictions.take_busy_s(), "cpu_s": time.process_time(), **self._memory()}

    def out_of_memory(self, error):
        """Bytes by name for an error that says that memory ran out; {} for any other.
        Waits for nothing: an exchange may be under way."""
        if not is_out_of_memory(error):
            return {}
        numbers, match = self._memory(), TRIED_TO_ALLOCATE.search(str(error))
        if match is not None:
            numbers["requested_bytes"] = float(match[1]) * UNITS[match[2]]
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            held = sum(value for name, value in numbers.items() if name in MEMORY_PARTS)
            numbers |= {"total_bytes": total, "other_bytes": total - free - torch.cuda.memory_reserved(self.device),
                        "activation_bytes": max(0, numbers["allocated_bytes"] - held)}
        return numbers

    def _memory(self):
        allocated = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        return {"weight_bytes": (self._models.weight_bytes + self._autoencoders.weight_bytes
                                 + self._predictions.networks.num_bytes),
                "vae_bytes": self._autoencoders.weight_bytes,
                "allocated_bytes": allocated, "free_bytes": free_bytes(self.device), **self._predictions.memory(),
                **self.memory.report()}


def is_out_of_memory(error):
    """Does an exception say that memory ran out? Of CUDA, or of the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
