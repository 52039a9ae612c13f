"""Proxy MODEL: ComfyUI's own BaseModel on the meta device, whose diffusion model calls the workers.

Sigmas, samplers, masks, regional prompts, previews and cancellation remain ComfyUI's.
"""

import dataclasses
import functools
import weakref

import torch

import comfy.model_management
from comfy.patcher_extension import WrappersMP

from ....xdit_backend.checkpoints.model_dims import dims_of, unet_run_memory
from ....xdit_backend.checkpoints.offload.offload_plan import offload_plan, with_host_bytes
from ....xdit_backend.checkpoints.quantisation.quantise_on_load import TYPES, is_installed, quantisation_of
from ....xdit_backend.checkpoints.quantisation.quantised_weights import packed_weights
from ....xdit_backend.checkpoints.tensor_sharding import possible_splits
from ....xdit_backend.config import validate_sparse
from ....xdit_backend.host.machine_profiles import capability_of
from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.shared_memory import dtype_name
from ..compatibility.comfyui_version import check_model_type
from ..compatibility.input_checks import check_text
from ..compatibility.pipefusion_support import KEY
from ..compatibility.proxy_modules import remember_modules, use_worker_parameters
from ..sampling import sampler_wrappers
from ..sampling.host_residuals import Additions, maker_of
from ..sampling.remote_model import RemoteModel
from ..workers.memory_checks import MemoryCheck
from ..workers.vram_accounting import load_device_of
from ..workers.worker_groups import GROUPS, check_packages, devices_of, memory_of
from .checkpoint_cache import CHECKPOINTS
from .detection import FAST, Detection
from .family_check import compare_in_background
from .model_patcher import ProxyPatcher
from .model_setup import Setup
from .state_dict import call_with_weights, prepare_text, read_values, weight_sources
from .weight_placement import placement_of


def load_proxy(path, weight_dtype, config):
    """Return a ModelPatcher for a file or diffusers folder that runs on the devices of `config`. Reads headers only.

    Raises CheckpointError for files that are no supported model, ConfigError for degrees that cannot work, for a
    weight_dtype whose package is missing, and for one that would quantise quantised weights.
    """
    check_packages()
    devices = devices_of(config)
    checkpoint = CHECKPOINTS.open(path)
    family = checkpoint.family
    validate_sparse(config, family.plan, family.name)
    quantisation = quantisation_of(weight_dtype, checkpoint)
    model = checkpoint.meta_model(quantisation)
    load_device = load_device_of(devices)
    detection = Detection(checkpoint, load_device)
    storage_dtype, compute_dtype = detection.dtypes(weight_dtype, bool(checkpoint.quantised or quantisation))
    base_model = detection.base_model(storage_dtype, compute_dtype)
    sources = functools.cache(functools.partial(weight_sources, checkpoint, weakref.proxy(base_model)))
    detection.refuse_ignored(base_model, sources)
    check_model_type(family, base_model)
    spec_of = functools.partial(checkpoint.spec, dtype_name(storage_dtype), quantisation=quantisation,
                                fast=weight_dtype == FAST)
    table = checkpoint.weight_table(spec_of(dtype_name(compute_dtype)))
    dims = dims_of(family, model, table, tuple(map(capability_of, devices)))
    device_bytes = list(map(memory_of, devices))
    placement = placement_of(config, devices, device_bytes, checkpoint, dims, model, dtype_name(compute_dtype))

    latent_format = base_model.latent_format
    packed_sizes = functools.cache(functools.partial(_packed_sizes, checkpoint, model, quantisation))

    # of a compute dtype and ModelSpec.weights_memory; holds no reference to base_model, which would be a cycle
    def computing_in(dtype, weights_memory):
        budget_bytes = config.weights_memory_bytes or 0 if weights_memory is None else weights_memory
        spec = spec_of(dtype, *placement, weights_memory=budget_bytes)
        table = checkpoint.weight_table(spec)
        spec = with_host_bytes(spec, table)
        own = dims and dataclasses.replace(dims, element_bytes=getattr(torch, dtype).itemsize)
        setup = Setup(spec, checkpoint, latent_format, config, devices, own, device_bytes)
        of_unet = functools.partial(unet_run_memory, family, model) if dims is None else None
        lighter = functools.partial(_lighter_bytes, checkpoint, spec, detection.dtypes)
        plan_of = functools.partial(offload_plan, table)
        return setup, MemoryCheck(setup, plan_of, of_unet, lighter, packed_sizes)

    remote = RemoteModel(computing_in, dtype_name(compute_dtype), load_device)
    remote.memory.check_weights()
    remote.compute_in(dtype_name(compute_dtype), base_model)
    GROUPS.prepare(devices)
    _make_remote(base_model, remote, sources)
    remote.comparison = compare_in_background(family, base_model)
    return _patcher_of(base_model, remote, load_device)


