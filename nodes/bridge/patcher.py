"""ComfyUI's ModelPatcher of a shell: what its memory manager and its patching nodes ask goes to the worker group, or is refused."""

import comfy.model_patcher
import comfy.patcher_extension

from ...xdit_backend.protocol.errors import UnsupportedError


class ShellPatcher(comfy.model_patcher.ModelPatcher):
    """ComfyUI's ModelPatcher, whose weights are the workers': loading and unloading go to the worker group."""

    @property
    def remote(self):
        return self.model.remote

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        self.remote.load(self.model)
        self.model.device = device_to
        self.model.model_loaded_weight_memory = self.model_size()
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(comfy.patcher_extension.CallbacksMP.ON_LOAD):
            callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def partially_unload(self, device_to, memory_to_free=0, force_patch_weights=False):
        freed = self.model.model_loaded_weight_memory
        self.unpatch_model(device_to, unpatch_weights=True)
        return freed

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        if unpatch_weights and self.model.model_loaded_weight_memory:
            self.remote.unload()
        super().unpatch_model(device_to, unpatch_weights)

    def cleanup(self):
        super().cleanup()
        self.remote.end_run()

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        raise UnsupportedError("xDiT does not support LoRA or other weight patches on its MODEL yet. They would be dropped without "
                               "notice. Remove the LoRA node, or use Load Diffusion Model.")

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0):
        self.add_patches(patches)
