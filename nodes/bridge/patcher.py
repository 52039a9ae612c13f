"""ComfyUI's ModelPatcher of a shell: what its memory manager and its patching nodes ask goes to the worker group, or is refused."""

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension

from ...xdit_backend.protocol.errors import UnsupportedError
from .carried import refuse_patcher
from .file_weights import read_weights


class ShellPatcher(comfy.model_patcher.ModelPatcher):
    """ComfyUI's ModelPatcher, whose weights are the workers': loading and unloading go to the worker group.

    What it carries that they would not honour is refused when it is loaded and when a run begins.
    """

    @property
    def remote(self):
        return self.model.remote

    def patch_model(self, *args, **kwargs):
        refuse_patcher(self)
        return super().patch_model(*args, **kwargs)

    def pre_run(self):
        super().pre_run()
        refuse_patcher(self)                                   # ComfyUI's callbacks have been called by now

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False):
        self.remote.load(self.model)
        self.model.device = device_to
        self.model.model_loaded_weight_memory = self.model_size()
        self.model.current_weight_patches_uuid = self.patches_uuid
        for callback in self.get_all_callbacks(comfy.patcher_extension.CallbacksMP.ON_LOAD):
            callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def partially_load(self, device_to, extra_memory=0, force_patch_weights=False):
        """Have the workers hold what they lack. However little memory is free, nothing is unloaded: the weights are in use."""
        comfy.model_management.soft_empty_cache()              # what torch keeps in this process is of no use to the workers
        return super().partially_load(device_to, max(extra_memory, 0))

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

    # --- weights: read from the file, changed by nobody ---

    def model_state_dict(self, filter_prefix=None):
        """As ComfyUI's, with the file's own tensors."""
        weights = read_weights(self.remote.spec.path, self.model)
        state = self.model.state_dict() | {f"diffusion_model.{name}": tensor for name, tensor in weights.items()}
        return {name: tensor for name, tensor in state.items() if filter_prefix is None or name.startswith(filter_prefix)}

    def model_state_dict_for_saving(self, model=None, prefix=""):
        state = self.model_state_dict(prefix)
        return {name.removeprefix(prefix): tensor for name, tensor in state.items()}

    def get_key_patches(self, filter_prefix=None):
        return {name: [(tensor, lambda weight, **_: weight)] for name, tensor in self.model_state_dict(filter_prefix).items()}

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, force_cast=False):
        return self.model_state_dict()[key].to(device_to or "cpu")

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        raise UnsupportedError("xDiT does not support LoRA, merges or other weight patches on its MODEL yet. They would be dropped "
                               "without notice. Remove the node that adds them, or use Load Diffusion Model.")

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0):
        self.add_patches(patches)

    def clone(self, disable_dynamic=False, model_override=None, force_deepcopy=False):
        if force_deepcopy:
            raise UnsupportedError("A node asks for a second copy of this MODEL's weights, and xDiT's workers hold one. Use Load "
                                   "Diffusion Model for it.")
        return super().clone(model_override=model_override)

    def deepclone_multigpu(self, new_load_device=None, models_cache=None):
        raise UnsupportedError(f"A node asks for this MODEL on {new_load_device}. Its devices are those of xDiT Parallel Config, which "
                               f"runs it on several GPUs itself: set them there and remove the node.")
