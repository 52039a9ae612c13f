"""How ComfyUI's memory manager sees models that the workers hold, and what the workers do when it asks for memory.

ComfyUI knows one device of a model, its load_device: for one on several GPUs, its own GPU where a worker is there.
Sizes are those of the workers there. When ComfyUI needs some of that memory, only those workers move weights to host
memory, and only as much as it asks for; when it unloads the model, all do. Like a model of ComfyUI's own, an unloaded
one stays in host memory until nothing refers to its MODEL. It is dropped where host memory has no room for it.
"""

import torch

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension

from ....xdit_backend.protocol.devices import machine_of


class RemotePatcher(comfy.model_patcher.ModelPatcher):
    """ComfyUI's ModelPatcher of a model whose weights are the workers'.

    `model.remote` is asked: load(model), is_loaded, bytes_on(device) of weights in all, loaded_on(device), free(device,
    num_bytes) -> bytes freed, unload(), end_run().
    """

    @property
    def remote(self):
        return self.model.remote

    @property
    def is_ready(self):
        """Do the workers hold the model as this patcher has it, all of it on their devices?"""
        return self.remote.is_loaded

    def model_size(self):
        return self.remote.bytes_on(self.load_device)

    def loaded_size(self):
        return self.remote.loaded_on(self.load_device)

    def current_loaded_device(self):
        return self.load_device                                # what is not there now is what has to come there

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        self.remote.load(self.model)
        self.model.device = device_to
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(comfy.patcher_extension.CallbacksMP.ON_LOAD):
            callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """Have the workers hold what they lack. However little memory is free, nothing is unloaded:
        the weights are in use."""
        # what torch keeps in this process is of no use to the workers
        comfy.model_management.soft_empty_cache()
        with self.use_ejected(skip_and_inject_on_exit_only=True):
            before = self.loaded_size()
            self.unpatch_model(self.offload_device, unpatch_weights=False)
            self.patch_model(load_weights=False)
            if not self.is_ready:
                try:
                    self.load(device_to, full_load=True)
                except Exception:
                    self.detach()
                    raise
            return self.loaded_size() - before

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
        return self.remote.free(self.load_device, memory_to_free)

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        if unpatch_weights:
            self.remote.unload()
        super().unpatch_model(device_to, unpatch_weights)

    def cleanup(self):
        super().cleanup()
        self.remote.end_run()


def ask_for_memory(device, num_bytes):
    """Have ComfyUI's own models free memory on a device. Where there are none, the device is not touched, so no CUDA
    context is made."""
    if machine_of(device):                                     # where no ComfyUI is
        return
    management, device = comfy.model_management, torch.device(device)
    if device.type != "cpu" and any(loaded.device == device for loaded in management.current_loaded_models):
        management.free_memory(num_bytes + management.minimum_inference_memory(), device)


def load_device_of(devices):
    """The device that ComfyUI sees a MODEL on these devices as being on: its own, where one of the workers is there,
    else the first.

    ComfyUI frees memory there, and samples there, so that a sampler draws the same noise as for a model on that device.
    """
    default = comfy.model_management.get_torch_device()
    places = [torch.device(name) for name in devices if not machine_of(name)]
    return default if default in places else places[0]


def _claim_no_pinned_memory(loaded_model):
    """Make ComfyUI's LoadedModel (a class) count no page-locked host memory for a model of the workers. ComfyUI would
    count the model's whole size, and have other models release theirs for it."""
    size = loaded_model.model_memory
    loaded_model.model_memory = lambda self: 0 if isinstance(self.model, RemotePatcher) else size(self)


_claim_no_pinned_memory(comfy.model_management.LoadedModel)
