"""Which worker groups run: one for each set of devices that is in use, shared by all nodes,
living as long as ComfyUI."""

import importlib.util
import logging
import os
import sys
import threading
import weakref

import torch

import comfy.model_management
import folder_paths
from comfy_execution.utils import get_executing_context

from ....xdit_backend.config import ParallelConfig, fitting, validate
from ....xdit_backend.host import machine_profiles
from ....xdit_backend.host.client import Client
from ....xdit_backend.host.forkserver import Forkserver
from ....xdit_backend.host.preflight import num_cuda_devices
from ....xdit_backend.host.torchrun import environment_of
from ....xdit_backend.memory.system_memory import available_memory
from ....xdit_backend.multi_node.listener import Listener, own_addresses, read_address
from ....xdit_backend.planner.layout_search import speeds_of
from ....xdit_backend.protocol.devices import machine_of, machines_of, own_name, resolve_devices
from ....xdit_backend.protocol.errors import ConfigError, WorkerDiedError, WorkerFailedError
from .idle_timeout import watch
from .progress import Runs
from .settings import chosen_address

log = logging.getLogger(__name__)

WORKER_PACKAGES = ("diffusers", "accelerate", "safetensors", "greenlet", "pydantic")
KEPT_FREE_BYTES = 2 ** 31
# groups with a worker on the same device; a third ends the one that was not used for longest
MAX_SHARING = 2


def check_packages():
    """Refuse to go on when a package that the workers need is missing."""
    missing = [name for name in WORKER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"Install {', '.join(missing)}, which this Python does not have: python -m pip install -r "
                          "requirements.txt (in the folder of the xDiT nodes, with ComfyUI's Python), and restart "
                          "ComfyUI.")


def devices_of(config):
    """The devices a config means on this machine. Raises ConfigError when it cannot work here."""
    devices = resolve_devices(config.devices, num_cuda_devices(), config.mode)
    if machines_of(devices) and not chosen_address():
        raise ConfigError(f'Leave out {", ".join(machines_of(devices))}, or set the address of this machine in '
                          f'Settings > xDiT > Other machines, one of {", ".join(own_addresses())}, and read '
                          f'docs/guide/several-machines.md before: devices="{config.devices}", and ComfyUI does not '
                          "listen for other machines.")
    validate(config, len(devices))
    return devices


def fitting_here(config):
    """The ParallelConfig nearest to this one that can work on this machine."""
    return fitting(config, num_cuda_devices())


def memory_of(device):
    """Bytes of memory that a device has in all. Makes no CUDA context there, which would take up to half a gigabyte.

    Of another machine's device: waits until that machine has joined. Raises WorkerStartError where it does not,
    ConfigError where it lacks the device.
    """
    if machine_of(device):
        return GROUPS.gpu_of(device)[1]
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return available_memory()[1]


def parking_bytes():
    """Bytes of host memory that parked weights may take: what is free, in a container within its limit, less what
    ComfyUI too leaves free."""
    return available_memory()[0] - KEPT_FREE_BYTES


