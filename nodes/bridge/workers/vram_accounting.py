"""VRAM accounting: presents the workers' models to ComfyUI's memory manager, and frees their memory on its request.

ComfyUI knows one device of a model, its load_device. For a model on several GPUs that is ComfyUI's own GPU if a worker
is there, and sizes are those of the workers on it. When ComfyUI needs some of that memory, only those workers offload
weights to system RAM, and only as much as requested; when it unloads the model, all workers do. Like ComfyUI's own
models, an unloaded model stays in system RAM until nothing refers to its MODEL; it is dropped if it does not fit there.
"""

import torch

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension

from ....xdit_backend.protocol.devices import machine_of


class RemotePatcher(comfy.model_patcher.ModelPatcher):
    """ComfyUI's ModelPatcher for a model whose weights are on the workers.

    `model.remote` has: load(model), is_loaded, bytes_on(device) of all weights, loaded_on(device), free(device,
    num_bytes) -> freed bytes, unload(), end_run().
    """

    @property
    def remote(self):
        return self.model.remote

    @property
    def is_ready(self):
        """Whether the workers have this patcher's model entirely on their devices."""
        return self.remote.is_loaded

    def model_size(self):
        return self.remote.bytes_on(self.load_device)

    def loaded_size(self):
        return self.remote.loaded_on(self.load_device)

    def current_loaded_device(self):
        return self.load_device                                # weights that are not there still have to be loaded

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        self.remote.load(self.model)
        self.model.device = device_to
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(comfy.patcher_extension.CallbacksMP.ON_LOAD):
            callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """Load what the workers lack. Nothing is unloaded when memory is short, since the weights are in use."""
        # memory cached by torch in this process is not available to the workers
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
    """Free memory of ComfyUI's own models on a device. A device without any is not touched, so that no CUDA context is
    created."""
    if machine_of(device):                                     # on another machine, without ComfyUI
        return
    management, device = comfy.model_management, torch.device(device)
    if device.type != "cpu" and any(loaded.device == device for loaded in management.current_loaded_models):
        management.free_memory(num_bytes + management.minimum_inference_memory(), device)


def load_device_of(devices):
    """Return the load_device of a MODEL on these devices: ComfyUI's own device if a worker is there, else the first.

    ComfyUI frees memory and samples there, so a sampler generates the same noise as for a model on that device.
    """
    default = comfy.model_management.get_torch_device()
    local_devices = [torch.device(name) for name in devices if not machine_of(name)]
    return default if default in local_devices else local_devices[0]


def _claim_no_pinned_memory(loaded_model):
    """Make ComfyUI's LoadedModel class count no pinned system RAM for the workers' models. It would count their full
    size and unpin other models for it."""
    size = loaded_model.model_memory
    loaded_model.model_memory = lambda self: 0 if isinstance(self.model, RemotePatcher) else size(self)


_claim_no_pinned_memory(comfy.model_management.LoadedModel)
