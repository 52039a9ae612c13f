"""What a MODEL may carry: what ComfyUI carries out around the model is honoured, all else is refused by its name.

Nodes change a MODEL by what they write to its ModelPatcher, to the options of each call, and to the modules themselves.
The workers know nothing of these changes, only the file. So whatever is found here and is not listed with a reason
would be dropped silently; it is refused, also where nobody knows it. Called by model_patcher.py when a MODEL is loaded
and when a run begins, and by remote_model.py for each call.
"""

import torch

import comfy.model_patcher
from comfy.context_windows import IndexListCallbacks
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.shared_memory import dtype_name
from . import image_adapters
from .attention_override import OVERRIDE, backend_of, override_backend
from .block_patches import operation_of
from .comfyui_version import refuse_new_keys
from .lora_bypass import refused_injections
from .proxy_modules import FACES, changed_modules, is_module

OURS = "xdit"                                                  # what the names of our own options begin with

# Attributes of a ModelPatcher that change nothing of a prediction: how ComfyUI tells MODELs apart and keeps their
# memory.
BOOKKEEPING = {
    "model", "parent", "size", "clone_base_uuid", "patches_uuid", "cached_patcher_init", "is_multigpu_base_clone",
    # copies
    "backup", "backup_buffers", "object_patches_backup", "hook_backup", "hook_patches_backup", "cached_hook_patches",
    "pinned", "offload_device", "weight_inplace_update", "hook_mode", "current_hooks", "is_injected", "skip_injection",
    "force_cast_weights",                  # of the compute dtype, which is looked at itself
    "patches", "hook_patches",             # of weights: weight_patches.py brings them to the workers
}
NOTES = {"lora_metadata"}                  # names of attachments that are for people
# Attributes with contents of their own -> what a person knows those as.
REFUSED = {
    "weight_wrapper_patches": "weight wrappers",
    "forced_hooks": "forced hooks", "attachments": "attachments", "additional_models": "additional models",
    "load_device": "another device, such as Select Model Device's; its devices are those of xDiT Parallel Config",
}
# Keys of model_options -> who looks at them, outside of the model.
MODEL_OPTIONS = {
    "transformer_options": "looked at key by key",
    "sampler_cfg_function": "ComfyUI's guidance", "sampler_pre_cfg_function": "ComfyUI's guidance",
    "sampler_post_cfg_function": "ComfyUI's guidance", "sampler_calc_cond_batch_function": "ComfyUI's guidance",
    "disable_cfg1_optimization": "ComfyUI's guidance", "denoise_mask_function": "ComfyUI's inpainting",
    "model_function_wrapper": "ComfyUI's call of the model", "context_handler": "ComfyUI's context windows",
    "registered_hooks": "ComfyUI's hooks; what they add is among the other keys",
    "to_load_options": "what hooks add, to move it",
    "torch_compile_kwargs": "read by wrappers.py: the workers compile too",
}
# Keys of transformer_options -> the same.
TRANSFORMER_OPTIONS = {
    "wrappers": "looked at by type", "callbacks": "looked at by type",
    "cond_or_uncond": "tells of the call", "uuids": "tells of the call", "sigmas": "tells of the call",
    "sample_sigmas": "tells of the run", "context_window": "tells which piece of the latent ComfyUI has cut",
    "prefetch_dynamic_vbars": "how ComfyUI would move weights",
    "ar_config": "read by the sampler for autoregressive video",
    "audio_embeds": "sound of InfiniteTalk, read by run/networks.py",
    "easycache": "read by the wrappers of EasyCache and LazyCache", OVERRIDE: "call_kernel, once a call",
}
# Keys that the models of ComfyUI read -> what a person knows them as.
REFUSED_OPTIONS = {
    "patches": "model patches", "patches_replace": "model patches that replace parts of the model",
    "rope_options": "a changed rotary scale",
    "ar_state": "the sampler ar_video (Sampler AR Video), which has the model keep what it saw of earlier frames,",
}
# of a diffusion model: how it places references where a workflow does not say; remote_model.py reads it at each call
DEFAULT_METHOD = "params.default_ref_method"
SCALES = "rope_scales"                     # conditioning of families that take them
WRAPPERS = {WrappersMP.OUTER_SAMPLE, WrappersMP.PREPARE_SAMPLING, WrappersMP.SAMPLER_SAMPLE, WrappersMP.PREDICT_NOISE,
            WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL}  # all around the model
# Wrappers inside of the model, by key and function: those that know its latent and its prediction alone.
# remote_model.py calls them.
INSIDE = {"easycache": "easycache_forward_wrapper", "hidream_o1_patch_seam_smoothing": "smoothing_wrapper"}
# a prompt for ControlNets alone, which ComfyUI computes: controlnet.py
CONTROLNETS_TEXT = "crossattn_controlnet"
CALLBACKS = {value for names in (CallbacksMP, IndexListCallbacks) for value in vars(names).values()
             if isinstance(value, str)}                        # ComfyUI calls all of them itself
COMPUTED = "float32", "bfloat16", "float16"                    # names of types that workers compute in
MAX_NAMED = 5                                                  # changes that a message names


