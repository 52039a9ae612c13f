"""The shell MODEL: ComfyUI's own BaseModel on the meta device, whose diffusion model asks the workers.

Sigmas, samplers, masks, regional prompts, previews and cancel stay ComfyUI's own. Made by Load xDiT Model.
"""

import dataclasses
import functools
import math
import weakref

import torch

import comfy.model_detection
import comfy.model_management
import comfy.utils
from comfy.patcher_extension import WrappersMP

from ....xdit_backend.checkpoints.block_weights import plan_weights, unmapped_bytes
from ....xdit_backend.checkpoints.net import exchanged_bytes, net_of
from ....xdit_backend.checkpoints.quantise import TYPES, check_package, is_installed
from ....xdit_backend.checkpoints.shares import is_splittable, tensor_splits
from ....xdit_backend.config import devices_per_machine, refuse_methods, validate_layout, validate_stages
from ....xdit_backend.forecast.planner import EVERYWHERE, Devices, choose_spread, usual_branches
from ....xdit_backend.protocol.errors import CheckpointError, ConfigError, UnsupportedError
from ....xdit_backend.protocol.segments import dtype_name
from ..run import wrappers
from ..run.remote import RemoteModel
from ..supported.by_patches import KEY
from ..supported.inputs import check_text
from ..supported.modules import remember_modules, use_worker_parameters
from ..workers.groups import GROUPS, check_packages, devices_of, memory_of
from ..workers.memory_checks import MemoryCheck, has_own_memory
from ..workers.placement import load_device_of
from .checkpoints import CHECKPOINTS
from .file_weights import prepare_text, read_values, weight_sources
from .folders import apply_scheduler_config, marker_tensors_of, refuse_undetectable, under_comfyui_names
from .own_model import OwnConfig
from .patcher import ShellPatcher
from .setup import Setup

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
                      "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
                      "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
WEIGHT_DTYPES = {"default": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
                 "fp8_e4m3fn": torch.float8_e4m3fn, **dict.fromkeys(TYPES)}


def load_shell(path, weight_dtype, config):
    """Return a ModelPatcher for a file or diffusers folder, run by the devices of `config`. Reads headers only.

    Raises CheckpointError for files that are no supported model, ConfigError for degrees that cannot work, and for a
    weight_dtype whose package is missing, or that would quantise what is quantised.
    """
    check_packages()
    devices = devices_of(config)
    checkpoint = CHECKPOINTS.open(path)
    family = checkpoint.family
    quantisation = _quantisation(weight_dtype, checkpoint)
    model = checkpoint.meta_model(quantisation)
    if config.mode == "manual":
        _refuse_degrees(config, checkpoint)
    load_device = load_device_of(devices)
    model_config, tensors, prediction = _detected(checkpoint)
    dtypes_of = functools.partial(_dtypes, tensors, model_config, load_device)
    storage_dtype, compute_dtype = dtypes_of(weight_dtype, bool(checkpoint.quantised or quantisation))
    _refuse_small_type(family, dtype_name(compute_dtype), load_device)
    model_config.set_inference_dtype(storage_dtype, None if storage_dtype == compute_dtype else compute_dtype,
                                     device=load_device)
    base_model = model_config.get_model(tensors, "", device="meta")
    sources = functools.cache(functools.partial(weight_sources, checkpoint, weakref.proxy(base_model)))
    _refuse_ignored(checkpoint, base_model, prediction, sources)
    spec_of = functools.partial(checkpoint.spec, dtype_name(storage_dtype), quantisation=quantisation)
    net = None if family.is_unet else net_of(family, checkpoint.config, spec_of(dtype_name(compute_dtype)), model)
    device_bytes = list(map(memory_of, devices))
    spread = _spread(config, devices, device_bytes, checkpoint, net, model, dtype_name(compute_dtype))

    latent_format = base_model.latent_format

    # of a name of a type and ModelSpec.weights_memory: (Setup, MemoryCheck). No circle: it knows no base_model
    def computing_in(dtype, weights_memory):
        given = config.weights_memory_bytes or 0 if weights_memory is None else weights_memory
        spec = _with_host_bytes(spec_of(dtype, *spread, weights_memory=given), checkpoint, model)
        own = net and dataclasses.replace(net, element_bytes=getattr(torch, dtype).itemsize)
        setup = Setup(spec, checkpoint, latent_format, config, devices, own, device_bytes)
        exchanged = functools.partial(exchanged_bytes, model) if family.is_unet else None
        lighter = functools.partial(_lighter_bytes, checkpoint, spec, dtypes_of)
        return setup, MemoryCheck(setup, functools.partial(_plan_of, model, family, spec), exchanged, lighter)

    remote = RemoteModel(computing_in, dtype_name(compute_dtype), load_device)
    remote.memory.check_weights()
    remote.compute_in(dtype_name(compute_dtype), base_model)
    GROUPS.prepare(devices)
    _make_remote(base_model, remote, sources)
    return _patcher_of(base_model, remote, load_device)


