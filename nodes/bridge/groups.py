"""Which worker groups run: one for each set of devices that is in use, shared by all nodes, living as long as ComfyUI."""

import importlib.util
import threading
import weakref

import torch

import comfy.model_management
from comfy_execution.utils import get_executing_context

from ...xdit_backend.config import resolve_devices, validate
from ...xdit_backend.host.client import Client
from ...xdit_backend.protocol.errors import ConfigError

WORKER_PACKAGES = ("diffusers", "accelerate", "safetensors", "greenlet", "pydantic")
MAX_SHARING = 2                # groups with a worker on the same device; a third ends the one that was not used for longest


def check_packages():
    """Refuse to go on when a package that the workers need is missing."""
    missing = [name for name in WORKER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"xDiT needs {', '.join(missing)}, which this Python does not have. Install with: "
                          f"python -m pip install -r requirements.txt (in the folder of the xDiT nodes, with ComfyUI's Python), "
                          f"and restart ComfyUI.")


def devices_of(config):
    """The devices a config means on this machine. Raises ConfigError when it cannot work here."""
    devices = resolve_devices(config.devices, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    validate(config, len(devices))
    return devices


def memory_of(device):
    """Bytes of memory a device has in all. Makes no CUDA context there, which would take up to half a gigabyte of it."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return comfy.model_management.get_total_memory(device)


def load_device_of(devices):
    """The device that ComfyUI is to think of a MODEL on these as being on: its own, where one of the workers is there, else the first.

    It asks for room there, and samples there: noise that a sampler draws is what ComfyUI draws for a model on that device.
    """
    default = comfy.model_management.get_torch_device()
    places = [torch.device(name) for name in devices]
    return default if default in places else places[0]


class Groups:
    """The worker groups and the models in use on them.

    Groups on different devices live side by side. Groups that share one do too, as far as MAX_SHARING allows: what a group
    holds there is parked or dropped when room is needed.
    """

    def __init__(self):
        self._clients = {}                                     # devices -> Client, the one not used for longest first
        self._shells = {}                                      # (devices, name of a model) -> ids of the shells that need it
        self._lock = threading.Lock()                          # of _shells

    def client(self, devices):
        """The Client for these devices; its workers start when they are first needed."""
        devices = tuple(devices)
        client = self._clients.pop(devices, None)
        if client is None:
            self._end_others(devices)
            client = Client(devices)
            client.on_phase = _show_phase
            client.check = comfy.model_management.throw_exception_if_processing_interrupted
        self._clients[devices] = client
        return client

    def client_if(self, devices):
        """The Client for these devices if there is one; nothing is started."""
        return self._clients.get(tuple(devices))

    def client_for_decode(self, config):
        """The running group that was used last, or where none runs one for the config's devices."""
        if config.devices == "auto":
            for client in reversed(self._clients.values()):
                if client.running:
                    return client
        return self.client(devices_of(config))

    def load_model(self, client, spec, shell):
        """Load a model for a shell. It is dropped when nothing refers to the shell any more."""
        with self._lock:
            shells = self._shells.setdefault((client.devices, spec.name), set())
            if id(shell) not in shells:
                shells.add(id(shell))
                weakref.finalize(shell, self._forget_soon, client.devices, spec.name, id(shell)).atexit = False
        client.load_model(spec)

    def close(self):
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _end_others(self, devices):
        for device in set(devices):
            sharing = [other for other in self._clients if device in other]
            for other in sharing[:len(sharing) + 1 - MAX_SHARING]:
                self._clients.pop(other).close()

    def _forget_soon(self, *which):
        # A shell may be collected at any moment, also while this thread is sending a command.
        threading.Thread(target=self._forget, args=which, daemon=True).start()

    def _forget(self, devices, name, shell_id):
        """Drop a model if this was the last shell that needed it."""
        with self._lock:
            shells = self._shells[devices, name]
            shells.discard(shell_id)
            client = self._clients.get(devices)
            if not shells and client is not None:
                client.forget(name)


def show_text(text):
    """Write a line on the node that runs."""
    from server import PromptServer
    context = get_executing_context()
    server = getattr(PromptServer, "instance", None)
    if context is not None and server is not None:
        server.send_progress_text(text, context.node_id)


def _show_phase(phase):
    show_text(f"{phase.text} {phase.done} of {phase.total}" if phase.total else phase.text)


GROUPS = Groups()
