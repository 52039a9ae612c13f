"""ComfyUI's ModelPatcher of a proxy model: patches of nodes are sent to the worker group or rejected."""

import uuid

import torch

import comfy.utils

from ....xdit_backend.protocol.errors import UnsupportedError
from ..compatibility.block_patches import networks_in
from ..compatibility.model_options import compute_dtype_of, refuse_patcher
from ..workers.vram_accounting import RemotePatcher
from .family_check import refuse_difference
from .state_dict import read_weights
from .weight_patches import PREFIX, changes_of, computed_patches, effective_patches, file_of, patched


class ProxyPatcher(RemotePatcher):
    """RemotePatcher that rejects unsupported changes when it is loaded and when a run begins."""

    def patch_model(self, *args, **kwargs):
        refuse_patcher(self)
        if hasattr(self.model, "diffusion_model"):             # not part of a VAE
            self.remote.expect(changes_of(self))
            self.remote.compute_in(compute_dtype_of(self), self.model)
        return super().patch_model(*args, **kwargs)

    def pre_run(self):
        super().pre_run()
        refuse_patcher(self, runs=True)                        # again, after ComfyUI's callbacks
        if hasattr(self.model, "diffusion_model"):
            self.remote.use_sampling(self.get_model_object("model_sampling"))
            refuse_difference(self.remote.family, self.remote.comparison.result(),
                              bool(self.patches or self.injections or self.hook_patches))

    def load(self, *args, **kwargs):
        self.remote.use_changes(changes_of(self), self.patches_uuid)
        super().load(*args, **kwargs)

    def partially_load(self, *args, **kwargs):
        self.remote.free_memory_elsewhere()
        return super().partially_load(*args, **kwargs)

    # Injections are not run, since these modules compute nothing. LoRA in bypass mode: see lora_bypass.py; all others
    # are rejected.

    def inject_model(self):
        pass

    def eject_model(self):
        pass

    def set_injections(self, key, injections):
        super().set_injections(key, injections)
        self.patches_uuid = uuid.uuid4()                       # the workers' weights change

    def remove_injections(self, key):
        super().remove_injections(key)
        self.patches_uuid = uuid.uuid4()

    def model_patches_models(self):
        """ComfyUI's models of the nodes' networks to load, except those that the workers run."""
        theirs = [id(model) for functions in networks_in(self.model_options["transformer_options"]).values()
                  for function in functions if hasattr(function, "models") for model in function.models()]
        return [model for model in super().model_patches_models() if id(model) not in theirs]

    @property
    def is_ready(self):
        return super().is_ready and self.remote.changes_uuid == self.patches_uuid

    # --- weights: from the file, with the patches of ComfyUI's nodes ---

    def model_state_dict(self, filter_prefix=None):
        """As ComfyUI's. Weights without patches are the file's own tensors; the others, which ComfyUI patches in place,
        raise an error when their data is read."""
        patched = {name: tensor for name, tensor in self.model.state_dict().items() if name in self.patches}
        return {name: patched.get(name, tensor) for name, tensor in self._file_state(filter_prefix).items()}

    def _file_state(self, filter_prefix=None):
        """{name: tensor} of the BaseModel, with the diffusion model's weights from the file."""
        if self.remote.spec.quantisation:
            raise UnsupportedError("Set weight_dtype to default for nodes that write or mix a MODEL's own weights "
                                   "(ModelSave, CheckpointSave, LoraSave, ModelMerge nodes that take it as their "
                                   "second model): this one was quantised as it was loaded (weight_dtype "
                                   f"{self.remote.spec.quantisation}). As the first model of a ModelMerge node, and "
                                   "with LoRA, it works.")
        weights = read_weights(self.remote.checkpoint, self.model)
        state = self.model.state_dict() | {f"diffusion_model.{name}": tensor for name, tensor in weights.items()}
        return {name: tensor for name, tensor in state.items() if filter_prefix is None
                or name.startswith(filter_prefix)}

    def model_state_dict_for_saving(self, model=None, prefix=""):
        state, patches = self._file_state(prefix), effective_patches(self)
        lost = [name for name, tensor in state.items() if tensor.is_meta]
        if lost:
            raise UnsupportedError(f"Use Load Diffusion Model: {lost[0]} is not in the file of this MODEL, so a node "
                                   "cannot save it.")
        dtypes = {name: tensor.dtype for name, tensor in self.model.state_dict().items()}
        return {name.removeprefix(prefix): self._patched(name, tensor, patches).to(dtypes[name])
                for name, tensor in state.items()}

    def get_key_patches(self, filter_prefix=None):
        dtypes = {name: tensor.dtype for name, tensor in self.model.state_dict().items()}
        return {name: [(tensor.to(dtypes[name]), lambda weight, **_: weight), *self.patches.get(name, ())]
                for name, tensor in self._file_state(filter_prefix).items()}

    def patch_weight_to_device(self, key, device_to=None, inplace_update=False, return_weight=False, force_cast=False):
        return self._patched(key, self._file_state()[key], self.patches).to(device_to or "cpu")

    def weight(self, name):
        """Return one weight of the diffusion model, for WorkerParameter.read; dequantised if the file is quantised."""
        checkpoint, found, weight_of = file_of(self)
        quantised = {name} if any(source in checkpoint.quantised for source, _ in found[name]) else ()
        weight = self.patched_weights({name: weight_of(name)}, quantised)[name]
        hooked = self.current_hooks and self.get_combined_hook_patches(self.current_hooks).get(PREFIX + name)
        if not hooked:
            return weight
        return patched(PREFIX + name, hooked, weight, weight.dtype, self.load_device, torch.float32)

    def patched_weights(self, weights, quantised):
        """Return weights of the diffusion model with the patches of nodes, in their storage dtypes.

        weights: {name: tensor of the file}. quantised: names of quantised ones, which are in the compute dtype; so are
        other tensors of linear layers if ComfyUI's are quantised (comfy.ops.mixed_precision_ops).
        """
        patches, computed = computed_patches(self), getattr(torch, self.remote.spec.compute_dtype)
        module, is_mixed = self.model.diffusion_model, bool(self.remote.checkpoint.layers)

        def dtype_of(name):
            is_linear = is_mixed and isinstance(comfy.utils.get_attr(module, name.rpartition(".")[0]), torch.nn.Linear)
            return computed if is_linear or name in quantised else None
        return {name: self._patched(PREFIX + name, weight, patches, dtype_of(name))
                for name, weight in weights.items()}

    def _patched(self, key, weight, patches, dtype=None):
        dtype = dtype or comfy.utils.get_attr(self.model, key).dtype
        return patched(key, patches[key], weight, dtype, self.load_device) if key in patches else weight.to(dtype)

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        self._check_fits(patches)
        return super().add_patches(patches, strength_patch, strength_model)

    def _check_fits(self, patches):
        if not patches:
            raise UnsupportedError(f"Use a LoRA that was made for {self.remote.family.name}: no tensor of this one "
                                   "matches. ComfyUI's log lists its tensors.")

    # --- hooks: LoRA for a prompt or a range of steps; ComfyUI sets the active ones before each call ---

    def add_hook_patches(self, hook, patches, strength_patch=1.0, strength_model=1.0):
        self._check_fits(patches)
        if any(isinstance(what, tuple) and what[0] == "model_as_lora" for what in patches.values()):
            raise UnsupportedError("Remove Create Hook Model as LoRA, or use Load Diffusion Model: xDiT does not "
                                   "support it and would silently ignore it.")
        return super().add_hook_patches(hook, patches, strength_patch, strength_model)

    def patch_hooks(self, hooks):
        if hooks != self.current_hooks:
            early = tuple(PREFIX + name for name in self.remote.family.detection.text_prefixes)
            self.remote.use_changes(changes_of(self, {key: patches for key, patches
                                                      in self.get_combined_hook_patches(hooks).items()
                                                      if not key.startswith(early)}))
            self.current_hooks = hooks

    def unpatch_hooks(self, whitelist_keys_set=None):
        self.patch_hooks(None)

    def clone(self, disable_dynamic=False, model_override=None, force_deepcopy=False):
        if force_deepcopy:
            raise UnsupportedError("Use Load Diffusion Model for the node that needs a second copy of this MODEL's "
                                   "weights: xDiT's workers have one.")
        return super().clone(model_override=model_override)

    def deepclone_multigpu(self, new_load_device=None, models_cache=None):
        raise UnsupportedError("Set devices in xDiT Parallel Config, which runs this MODEL on several GPUs itself, "
                               f"and remove the node that requests a copy on {new_load_device}.")
