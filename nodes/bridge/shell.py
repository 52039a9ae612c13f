"""The shell MODEL: ComfyUI's own BaseModel on the meta device, whose diffusion model asks the workers.

Sigmas, samplers, masks, regional prompts, previews and cancel stay ComfyUI's own. Made by Load xDiT Model.
"""

import functools
import os

import torch

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.utils

from ...xdit_backend.checkpoints.header import model_spec, read_header, recognise
from ...xdit_backend.config import validate_layout, validate_stages
from ...xdit_backend.host.client import Call
from ...xdit_backend.planner import choose_layout, choose_stages, describe_layout
from ...xdit_backend.protocol.errors import CheckpointError, UnsupportedError
from ...xdit_backend.protocol.segments import dtype_name
from .groups import GROUPS, check_packages, devices_of, memory_of, show_text
from .pipeline import PipelineRun, why_whole

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
                      "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
                      "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
WEIGHT_DTYPES = {"default": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
                 "fp8_e4m3fn": torch.float8_e4m3fn}

# what a workflow can put in transformer_options that changes a model's inside, and how a person knows it
MODEL_PATCHES = {"patches": "model patches", "patches_replace": "model patches (such as PAG, SLG or IP-Adapter)",
                 "rope_options": "a changed rotary scale", "optimized_attention_override": "an attention override"}


def load_shell(path, weight_dtype, config):
    """Return a ModelPatcher for a file or diffusers folder, run by the devices of `config`. Reads headers only.

    Raises CheckpointError for files that are no supported model, ConfigError for degrees that cannot work.
    """
    check_packages()
    devices = devices_of(config)
    header = read_header(path)
    family = recognise(header)
    transformer_config = header.config or family.config(header.shapes)
    if config.mode == "manual":
        validate_layout(config.layout, family.num_heads(transformer_config), family.name)
        validate_stages(config, family.num_blocks(transformer_config), family.name)

    tensors = {name: torch.empty(shape, dtype=SAFETENSORS_DTYPES[header.dtypes[name]], device="meta")
               for name, shape in header.shapes.items()}
    if header.config is not None:                              # a diffusers folder: to the names that ComfyUI knows
        tensors = comfy.model_detection.convert_diffusers_mmdit(tensors, "") or tensors
    model_config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=header.metadata)
    if model_config is None:
        raise CheckpointError(f"ComfyUI does not recognise {os.path.basename(path)} as a {family.name} model.")
    load_device = comfy.model_management.get_torch_device()
    storage_dtype, compute_dtype = _dtypes(weight_dtype, tensors, model_config, load_device)
    model_config.set_inference_dtype(storage_dtype, compute_dtype, device=load_device)
    base_model = model_config.get_model(tensors, "", device="meta")
    weight_bytes = comfy.utils.calculate_parameters(tensors) * storage_dtype.itemsize
    stages = choose_stages(config, len(devices), weight_bytes, min(memory_of(device) for device in devices))
    spec = model_spec(header, family, dtype_name(storage_dtype), dtype_name(compute_dtype or storage_dtype), stages)
    remote = RemoteModel(spec, family, transformer_config, config, devices)
    net = base_model.diffusion_model
    net.forward = remote.forward
    net._apply = lambda function, recurse=True: net            # .to(device) of a meta module would raise
    base_model.remote = remote
    patcher = ShellPatcher(base_model, load_device, comfy.model_management.unet_offload_device())
    patcher.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.CALC_COND_BATCH, "xdit", remote.calc_cond_batch)
    return patcher


def _dtypes(weight_dtype, tensors, model_config, device):
    """(storage, compute) as ComfyUI's own loader chooses them; compute is None where it equals storage."""
    supported = model_config.supported_inference_dtypes
    storage = WEIGHT_DTYPES[weight_dtype]
    if storage is None:
        storage = comfy.model_management.unet_dtype(
            model_params=comfy.utils.calculate_parameters(tensors), supported_dtypes=list(supported),
            weight_dtype=comfy.utils.weight_dtype(tensors))
    return storage, comfy.model_management.unet_manual_cast(storage, device, supported)


