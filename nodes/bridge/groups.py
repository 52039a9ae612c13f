"""Which worker group runs: at most one at a time, shared by all nodes, living as long as ComfyUI."""

import importlib.util
import weakref

import torch

import comfy.model_management
from comfy_execution.utils import get_executing_context

from ...xdit_backend.config import resolve_devices, validate
from ...xdit_backend.host.client import Client
from ...xdit_backend.protocol.errors import ConfigError

WORKER_PACKAGES = ("diffusers", "accelerate", "safetensors", "greenlet", "pydantic")


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
    """Bytes of memory a device has in all."""
    return comfy.model_management.get_total_memory(torch.device(device))


class Groups:
    """The running worker group and the models in use on it."""

    def __init__(self):
        self._client = None
        self._models = weakref.WeakValueDictionary()           # name of a loaded model -> its shell

    def client(self, devices):
        """The Client for these devices. A group on other devices is ended first: it would hold their memory."""
        if self._client is None or self._client.devices != tuple(devices):
            self.close()
            self._client = Client(devices)
            self._client.on_phase = _show_phase
            self._client.check = comfy.model_management.throw_exception_if_processing_interrupted
        return self._client

    def client_if(self, devices):
        """The Client for these devices if there is one; nothing is started."""
        return self._client if self._client is not None and self._client.devices == tuple(devices) else None

    def client_for_decode(self, config):
        """The running group, or where none runs one for the config's devices."""
        if self._client is not None and self._client.running and config.devices == "auto":
            return self._client
        return self.client(devices_of(config))

    def load_model(self, client, spec, shell):
        """Load a model, and drop those whose shell nothing refers to any more."""
        for name in client.model_names:
            if name != spec.name and name not in self._models:
                client.drop(name)
        self._models[spec.name] = shell
        client.load_model(spec)

    def close(self):
        if self._client is not None:
            self._client.close()
        self._client = None


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
