"""A module of ComfyUI's on the workers, as ComfyUI's memory manager sees it. The weights stay in ComfyUI's object, and
are sent when the workers lack them."""

import uuid
import weakref

import torch

import comfy.model_management

from .vram_accounting import RemotePatcher, load_device_of
from .worker_groups import GROUPS


class RemoteModule:
    """A module on the workers of a group. Implements what RemotePatcher calls; subclasses add load()."""

    def __init__(self, kind, module, client, dtype):
        """kind: prefix of its name. dtype: of the weights on the workers."""
        self.name, self.client = f"{kind}-{uuid.uuid4().hex[:8]}", client
        self._module = weakref.ref(module)
        meta = MetaTensors(self, dtype)
        self._num_bytes = sum(tensor.nbytes for tensor in meta.buffers())
        self.patcher = RemotePatcher(meta, load_device_of(client.devices), comfy.model_management.unet_offload_device())

    def weights(self):
        """Return the tensors, {name: tensor}, on the device of ComfyUI's object."""
        return self._module().state_dict()

    def hold(self):
        """Have the workers keep the module while ComfyUI's object exists."""
        GROUPS.hold(self.client, self.name, self._module())

    # --- called by vram_accounting.py ---

    @property
    def is_loaded(self):
        return self.client.holds(self.name)

    def bytes_on(self, device):
        return self._num_bytes * self.client.devices.count(str(device))

    def loaded_on(self, device):
        return self.bytes_on(device) if self.is_loaded else 0

    def free(self, device, num_bytes):
        freed = self.loaded_on(device)
        self.unload()                                          # ComfyUI's object has the weights in system RAM
        return freed

    def unload(self):
        self.client.drop(self.name)

    def end_run(self):
        pass


class MetaTensors(torch.nn.Module):
    """Tensors without data that show the memory manager a module's size."""

    def __init__(self, remote, dtype):
        super().__init__()
        # weak, so that the remote module and ComfyUI's entry for it end with ComfyUI's object
        self.remote = weakref.proxy(remote)
        for index, tensor in enumerate(remote.weights().values()):
            self.register_buffer(f"tensor{index}", torch.empty(tensor.shape, dtype=dtype, device="meta"))

    def _apply(self, function, recurse=True):
        return self                                            # .to(device) of meta tensors would raise an error