class RemoteModel:
    """What a shell's diffusion model does instead of computing: it asks the workers."""

    def __init__(self, spec, family, transformer_config, config, devices):
        self.spec, self.family = spec, family
        self.num_heads = family.num_heads(transformer_config)
        self.num_channels = family.num_channels(transformer_config)
        self.config, self.devices = config, devices
        self._transformer_config = transformer_config
        self._shown = None                                     # the layout a person was told of in this run
        self._pipeline = self._schedule = self._whole_because = None

    def load(self, base_model):
        GROUPS.load_model(GROUPS.client(self.devices), self.spec, base_model)

    def unload(self):
        client = GROUPS.client_if(self.devices)
        if client is not None:
            client.drop(self.spec.name)

    def end_run(self):
        self._shown = self._pipeline = self._schedule = self._whole_because = None
        client = GROUPS.client_if(self.devices)
        if client is not None:
            client.end_run()

    def forward(self, x, timestep, context=None, control=None, transformer_options={}, **extra):
        """ComfyUI's call of a diffusion model. x: (B, C, H, W) or (B, C, F, H, W); returns like x, float32."""
        from . import branches
        self._refuse(control, transformer_options, extra)
        conditioning = {"context": context, **extra}
        call = Call(x, timestep, {name: tensor for name in self.family.conditioning
                                  if (tensor := conditioning.get(name)) is not None})
        schedule, sigmas = transformer_options.get("sample_sigmas"), transformer_options.get("sigmas", timestep)
        return branches.ask(call, functools.partial(self._predict, schedule, sigmas)).to(x.device)

    def calc_cond_batch(self, executor, model, conds, x, timestep, model_options):
        """Wraps ComfyUI's function of that name: branches run as coroutines where each goes to the workers on its own."""
        from . import branches                                 # here and below: the nodes load where greenlet is missing
        if self.spec.stages is None:
            layout = self._layout(2)
            if sum(bool(cond) for cond in conds) < 2 or layout.cfg_degree == 1:
                return executor(model, conds, x, timestep, model_options)
        else:
            self._whole_because = why_whole(conds, model_options)
        predict = functools.partial(self._predict, model_options["transformer_options"].get("sample_sigmas"), timestep)
        return branches.run_branches(predict, executor, model, conds, x, timestep, model_options)

    def begin_run(self, schedule, shape, whole_because=None):
        """PipeFusion of a run that begins. schedule: its sigmas. shape: of its whole latent."""
        client = GROUPS.client(self.devices)
        client.load_model(self.spec)
        self._schedule = schedule
        self._pipeline = PipelineRun(client, self.spec, self.family, self._transformer_config, self.config, self._layout(1),
                                     schedule, shape, whole_because)
        return self._pipeline

    def _layout(self, num_branches):
        return choose_layout(self.config, len(self.devices), num_branches, self.num_heads, self.family.name, self.spec.stages)

    def _predict(self, schedule, sigmas, calls):
        if self.spec.stages is not None:
            return self._predict_in_stages(schedule, sigmas.max().item(), calls)
        layout = self._layout(len(calls))
        client = GROUPS.client(self.devices)
        client.load_model(self.spec)
        if layout != self._shown:
            show_text(f"running on {', '.join(self.devices)}: {describe_layout(layout)}")
            self._shown = layout
        return client.predict(self.spec, layout, self.num_channels, calls)

    def _predict_in_stages(self, schedule, sigma, calls):
        from . import patches
        predictions = patches.ask(calls, sigma)
        if predictions is not None:
            return predictions
        if schedule is None:                                   # called outside of a sampler: no step can be stale
            schedule = torch.tensor([sigma])
        if self._pipeline is None or schedule is not self._schedule:
            self.begin_run(schedule, calls[0].latent.shape, self._whole_because)
        return self._pipeline.predict(calls, sigma)

    def _refuse(self, control, transformer_options, extra):
        if control is not None:
            raise UnsupportedError("xDiT does not support ControlNet conditioning yet. The ControlNet would be dropped without "
                                   "notice. Remove it, or use Load Diffusion Model.")
        for key, text in MODEL_PATCHES.items():
            if transformer_options.get(key):
                raise UnsupportedError(f"xDiT does not support {text} on this MODEL. They would be dropped without notice. Remove "
                                       f"the node that adds them, or use Load Diffusion Model.")
        wrappers = transformer_options.get("wrappers", {}).get(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL)
        if wrappers and any(wrappers.values()):
            raise UnsupportedError(f"xDiT does not support nodes that wrap the diffusion model ({', '.join(map(str, wrappers))}). "
                                   f"Remove the node that adds them, or use Load Diffusion Model.")
        known = {*self.family.conditioning, *self.family.ignored}
        unknown = sorted(name for name, value in extra.items() if value is not None and name not in known)
        if unknown:
            raise UnsupportedError(f"xDiT runs {self.family.name} without {', '.join(unknown)}, which this workflow's conditioning "
                                   f"has. It would be dropped without notice. Remove the node that adds it, or use Load "
                                   f"Diffusion Model.")


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