def _stay(module, function, recurse=True):
    return module


def _patcher_of(base_model, remote, load_device):
    offload_device = comfy.model_management.unet_offload_device()
    base_model.device = offload_device                         # nodes move tensors there for the modules that they call
    patcher = ProxyPatcher(base_model, load_device, offload_device,
                           size=remote.memory.model_bytes)     # memory that ComfyUI should free
    for kind, wrapper in ((WrappersMP.CALC_COND_BATCH, sampler_wrappers.calc_cond_batch),
                          (WrappersMP.SAMPLER_SAMPLE, sampler_wrappers.sample)):
        patcher.add_wrapper_with_key(kind, KEY, wrapper)
    return patcher


def _make_remote(base_model, remote, sources):
    """Connect ComfyUI's BaseModel to the workers, without a reference cycle. sources: see weight_sources."""
    module, itself, family = base_model.diffusion_model, weakref.proxy(base_model), remote.family
    use_worker_parameters(module, functools.partial(_weight_of, itself))
    for name, tensor in read_values(remote.checkpoint, family.read_by_nodes).items():
        module.register_buffer(name, tensor.to(getattr(module, name).dtype))
    if hasattr(module, "preprocess_text_embeds"):              # done by the workers if there are no prefixes
        prefixes = family.detection.text_prefixes
        module.preprocess_text_embeds = (functools.partial(prepare_text, itself, remote.checkpoint, prefixes)
                                         if prefixes else lambda context: context)
    # nodes may compile the model; a call to workers cannot be traced
    module.forward = torch.compiler.disable(remote.forward)
    for each in module.modules():
        each._apply = functools.partial(_stay, each)           # .to(device) of a meta module would raise an error
    for path, each in module.named_modules():
        if path.endswith(family.called_by_nodes):
            each.forward = functools.partial(call_with_weights, itself, remote, path, type(each).forward)
    remote.attach(remember_modules(module), sources, Additions(maker_of(base_model)))
    base_model.remote = remote
    of_one_device = functools.partial(type(base_model).memory_required, itself)
    base_model.memory_required = functools.partial(remote.memory_required, of_one_device)
    base_model.extra_conds = functools.partial(_extra_conds, functools.partial(type(base_model).extra_conds, itself),
                                               family)


def _lighter_bytes(checkpoint, spec, dtypes_of):
    """Return {weight_dtype: bytes of a rank with all blocks} for fp8, and for the dtypes that the file can be quantised
    to with the installed packages; none if its layers are quantised in ComfyUI's format."""
    family, found = checkpoint.family, {}
    choices = (*["fp8_e4m3fn"] * (not checkpoint.layers), *TYPES)
    for name in choices:
        if name in TYPES and (checkpoint.quantised or not is_installed(TYPES[name])):
            continue
        model = checkpoint.meta_model(name if name in TYPES else "")
        if spec.tensor_degree > 1 and not possible_splits(model, family.plan, spec.tensor_degree):
            continue
        storage, compute = map(dtype_name, dtypes_of(name, name in TYPES))
        found[name] = checkpoint.weight_table(dataclasses.replace(
            spec, storage_dtype=storage, compute_dtype=compute,
            quantisation=name if name in TYPES else "")).resident_bytes
    return found


def _packed_sizes(checkpoint, model, quantisation):
    """{tensor of the file that is stored packed: (rows plus columns, summed over the layers that have rows of it,
    bytes)}"""
    found: dict = {}
    for name, how in packed_weights(checkpoint, model, quantisation).items():
        sides, num_bytes = found.get(how.source, (0, 0))
        packed = model.get_submodule(name.removesuffix(".weight")).weight
        found[how.source] = sides + how.num_rows + checkpoint.shapes[how.source][1], num_bytes + packed.nbytes
    return found


def _weight_of(base_model, name):
    """Return a weight with the patches of the running MODEL; clones have other patches."""
    if base_model.current_patcher is None:
        raise UnsupportedError("Use Load Diffusion Model for the node that reads weights of this MODEL "
                               f"(diffusion_model.{name}) while no sampler runs it: they are on xDiT's workers.")
    return base_model.current_patcher.weight(name)


def _extra_conds(of_comfyui, family, **inputs):
    """BaseModel's own extra_conds. In inference mode, ComfyUI's Anima prepares the text with weights, which only the
    workers have; outside it, Anima passes the tokens on to its model."""
    check_text(family, inputs.get("cross_attn"))
    with torch.inference_mode(torch.is_inference_mode_enabled()
                              and "t5xxl_ids" not in family.inputs.conditioning), torch.no_grad():
        return of_comfyui(**inputs)