def refuse_patcher(patcher, runs=False):
    """Raise UnsupportedError where a ProxyPatcher, its options or its modules carry what the workers would not honour.
    runs: it is loaded, and a run begins."""
    if not hasattr(patcher.model, "diffusion_model"):          # the half of a VAE, which no node can change
        return
    fresh = vars(comfy.model_patcher.ModelPatcher(patcher.model, patcher.remote.load_device, patcher.offload_device))
    found = []
    for name, value in vars(patcher).items():
        if name == "object_patches":
            found += _object_patches(patcher)
        elif name == "model_options":
            found += _model_options(value, patcher.remote.family)
        elif name == "wrappers":
            found += _wrappers(value)
        elif name == "callbacks":
            found += _callbacks(value)
        elif name == "injections":
            found += refused_injections(value, getattr(torch, patcher.remote.spec.storage_dtype))
        elif name == "attachments" and value.keys() <= NOTES:
            continue
        elif name not in BOOKKEEPING and not (name in fresh and value == fresh[name]):
            found.append(_named(REFUSED.get(name, f"an attribute that ComfyUI does not know, {name}"), value))
    _override(patcher.model_options.get("transformer_options", {}))
    found += _compute_dtype(patcher, runs)
    _refuse(found + changed_modules(patcher.model.diffusion_model, patcher.remote.modules))


def refuse_model_options(model_options, family):
    """Raise UnsupportedError where the options of a run hold what the workers would not honour."""
    _refuse(_model_options(model_options, family))


def refuse_call(family, transformer_options, extra, diffusion_model):
    """Raise UnsupportedError where a call of the model asks for what the workers would not honour; but for its kernel
    of attention, see call_backend.

    extra: its arguments, unfolded, besides the latent, the timestep, ControlNet (controlnet.py) and
    transformer_options. diffusion_model: ComfyUI's.
    """
    own = "rope_options", family.rope_options(extra)
    if own[1] and not transformer_options.get("rope_options"):
        raise UnsupportedError("Use a sampler node, or Load Diffusion Model: a node calls this MODEL's diffusion "
                               f"model itself, without the places that ComfyUI gives {family.name}'s tokens "
                               "(rope_options).")
    _refuse(_transformer_options(dict(option for option in _without(family, transformer_options).items()
                                      if option != own)))
    reason = family.unsupported_arguments(extra)
    if reason is not None:
        raise UnsupportedError(f"Change the node that adds {reason}, or use Load Diffusion Model: xDiT runs "
                               f"{family.name} without it.")
    known = {"context", CONTROLNETS_TEXT, *family.conditioning, *family.ignored}
    unknown = sorted(name for name, value in extra.items() if value is not None and name not in known)
    refuse_new_keys(family.name, diffusion_model, unknown)
    if unknown:
        raise UnsupportedError(f"Remove the node that adds {', '.join(unknown)} to the conditioning, or use Load "
                               f"Diffusion Model: xDiT runs {family.name} without it, and it would be dropped "
                               "without notice.")


def call_backend(config, transformer_options):
    """The BackendChoice of a call, for which a node's own function is tried once. Raises UnsupportedError for one that
    is not known."""
    return backend_of(config, _override(transformer_options))


def refuse_changed_modules(net, modules):
    """Raise UnsupportedError where modules of a shell have been changed since it was made."""
    _refuse(changed_modules(net, modules))


def _refuse(found):
    found = list(dict.fromkeys(found))
    if found:
        more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise UnsupportedError("Remove the node that adds it, or use Load Diffusion Model: xDiT does not support "
                               f"{'; '.join(found[:MAX_NAMED])}{more} on this MODEL, and it would be dropped without "
                               "notice.")


def _named(text, value):
    """The text, and the names of what a dict holds."""
    names = [str(key) for key in value][:3] if isinstance(value, dict) else []
    return f"{text} ({', '.join(names)}{' ...' if len(value) > 3 else ''})" if names else text


def _model_options(options, family):
    found = [f"{key} in its model_options" for key, value in options.items()
             if key not in MODEL_OPTIONS and not key.startswith(OURS) and not _is_empty(value)]
    return found + _transformer_options(_without(family, options.get("transformer_options", {})))


def _without(family, options):
    """The transformer_options but for those that the family's model reads, as ComfyUI's does."""
    own = {*family.options, *(["rope_options"] if SCALES in family.conditioning else [])}
    return {key: value for key, value in options.items() if key not in own}


def scales_of(family, transformer_options):
    """{SCALES: what Scale ROPE does to places}: scale and shift of frames, rows and columns, (1, 6), the bits of
    float64, which no type that is computed in rounds. {} where there is nothing of it, or the family has none."""
    options = transformer_options.get("rope_options")
    if not options or SCALES not in family.conditioning:
        return {}
    numbers = [options.get(f"{kind}_{axis}", default) for axis in "tyx" for kind, default in (("scale", 1.0),
                                                                                             ("shift", 0.0))]
    return {SCALES: torch.tensor([numbers], dtype=torch.float64).view(torch.int64)}