class Groups:
    """The worker groups and the models in use on them.

    Groups on different devices live side by side. Groups that share one do too, as far as MAX_SHARING allows: what a
    group holds there is parked or dropped when room is needed.
    """

    def __init__(self):
        self._clients = {}                                     # devices -> Client, the one not used for longest first
        # (devices, name of a model or VAE) -> a token for each that needs it
        self._holders = {}
        # what needs models or VAEs -> {(devices, name): ends its need}
        self._held = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()                          # of _holders
        self._machines = {}                                    # (devices, dtype) -> the Machine that was measured
        self._calibrations = None                              # what earlier runs taught, once it is read
        self._speeds = {}                                      # devices -> how fast each is, where they are not alike
        self._listener = None                                  # where other machines join, once it is needed
        self._supervisor = Forkserver()
        self._is_watched = False                               # are groups that have nothing to do seen to?
        self.runs = Runs()

    def client(self, devices):
        """The Client for these devices; its workers start when they are first needed."""
        devices = tuple(devices)
        client = self._clients.pop(devices, None)
        if client is None:
            self._end_others(devices)
            if not self._is_watched:
                self._is_watched = True
                watch(self)
            client = Client(devices, self.listener() if machines_of(devices) else None, self._supervisor,
                            self._show_phase, comfy.model_management.throw_exception_if_processing_interrupted)
            client.workers.divide_by(self._speeds.get(devices, ()))
        self._clients[devices] = client
        return client

    def prepare(self, devices):
        """Start loading the libraries of workers on these devices, while other nodes run. Waits for nothing."""
        if sys.platform != "win32":
            self._supervisor.prepare(environment_of(devices))

    def listener(self):
        """Where other machines join. Raises ConfigError where no address is set for that, or it cannot listen there."""
        address = read_address(chosen_address())
        if self._listener is not None and self._listener.wanted != address:
            self._listener.close()
            self._listener = None
        if self._listener is None:
            self._listener = Listener(chosen_address(), os.path.join(_measured_folder(), "machines"))
        return self._listener

    def gpu_of(self, device):
        """(what it is, bytes of memory) of a device. Of another machine's: waits until that has joined."""
        if not machine_of(device):
            return machine_profiles.gpu_of(device)
        gpus = self.listener().gpus(machine_of(device), show_text,
                                      comfy.model_management.throw_exception_if_processing_interrupted)
        if own_name(device) not in gpus:
            raise ConfigError(f"Name one of {', '.join(gpus)} in xDiT Parallel Config: {machine_of(device)} has no "
                              f"device {device}.")
        return gpus[own_name(device)]

    @property
    def clients(self):
        """All clients that have been used and whose groups were not ended for others, the least recently used first."""
        return list(self._clients.values())

    def client_if(self, devices):
        """The Client for these devices if there is one; nothing is started."""
        return self._clients.get(tuple(devices))

    def machine(self, devices, dtype, may_measure):
        """The Machine of several devices: as it was measured before, or measured now where may_measure says so; else
        None.

        dtype: that models compute in.
        """
        key = tuple(devices), dtype
        if key not in self._machines:
            machine = machine_profiles.stored_machine(_measured_folder(), devices, dtype, self.gpu_of)
            if machine is None and not may_measure:
                return None
            if machine is None:
                try:
                    machine = self._measure(devices, dtype)
                except (WorkerFailedError, WorkerDiedError) as error:
                    # the split is chosen without: the picture is the same
                    log.warning("the devices could not be measured: %s", error)
            self._know(devices, dtype, machine)
        return self._machines[key]

    def measure_again(self, dtype):
        """Measure again the devices that were used last, or those of a default ParallelConfig. Returns their names."""
        devices = self.clients[-1].devices if self._clients else devices_of(ParallelConfig())
        if len(devices) < 2:
            raise ConfigError("Set devices in xDiT Parallel Config, and run once: there is nothing to measure, as "
                              f"{devices[0]} works alone.")
        self._know(devices, dtype, self._measure(devices, dtype))
        return devices

    def _measure(self, devices, dtype):
        client = self.client(devices)
        with self.runs.measuring(devices):
            machine = machine_profiles.measure(client, dtype, self.gpu_of)
        machine_profiles.store_machine(_measured_folder(), devices, dtype, machine, self.gpu_of)
        return machine

    def give_back(self, clients=None):
        """Move all weights to host memory, and drop VAEs, on every device of these groups, or of all. The next use
        brings them back."""
        for client in self.clients if clients is None else clients:
            for name in client.models.names:
                client.models.park(name, parking_bytes())
            for name in client.autoencoders.names:
                client.drop(name)
            client.give_back()

    def stop(self):
        """End the workers of every group, and the forkserver. The next use starts others."""
        for client in self.clients:
            client.close()
        self._supervisor.close()

    def end_idle(self, client):
        """End the workers of an idle group, and the forkserver where no other group runs."""
        client.close()
        if not any(other.running for other in self.clients):
            self._supervisor.close()

    def calibrations(self):
        """{(family, card): Calibration} of earlier runs of one device."""
        if self._calibrations is None:
            self._calibrations = machine_profiles.calibrations(_measured_folder())
        return self._calibrations

    def record_run(self, family, gpu, ratio):
        """Record that a run of this family on this card took `ratio` times what the probe's numbers alone forecast."""
        self.calibrations()[family, gpu] = machine_profiles.record_run(_measured_folder(), family, gpu, ratio)

    def _know(self, devices, dtype, machine):
        """From now on the workers divide tokens, heads, images and rows by how fast each device is. machine: None: all
        alike."""
        devices = tuple(devices)
        self._machines[devices, dtype] = machine
        self._speeds[devices] = () if machine is None else speeds_of(machine.devices)
        if devices in self._clients:
            self._clients[devices].workers.divide_by(self._speeds[devices])

    def client_for_decode(self, config):
        """The running group that was used last, or where none runs one for the config's devices."""
        if config.devices == "auto":
            for client in reversed(self._clients.values()):
                if client.running:
                    return client
        return self.client(devices_of(config))

    def load_model(self, client, spec, proxy, missing, changes):
        """Load a model for a shell, which then holds it. missing: {device: bytes that its workers there lack}. changes:
        see Models.load."""
        self.hold(client, spec.name, proxy)
        for device, num_bytes in missing.items():
            self._free_memory(client, device, num_bytes)
        client.models.load(spec, changes)

    def hold(self, client, name, holder):
        """Have the workers drop a model or VAE when nothing refers to any of its holders any more."""
        key, token = (client.devices, name), object()
        with self._lock:
            held = self._held.setdefault(holder, {})
            if key not in held:
                self._holders.setdefault(key, set()).add(token)
                held[key] = weakref.finalize(holder, self._forget_soon, key, token)
                held[key].atexit = False

    def release(self, devices, name, holder):
        """A holder needs a model no more: the workers drop it, unless another holder needs it."""
        with self._lock:
            need = self._held.get(holder, {}).pop((devices, name), None)
        need = need and need.detach()
        if need is not None:
            self._forget(*need[2])

    def close(self):
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        self._supervisor.close()
        if self._listener is not None:
            self._listener.close()

    def _end_others(self, devices):
        for device in set(devices):
            sharing = [other for other in self._clients if device in other]
            for other in sharing[:len(sharing) + 1 - MAX_SHARING]:
                self._clients.pop(other).close()

    def _free_memory(self, client, device, num_bytes):
        """Park what other groups have on a device, as far as this one needs the memory. ComfyUI's own models are
        ComfyUI's to move."""
        others = [other for other in self._clients.values() if other is not client and device in other.devices
                  and other.running]
        if not num_bytes or not others:
            return
        for other in others:
            other.give_back()
        rank = client.devices.index(device)
        lacking = num_bytes + comfy.model_management.minimum_inference_memory() - client.report_memory()[rank][
            "free_bytes"]
        for other in others:
            for name in other.models.names:
                if lacking > 0:
                    lacking -= other.models.park(name, parking_bytes(), device, lacking)

    def counting(self, run, callback):
        """A sampler's callback that also counts the steps of a Run, and shows on the node now and then how long the
        rest will take."""
        def counted(step, denoised, x, total):
            words = self.runs.count(run, step + 1)
            if words:
                show_text(words)
            if callback is not None:
                callback(step, denoised, x, total)
        return counted

    def _show_phase(self, phase):
        show_text(self.runs.describe_phase(phase))

    def _forget_soon(self, *which):
        # Anything may be collected at any moment, also while this thread is sending a command.
        threading.Thread(target=self._forget, args=which, daemon=True).start()

    def _forget(self, key, token):
        """Drop a model if this was the last that needed it."""
        devices, name = key
        with self._lock:
            self._holders[key].discard(token)
            client = self._clients.get(devices)
            if not self._holders[key] and client is not None:
                client.forget(name)


def show_text(text):
    """Write a line on the node that runs."""
    from server import PromptServer
    context = get_executing_context()
    server = getattr(PromptServer, "instance", None)
    if context is not None and server is not None:
        server.send_progress_text(text, context.node_id)


def _measured_folder():
    return os.path.join(folder_paths.get_user_directory(), "xdit")


GROUPS = Groups()
