"""Worker groups: one for each set of devices in use, shared by all nodes for the lifetime of ComfyUI's process."""

import importlib.util
import logging
import os
import sys
import threading
import weakref
from pathlib import Path

import comfy.model_management
import folder_paths
from comfy_execution.utils import get_executing_context

from ....xdit_backend.config import ParallelConfig, fitting, validate
from ....xdit_backend.host import machine_profiles
from ....xdit_backend.host.client import Client
from ....xdit_backend.host.compile_times import CompileTimes
from ....xdit_backend.host.local_supervisor import local_supervisor
from ....xdit_backend.host.measured_runs import MeasuredRuns
from ....xdit_backend.host.preflight import num_cuda_devices
from ....xdit_backend.host.report_process import ReportProcess
from ....xdit_backend.host.torchrun import environment_of
from ....xdit_backend.memory.system_memory import available_memory
from ....xdit_backend.multi_node.listener import Listener, own_addresses, read_address
from ....xdit_backend.planner.layout_search import speeds_of
from ....xdit_backend.protocol.devices import machine_of, machines_of, missing_devices, own_name, resolve_devices
from ....xdit_backend.protocol.errors import ConfigError, WorkerDiedError, WorkerFailedError
from .idle_timeout import watch
from .progress import Runs
from .settings import chosen_address

log = logging.getLogger(__name__)

WORKER_PACKAGES = ("diffusers", "accelerate", "safetensors", "greenlet", "pydantic")
REQUIREMENTS = Path(__file__).parents[3] / "requirements.txt"
RESERVED_BYTES = 2 ** 31                   # of system RAM, not used for parked weights
# groups that may have a worker on the same device; one more ends the least recently used group
MAX_SHARING = 2


def warn_of_missing_packages():
    """Log a warning, once ComfyUI has loaded the pack, with the command that installs what is missing."""
    missing = _missing((*WORKER_PACKAGES, "gguf"))
    if missing:
        log.warning("xDiT: %s %s missing in ComfyUI's Python. Install with: \"%s\" -m pip install -r \"%s\"",
                    ", ".join(missing), "is" if len(missing) == 1 else "are", sys.executable, REQUIREMENTS)


def _missing(packages):
    return [name for name in packages if importlib.util.find_spec(name) is None]


def check_packages():
    """Raise ConfigError if a package that the workers need is missing."""
    missing = _missing(WORKER_PACKAGES)
    if missing:
        raise ConfigError(f"Install {', '.join(missing)}, which this Python does not have: python -m pip install -r "
                          "requirements.txt (in the folder of the xDiT nodes, with ComfyUI's Python), and restart "
                          "ComfyUI.")


def devices_of(config):
    """Return the names of the devices that a config selects. Raises ConfigError if it cannot run on them."""
    devices = resolve_devices(config.devices, num_cuda_devices(), config.mode)
    if machines_of(devices) and not chosen_address():
        raise ConfigError(f'Leave out {", ".join(machines_of(devices))}, or set the address of this machine in '
                          f'Settings > xDiT > Other machines to one of {", ".join(own_addresses())} after reading '
                          f'docs/guide/several-machines.md: devices="{config.devices}" names other machines, and '
                          "ComfyUI does not listen for any.")
    validate(config, len(devices))
    return devices


def describe_missing(config):
    """Text for the user on devices that a config names and this machine lacks; "" if there are none."""
    missing = missing_devices(config.devices, num_cuda_devices())
    return f"this machine lacks {', '.join(missing)}" if missing else ""


def fitting_here(config):
    """Return the closest ParallelConfig that can run on this machine."""
    return fitting(config, num_cuda_devices())


def memory_of(device):
    """Return a device's total memory in bytes. Creates no CUDA context, which would take up to half a gigabyte.

    For a device of another machine, waits until that machine has joined. Raises WorkerStartError if it does not join,
    ConfigError if it does not have the device.
    """
    if machine_of(device):
        return GROUPS.gpu_of(device)[1]
    if own_name(device) != "cpu":
        return machine_profiles.memory_of(device)
    return available_memory()[1]