def _patcher_of(base_model, remote, load_device):
    patcher = ShellPatcher(base_model, load_device, comfy.model_management.unet_offload_device())
    patcher.size = remote.memory.model_bytes                   # what ComfyUI is to make room for
    for kind, wrapper in ((WrappersMP.CALC_COND_BATCH, wrappers.calc_cond_batch),
                          (WrappersMP.SAMPLER_SAMPLE, wrappers.sample)):
        patcher.add_wrapper_with_key(kind, KEY, wrapper)
    return patcher


def _refuse_small_type(family, compute_dtype, load_device):
    if compute_dtype in family.unsupported_dtypes:
        raise UnsupportedError(f"{family.name} has numbers that {compute_dtype} cannot hold, and {load_device} would "
                               f"compute in it. Set weight_dtype to fp32, or to bf16 where the device has it.")


def _quantisation(weight_dtype, checkpoint):
    """A key of TYPES where linear layers are to be quantised when they are loaded, else ""."""
    if weight_dtype not in TYPES:
        return ""
    if checkpoint.quantised:
        types = sorted({checkpoint.dtypes[name] for name in checkpoint.quantised})
        raise ConfigError(f"weight_dtype {weight_dtype} would quantise {checkpoint.name} a second time: its weights "
                          f"are {' and '.join(types)} already. Set weight_dtype to default, which leaves them so, or "
                          f"use the bf16 or fp16 file of the same model.")
    check_package(TYPES[weight_dtype])
    return weight_dtype


def _refuse_degrees(config, checkpoint):
    """Refuse degrees of manual mode that cannot work for this model."""
    family, transformer_config = checkpoint.family, checkpoint.config
    refuse_methods(config.layout, family.refused, family.name)
    validate_layout(config.layout, family.num_heads(transformer_config), family.name,
                    family.num_key_heads(transformer_config))
    if not family.is_unet:
        validate_stages(config, family.num_blocks(transformer_config), family.name)


def _spread(config, devices, device_bytes, checkpoint, net, model, compute_dtype):
    """How the weights are spread over the devices, a Spread.

    GROUPS.machine also tells the workers how fast each device is, where that was measured. Where several machines share
    the work in auto mode, it is measured now.
    """
    family = checkpoint.family
    per_machine, is_auto = devices_per_machine(devices), config.mode == "auto" and not family.is_unet
    machine = (GROUPS.machine(devices, compute_dtype, may_measure=per_machine > 0 and is_auto) if len(devices) > 1
               else None)
    if family.is_unet:
        return EVERYWHERE
    return choose_spread(config, net, Devices(device_bytes, per_machine, machine),
                         lambda degree: "tensor" not in family.refused and is_splittable(model, family.plan, degree),
                         "pipefusion" not in family.refused, usual_branches(checkpoint.config),
                         all(map(has_own_memory, devices)))


def _make_remote(base_model, remote, sources):
    """Have ComfyUI's BaseModel ask the workers. No circle: it ends with its MODEL. sources: see weight_sources."""
    module, itself, family = base_model.diffusion_model, weakref.proxy(base_model), remote.family
    use_worker_parameters(module, functools.partial(_weight_of, itself))
    if hasattr(module, "preprocess_text_embeds"):
        module.preprocess_text_embeds = functools.partial(prepare_text, itself, remote.checkpoint, family.text_prefixes)
    # nodes compile the model; there is nothing to trace in a call to workers
    module.forward = torch.compiler.disable(remote.forward)
    module._apply = lambda function, recurse=True: module      # .to(device) of a meta module would raise
    remote.attach(remember_modules(module), sources)
    base_model.remote = remote
    of_one_device = functools.partial(type(base_model).memory_required, itself)
    base_model.memory_required = functools.partial(remote.memory_required, of_one_device)
    base_model.extra_conds = functools.partial(_extra_conds, functools.partial(type(base_model).extra_conds, itself),
                                               family)


def _detected(checkpoint):
    """(ComfyUI's model config, the tensors on the meta device under ComfyUI's names, the ModelType of a folder's
    scheduler).

    The first is an OwnConfig of a family that ComfyUI has no model of. The last is None of a file, and of a folder
    without a scheduler.
    """
    tensors = {name: torch.empty(shape, dtype=SAFETENSORS_DTYPES.get(checkpoint.dtypes[name], torch.bfloat16),
                                 device="meta")
               for name, shape in checkpoint.shapes.items()}
    family, name = checkpoint.family, checkpoint.name
    if family.sampled:
        return OwnConfig(family, checkpoint.config), tensors, None
    # a diffusers folder: to the names that ComfyUI knows
    if checkpoint.folder_config is not None:
        tensors = under_comfyui_names(tensors, checkpoint) | marker_tensors_of(checkpoint)
        refuse_undetectable(tensors, checkpoint)
    tensors = tensors | read_values(checkpoint, family.values)
    model_config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=checkpoint.model_metadata)
    if model_config is None:
        raise CheckpointError(f"ComfyUI does not recognise {name} as a {family.name} model. Use another file of this "
                              f"model.")
    uses_metadata = (bool(family.settings)
             or model_config.unet_config == comfy.model_detection.model_config_from_unet(tensors, "").unet_config)
    if checkpoint.metadata and not uses_metadata:
        raise CheckpointError(f"{name} says in its metadata that it differs from other {family.name} models, which "
                              f"xDiT would not heed. Use Load Diffusion Model.")
    return model_config, tensors, apply_scheduler_config(model_config, checkpoint)