def _transformer_options(options):
    found = []
    for key, value in options.items():
        if key == "patches_replace":
            found += [FACES if any(map(image_adapters.is_of_flux, replaced.values())) else
                      _named(REFUSED_OPTIONS[key], {kind: replaced}) for kind, replaced in value.items()
                      if kind != image_adapters.KIND
                      and any(operation_of(kind, function) is None for function in replaced.values())]
            found += filter(None, map(image_adapters.why_refused, value.get(image_adapters.KIND, {}).values()))
        elif key == "patches":
            unknown = {kind: functions for kind, functions in value.items()
                       if not _is_empty(functions)
                       and any(operation_of(kind, function) is None for function in functions)}
            found += [_named(REFUSED_OPTIONS[key], unknown)] if unknown else []
        elif key == "ar_state":                                # asks for another call, be it of a first frame
            found.append(REFUSED_OPTIONS[key])
        elif key in REFUSED_OPTIONS:
            found += [] if not value or _is_empty(value) else [_named(REFUSED_OPTIONS[key], value)]
        elif key not in TRANSFORMER_OPTIONS and not str(key).startswith(OURS) and not _is_empty(value):
            found.append(f"{key} in its transformer_options")
    return found + _wrappers(options.get("wrappers", {})) + _callbacks(options.get("callbacks", {}))


def _override(transformer_options):
    """The kernel that a node's function means; None where there is none. Raises UnsupportedError for one that is not
    known."""
    function = transformer_options.get(OVERRIDE)
    backend = None if function is None else override_backend(function)
    if function is not None and backend is None:
        name = getattr(function, "__qualname__", type(function).__name__)
        _refuse([f"an attention override ({name}): set attention in xDiT Parallel Config instead,"])
    return backend


def _wrappers(wrappers):
    found = []
    for kind, by_name in wrappers.items():
        names = [_name_of_wrappers(name, functions) for name, functions in by_name.items() if functions and not (
            kind == WrappersMP.DIFFUSION_MODEL
            and {getattr(function, "__name__", None) for function in functions} == {INSIDE.get(name)})]
        if names and kind == WrappersMP.DIFFUSION_MODEL:
            found.append(f"nodes that wrap the diffusion model ({', '.join(names)})")
        elif names and kind not in WRAPPERS:
            found.append(f"wrappers of {kind} ({', '.join(names)})")
    return found


def _name_of_wrappers(name, functions):
    """The key under which a node has set wrappers; of those without one, the names of their functions."""
    if name is not None:
        return str(name)
    return ", ".join(dict.fromkeys(f"{function.__module__}.{function.__qualname__}" if hasattr(function, "__qualname__")
                                   else type(function).__qualname__ for function in functions))


def _callbacks(callbacks):
    return [f"callbacks of {kind} ({', '.join(map(str, by_name))})" for kind, by_name in callbacks.items()
            if kind not in CALLBACKS and any(by_name.values())]


def _object_patches(patcher):
    """Patches of ComfyUI's BaseModel (its sampling, its latent format) are honoured by ComfyUI itself; those of the
    diffusion model are not."""
    found = []
    for name, value in patcher.object_patches.items():
        top, _, rest = name.partition(".")
        known = (rest in patcher.remote.modules and is_module(value, patcher.remote.modules[rest][0])
                 or rest == DEFAULT_METHOD and "ref_latents_method" in patcher.remote.family.choices)
        if top == "diffusion_model" and not known:
            is_attention = rest.endswith(".comfy_attention")   # which a LoRA's file may set
            found.append(f"an attention backend for one module ({rest.removesuffix('.comfy_attention')}; attention in "
                         "xDiT Parallel Config is for all of them)" if is_attention else f"a replaced {name}")
    return found


def compute_dtype_of(patcher):
    """The name of the dtype that a ProxyPatcher is to compute in: the loader's, or ModelComputeDtype's, whose default
    is that of the weights."""
    wanted = patcher.object_patches.get("manual_cast_dtype", patcher.model.model_config.manual_cast_dtype)
    return patcher.remote.spec.storage_dtype if wanted is None else dtype_name(wanted)


def _compute_dtype(patcher, runs):
    """Dtypes that the workers do not compute in; and in a run, a dtype that was set in another way than by that
    node."""
    name, family, now = compute_dtype_of(patcher), patcher.remote.family, patcher.model.manual_cast_dtype
    if name in family.unsupported_dtypes:
        return [f"the compute dtype {name}, which cannot hold {family.name}'s numbers,"]
    if name not in COMPUTED:
        return [f"the compute dtype {name}, which devices do not compute in ({', '.join(COMPUTED)} they do),"]
    in_effect = patcher.remote.spec.storage_dtype if now is None else dtype_name(now)
    return ([f"the compute dtype {in_effect} that the model itself was given (it computes in "
             f"{patcher.remote.spec.compute_dtype})"
            ] if runs and in_effect != patcher.remote.spec.compute_dtype else [])


def _is_empty(value):
    return value is None or (isinstance(value, (dict, list, tuple, set)) and not any(
        not _is_empty(part) for part in (value.values() if isinstance(value, dict) else value)))
