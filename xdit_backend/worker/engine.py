"""State of a rank, and the execution of commands on it."""

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
from ..system import accelerator
from . import device_probe
from .autoencoders import Autoencoders
from .memory import Memory
from .models import Models
from .predictions import Predictions
from .timeline import Timeline
from .upscalers import Upscalers

KNOWN_BYTES = ("weight_bytes", "cast_bytes", "key_value_bytes", "exchange_bytes", "conditioning_bytes")
VERSIONS_SHARE = 0.5                       # fraction of unused memory that cached versions of weights may take
ALLOCATING = (messages.LoadModel, messages.ChangeWeights, messages.ReturnWeights, messages.RestoreModel,
              messages.LoadAutoencoder, messages.LoadUpscaler)
# text of torch's error
TRIED_TO_ALLOCATE = re.compile(r"tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)
UNITS = {"bytes": 1, "KiB": 2 ** 10, "MiB": 2 ** 20, "GiB": 2 ** 30}


class Aborted(Exception):
    """The host no longer waits for the current command."""


class Engine:
    """All state of one rank."""

    def __init__(self, rank, device, report_phase, aborted=frozenset(), machines=()):
        """machines: the name of each rank's machine; (): all ranks are on one."""
        self.rank, self.device = rank, device
        # aborted requests, which another thread adds to
        self._aborted = aborted
        world_size = dist.get_world_size()
        staging = StagingBuffers(device)
        self._models = Models(rank, world_size, device, staging, report_phase)
        self.memory, self._timeline = Memory(device), Timeline(device)
        self._predictions = Predictions(self._models, world_size, device, staging, self._timeline,
                                        num_on_machine=machines.count(machines[rank]) if machines else world_size)
        self._autoencoders = Autoencoders(Ranks(dist.group.WORLD, machines), device, staging, report_phase,
                                          self._timeline)
        self._upscalers = Upscalers(rank, device, staging, report_phase, self._timeline)
        self.request, self.traffic = 0, Traffic()              # of the current or last command
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
            messages.LoadUpscaler: lambda command, traffic: self._upscalers.load(command.spec),
            messages.Upscale: lambda command, traffic: self._transform(self._upscalers.upscale, command, traffic),
            messages.Probe: lambda command, traffic: self._probe(command, traffic, report_phase),
            messages.ReportMemory: self._report_memory,
            messages.GiveBack: lambda command, traffic: self.memory.give_back(),
        }

    def execute(self, command):
        """Execute one command; returns measurements by name, or None."""
        # in this order, so that another thread never reads an earlier request's traffic as this one's
        self.traffic, self.request = Traffic(), command.request
        empties_cache = isinstance(command, ALLOCATING) and not self._predictions.num_conditionings
        # it may use memory cached by earlier runs, whose peak is measured from there
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
        """Post the receives of a later command, so that its transfers overlap with earlier ones.

        Called in the order of commands. Returns False if that is not possible; later commands must then wait too.
        """
        return isinstance(command, messages.Predict) and self._predictions.prefetch(command)

    @property
    def links(self):
        """This rank's link in each pipeline that has run."""
        return self._predictions.links

    def spans_for(self, command):
        """Spans of this rank's work that a command requests."""
        requested = isinstance(command, messages.ReportMemory) and command.since_s >= 0
        return self._timeline.since(command.since_s) if requested else []

    def _load(self, command, traffic):
        return self._models.load(command.spec, partial(self._check, command), command.segments, traffic)

    def _check(self, command, agreed=lambda requested: requested):
        """Raise Aborted if a command was aborted. agreed(requested): whether any of the ranks that must abort it
        together requests so."""
        if agreed(command.request in self._aborted):
            raise Aborted

    def _keep_conditioning(self, command, traffic):
        if not self._predictions.num_conditionings:            # a run begins
            self.memory.begin_run()
        self._predictions.keep_conditioning(command, traffic)

    def _drop(self, command, traffic):
        self._models.drop(command.name)
        self._autoencoders.drop(command.name)
        self._upscalers.drop(command.name)
        self._predictions.networks.drop(command.name)
        gc.collect()                                           # hooks and modules refer to each other
        self.memory.give_back()

    def _park(self, command, traffic):
        numbers = self._models.park(command)
        self.memory.give_back()
        return numbers

    def _drop_conditioning(self, command, traffic):
        self._predictions.drop_conditioning(command, traffic)
        if not self._predictions.num_conditionings:            # the last run has ended
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
                                        traffic, report_phase, command.per_machine)
        except Exception:
            traffic.is_broken = dist.get_world_size() > 1      # ranks begin each measurement together
            raise
        finally:
            self.memory.give_back()

    def _report_memory(self, command, traffic):
        """Bytes of resident and parked weights and of used and free device memory, busy seconds of the device and CPU
        seconds of this process, after all earlier work is done."""
        if self.device.type != "cpu":
            accelerator.module(self.device).synchronize(self.device)
        return {"pid": os.getpid(), "parked_bytes": self._models.parked_bytes,
                "busy_s": self._predictions.take_busy_s(), "cpu_s": time.process_time(), **self._memory()}

    def out_of_memory(self, error):
        """Bytes by name for an out-of-memory error; {} for any other. Does not synchronise: a collective may be
        pending."""
        if not is_out_of_memory(error):
            return {}
        numbers, match = self._memory(), TRIED_TO_ALLOCATE.search(str(error))
        if match is not None:
            numbers["requested_bytes"] = float(match[1]) * UNITS[match[2]]
        if self.device.type != "cpu":
            own = accelerator.module(self.device)
            free, total = own.mem_get_info(self.device)
            known = sum(value for name, value in numbers.items() if name in KNOWN_BYTES)
            numbers |= {"total_bytes": total, "other_bytes": total - free - own.memory_reserved(self.device),
                        "activation_bytes": max(0, numbers["allocated_bytes"] - known)}
        return numbers

    def _memory(self):
        allocated = (accelerator.module(self.device).memory_allocated(self.device) if self.device.type != "cpu"
                     else 0)
        return {"weight_bytes": (self._models.weight_bytes + self._autoencoders.weight_bytes
                                 + self._upscalers.weight_bytes + self._predictions.networks.num_bytes),
                "vae_bytes": self._autoencoders.weight_bytes,
                "allocated_bytes": allocated, "free_bytes": free_bytes(self.device), **self._predictions.memory(),
                **self.memory.report()}


def is_out_of_memory(error):
    """Whether an exception is an out-of-memory error, of CUDA or of the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