def _refuse_ignored(checkpoint, base_model, prediction, weight_sources):
    """Refuse what ComfyUI would ignore: the scheduler's prediction type, and scales of weights that belong to no linear
    layer and no embedding, such as the gate of experts."""
    if prediction is not None and base_model.model_type != prediction:
        raise CheckpointError(f"{checkpoint.name} is a {checkpoint.family.name} model whose scheduler says "
                              f"{prediction.name}, and ComfyUI samples such a model by {base_model.model_type.name} "
                              f"only. Use another model.")
    for name, sources in weight_sources().items() if checkpoint.scales else ():
        scaled = [source for source, _ in sources if source in checkpoint.scales]
        if not scaled:
            continue
        module = base_model.diffusion_model.get_submodule(name.rpartition(".")[0])
        if not isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            raise CheckpointError(f"{checkpoint.name} has a scale for {scaled[0]}, which ComfyUI does not heed: what "
                                  f"this file should draw is not clear. Use the bf16, fp16, plain fp8 or GGUF file of "
                                  f"the same model.")


def _splits(model, family, spec):
    return tensor_splits(model, family.plan, spec.tensor_degree) if spec.tensor_degree > 1 else {}


def _plan_of(model, family, spec, budget_bytes):
    """The OffloadPlan of a rank with all blocks."""
    return plan_weights(model, family, spec, _splits(model, family, spec), budget_bytes)[0]


def _with_host_bytes(spec, checkpoint, model):
    """The spec with ModelSpec.host_bytes. With stages each rank has its own part in any case."""
    if not spec.weights_memory or spec.stages is not None:
        return spec
    splits = _splits(model, checkpoint.family, spec)
    names = plan_weights(model, checkpoint.family, spec, splits, spec.weights_memory)[1]
    return dataclasses.replace(spec, host_bytes=unmapped_bytes(checkpoint, model, spec, splits, names))


def _lighter_bytes(checkpoint, spec, dtypes_of):
    """{weight_dtype: bytes that a rank with all blocks would hold}: of fp8, and of the types that the file can be
    quantised to with the packages that are installed."""
    family, found = checkpoint.family, {}
    for name in ("fp8_e4m3fn", *(name for name in TYPES if not checkpoint.quantised and is_installed(TYPES[name]))):
        model = checkpoint.meta_model(name if name in TYPES else "")
        if spec.tensor_degree > 1 and not is_splittable(model, family.plan, spec.tensor_degree):
            continue
        storage, compute = map(dtype_name, dtypes_of(name, name in TYPES))
        found[name] = _plan_of(model, family, dataclasses.replace(spec, storage_dtype=storage, compute_dtype=compute),
                               math.inf).device_bytes
    return found


def _weight_of(base_model, name):
    """A weight with the patches of the MODEL that runs: clones have others."""
    if base_model.current_patcher is None:
        raise UnsupportedError(f"A node reads weights of this MODEL (diffusion_model.{name}) while no sampler runs "
                               f"it, and xDiT's workers hold them. Use Load Diffusion Model for it.")
    return base_model.current_patcher.weight(name)


def _extra_conds(of_comfyui, family, **given):
    """A BaseModel's own extra_conds. ComfyUI's Anima prepares the text with weights when it is in inference mode, which
    only the workers have; outside of that mode it hands the tokens on to its model."""
    check_text(family, given.get("cross_attn"))
    with torch.inference_mode(torch.is_inference_mode_enabled()
                              and "t5xxl_ids" not in family.conditioning), torch.no_grad():
        return of_comfyui(**given)


def _dtypes(tensors, model_config, device, weight_dtype, is_quantised):
    """(storage, compute) dtypes as ComfyUI's own loader chooses them. In a quantised file, those of the weights that
    are not quantised."""
    supported = model_config.supported_inference_dtypes
    storage = WEIGHT_DTYPES[weight_dtype]
    if storage is None and is_quantised:
        storage = comfy.model_management.unet_manual_cast(None, device, supported)
        return storage, storage
    if storage is None:
        storage = comfy.model_management.unet_dtype(
            model_params=comfy.utils.calculate_parameters(tensors), supported_dtypes=list(supported),
            weight_dtype=comfy.utils.weight_dtype(tensors))
    return storage, comfy.model_management.unet_manual_cast(storage, device, supported) or storage