def parking_bytes():
    """Return the bytes of system RAM available for parked weights: free memory (within a container's limit) less a
    reserve, as ComfyUI keeps one too."""
    return available_memory()[0] - RESERVED_BYTES


class Groups:
    """Worker groups and the models loaded on them.

    Groups on disjoint devices coexist, and up to MAX_SHARING groups may share a device: their weights are parked and
    their VAEs dropped when another group needs the memory.
    """

    def __init__(self):
        self._clients = {}                                     # devices -> Client, least recently used first
        # (devices, name of a model or VAE) -> a token for each object that needs it
        self._holders = {}
        # object that needs models or VAEs -> {(devices, name): its finalizer}
        self._finalizers = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()                          # of _holders
        self._machines = {}                                    # (devices, dtype) -> measured Machine
        self._calibrations = None                              # from earlier runs; None until the file is read
        self._speeds = {}                                      # devices -> relative speeds, if heterogeneous
        self._listener = None                                  # for other machines; None until it is needed
        self._supervisor = local_supervisor()
        self._is_watched = False                               # whether the idle-timeout thread runs
        self.runs, self.measured = Runs(), MeasuredRuns(_measured_folder)
        self.compile_times = CompileTimes(_measured_folder)
        self.report = ReportProcess(lambda: os.path.join(_measured_folder(), "reports"))

    def client(self, devices):
        """Return the Client for these devices. Its workers start on first use. A report that uses the devices ends."""
        devices = tuple(devices)
        if self.report.is_running:
            show_text("ending the check of the devices, which uses their memory")
            self.report.end("prompt")
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
        """Start loading the workers' libraries in the background, while other nodes run. Does not block."""
        self._supervisor.prepare(environment_of(devices))

    def listener(self):
        """Return the Listener for other machines. Raises ConfigError if no address is set or it cannot listen there."""
        address = read_address(chosen_address())
        if self._listener is not None and self._listener.wanted != address:
            self._listener.close()
            self._listener = None
        if self._listener is None:
            self._listener = Listener(chosen_address(), os.path.join(_measured_folder(), "machines"))
        return self._listener

    def gpu_of(self, device):
        """Return (GPU name, total bytes) of a device. For another machine's device, waits until that has joined."""
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
        """All used clients whose groups were not ended in favour of others, least recently used first."""
        return list(self._clients.values())

    def client_if(self, devices):
        """Return the Client for these devices, or None. Starts nothing."""
        return self._clients.get(tuple(devices))

    def machine(self, devices, dtype, may_measure):
        """Return the measured Machine for these devices, or None. If may_measure, measures devices without a stored
        measurement.

        dtype: compute dtype.
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
                    # the layout is then chosen without measurements, which does not change the image
                    log.warning("the devices could not be measured: %s", error)
            self._know(devices, dtype, machine)
        return self._machines[key]

    def measure_again(self, dtype):
        """Measure the most recently used devices again, or those of a default ParallelConfig. Returns their names."""
        devices = self.clients[-1].devices if self._clients else devices_of(ParallelConfig())
        if len(devices) < 2 and own_name(devices[0]) == "cpu":                        # a GPU has several operators
            raise ConfigError("Set several devices in xDiT Parallel Config and run once: there is nothing to measure, "
                              f"as only {devices[0]} is used.")
        self._know(devices, dtype, self._measure(devices, dtype))
        return devices

    def _measure(self, devices, dtype):
        client = self.client(devices)
        with self.runs.measuring(devices):
            machine = machine_profiles.measure(client, dtype, self.gpu_of)
        machine_profiles.store_machine(_measured_folder(), devices, dtype, machine, self.gpu_of)
        return machine

    def give_back(self, clients=None):
        """Offload all weights to system RAM, and drop VAEs and upscale models, on every device of these groups, or of
        all. The next use loads them again."""
        for client in self.clients if clients is None else clients:
            for name in client.models.names:
                client.models.park(name, parking_bytes())
            for name in (*client.autoencoders.names, *client.upscalers.names):
                client.drop(name)
            client.give_back()

    def stop(self):
        """End the workers of every group, and the forkserver. The next use starts new ones."""
        for client in self.clients:
            client.close()
        self._supervisor.close()

    def end_idle(self, client):
        """End the workers of an idle group, and the forkserver if no other group runs."""
        client.close()
        if not any(other.running for other in self.clients):
            self._supervisor.close()

    def calibrations(self):
        """{(family, GPU): Calibration} from earlier runs on one device."""
        if self._calibrations is None:
            self._calibrations = machine_profiles.calibrations(_measured_folder())
        return self._calibrations

    def record_run(self, family, gpu, ratio):
        """Record that a run of this family on this GPU took `ratio` times the uncalibrated estimate."""
        self.calibrations()[family, gpu] = machine_profiles.record_run(_measured_folder(), family, gpu, ratio)

    def _know(self, devices, dtype, machine):
        """Split tokens, heads, images and rows by the measured speed of each device from now on. machine: None for an
        even split."""
        devices = tuple(devices)
        self._machines[devices, dtype] = machine
        self._speeds[devices] = () if machine is None else speeds_of(machine.devices)
        if devices in self._clients:
            self._clients[devices].workers.divide_by(self._speeds[devices])

    def client_for_decode(self, config):
        """Return the most recently used running group, or, if none runs, the client for the config's devices."""
        if config.devices == "auto":
            for client in reversed(self._clients.values()):
                if client.running:
                    return client
        return self.client(devices_of(config))

    def load_model(self, client, spec, proxy, missing, changes):
        """Load a model for a proxy model, which then holds it. missing: {device: bytes that its workers there lack}.
        changes: see Models.load."""
        self.hold(client, spec.name, proxy)
        for device, num_bytes in missing.items():
            self._free_memory(client, device, num_bytes)
        client.models.load(spec, changes)

    def hold(self, client, name, holder):
        """Register a holder of a model or VAE. The workers drop it once all its holders are garbage-collected."""
        key, token = (client.devices, name), object()
        with self._lock:
            finalizers = self._finalizers.setdefault(holder, {})
            if key not in finalizers:
                self._holders.setdefault(key, set()).add(token)
                finalizers[key] = weakref.finalize(holder, self._forget_soon, key, token)
                finalizers[key].atexit = False

    def release(self, devices, name, holder):
        """Unregister a holder of a model. The workers drop the model if it was the last one."""
        with self._lock:
            finalizer = self._finalizers.get(holder, {}).pop((devices, name), None)
        finalizer = finalizer and finalizer.detach()
        if finalizer is not None:
            self._forget(*finalizer[2])

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
        """Park weights of other groups on a device until num_bytes fit. ComfyUI manages its own models itself."""
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
        """Wrap a sampler's callback so that it also counts the steps of a Run and shows progress on the node."""
        def counted(step, denoised, x, total):
            text = self.runs.count(run, step + 1)
            if text:
                show_text(text)
            if callback is not None:
                callback(step, denoised, x, total)
        return counted

    def _show_phase(self, phase):
        text = self.runs.describe_phase(phase)
        if text:
            show_text(text)

    def _forget_soon(self, *arguments):
        # garbage collection may run at any moment, even while this thread is sending a command
        threading.Thread(target=self._forget, args=arguments, daemon=True).start()

    def _forget(self, key, token):
        """Drop a model if this was its last holder."""
        devices, name = key
        with self._lock:
            self._holders[key].discard(token)
            client = self._clients.get(devices)
            if not self._holders[key] and client is not None:
                client.forget(name)


def show_text(text):
    """Show a line of text on the node that is executing."""
    from server import PromptServer
    context = get_executing_context()
    server = getattr(PromptServer, "instance", None)
    if context is not None and server is not None:
        server.send_progress_text(text, context.node_id)


def _measured_folder():
    return os.path.join(folder_paths.get_user_directory(), "xdit")


GROUPS = Groups()
