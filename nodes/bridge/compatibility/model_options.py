"""Model options: checks everything that nodes put on a MODEL. What ComfyUI itself applies around the model is allowed,
and so are options that ComfyUI's code does not read; everything else is rejected.

Nodes change a MODEL through attributes of its ModelPatcher, options of each call, and the modules themselves. The
workers know only the file, so that any change not listed here with a reason would be silently ignored; it is rejected
even if it is unknown. MODELs are checked when they are loaded, when a run begins, and at each call.
"""

from types import SimpleNamespace

import torch

import comfy.model_patcher
from comfy.context_windows import IndexListCallbacks
from comfy.patcher_extension import CallbacksMP, WrapperExecutor, WrappersMP, get_all_wrappers

from ....xdit_backend.models import FAMILIES
from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.shared_memory import dtype_name
from . import image_adapters, text_attention
from .attention_override import OVERRIDE, backend_of, override_backend, packages_called
from .block_patches import operation_of
from .comfyui_version import refuse_new_keys
from .lora_bypass import refused_injections
from .ltx_guidance import ignored_guidance
from .option_keys import MODEL, TRANSFORMER, functions_in, is_read, is_read_by_patches
from .proxy_modules import PULID_FLUX, changed_modules, is_module
from .refused_nodes import refuse_nodes

OURS = "xdit"                                                  # prefix of our own options

# attributes of a ModelPatcher that do not affect a prediction: identity and memory management
BOOKKEEPING = {
    "model", "parent", "size", "clone_base_uuid", "patches_uuid", "cached_patcher_init", "is_multigpu_base_clone",
    # backups
    "backup", "backup_buffers", "object_patches_backup", "hook_backup", "hook_patches_backup", "cached_hook_patches",
    "pinned", "offload_device", "weight_inplace_update", "hook_mode", "current_hooks", "is_injected", "skip_injection",
    "force_cast_weights",                  # about the compute dtype, which is checked itself
    "patches", "hook_patches",             # of weights: weight_patches.py sends them to the workers
}
NOTES = {"lora_metadata"}                  # names of attachments that are only informative
# rejected attributes if they are not empty -> their description for the user
REFUSED = {
    "weight_wrapper_patches": "weight wrappers",
    "forced_hooks": "forced hooks", "attachments": "attachments", "additional_models": "additional models",
    "load_device": "another device, such as Select Model Device's; its devices are set in xDiT Parallel Config",
}
# keys of model_options -> what reads them outside the model
MODEL_OPTIONS = {
    "transformer_options": "checked key by key",
    "sampler_cfg_function": "ComfyUI's guidance", "sampler_pre_cfg_function": "ComfyUI's guidance",
    "sampler_post_cfg_function": "ComfyUI's guidance", "sampler_calc_cond_batch_function": "ComfyUI's guidance",
    "disable_cfg1_optimization": "ComfyUI's guidance", "denoise_mask_function": "ComfyUI's inpainting",
    "model_function_wrapper": "ComfyUI's call of the model", "context_handler": "ComfyUI's context windows",
    "registered_hooks": "ComfyUI's hooks; what they add is under the other keys",
    "to_load_options": "what hooks add, to move it",
    "torch_compile_kwargs": "read by sampler_wrappers.py: the workers compile too",
}
# the same for keys of transformer_options
TRANSFORMER_OPTIONS = {
    "wrappers": "checked by type", "callbacks": "checked by type",
    "cond_or_uncond": "describes the call", "uuids": "describes the call", "sigmas": "describes the call",
    "sample_sigmas": "describes the run", "context_window": "describes ComfyUI's cut of the latent",
    "prefetch_dynamic_vbars": "how ComfyUI would move weights",
    "ar_config": "read by the sampler for autoregressive video",
    "audio_embeds": "audio of InfiniteTalk, read by sampling/injected_networks.py",
    "easycache": "read by the wrappers of EasyCache and LazyCache", OVERRIDE: "read by call_backend at each call",
}
# keys that ComfyUI's models read -> their description for the user
REFUSED_OPTIONS = {
    "patches": "model patches", "patches_replace": "model patches that replace parts of the model",
    "rope_options": "a changed rotary scale",
    "animate2_cache": "WanAnimate2Cache with a dtype other than default, which rounds the pose,",
    "qwen_image21_cache": "QwenImage21Cache, for a model that xDiT does not run yet,",
    "ar_state": "the sampler ar_video (Sampler AR Video), which caches earlier frames in the model,",
}
# of a diffusion model: position method for references if a workflow sets none; remote_model.py reads it at each call
DEFAULT_METHOD = "params.default_ref_method"
SPARSE_NODE = "comfy_extras.nodes_sparse_attention"             # module of ComfyUI's BlockSparseAttention
SCALES = "rope_scales"                     # conditioning of families that support them
WRAPPERS = {WrappersMP.OUTER_SAMPLE, WrappersMP.PREPARE_SAMPLING, WrappersMP.SAMPLER_SAMPLE, WrappersMP.PREDICT_NOISE,
            WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL}  # all around the model
# wrappers inside the model that use only its latent and its prediction, by key and function; remote_model.py calls them
INSIDE = {"easycache": "easycache_forward_wrapper", "hidream_o1_patch_seam_smoothing": "smoothing_wrapper"}
# a prompt for ControlNets alone, which ComfyUI computes, see controlnet.py
CONTROLNETS_TEXT = "crossattn_controlnet"
CALLBACKS = {value for names in (CallbacksMP, IndexListCallbacks) for value in vars(names).values()
             if isinstance(value, str)}                        # ComfyUI calls all of them itself
COMPUTED = "float32", "bfloat16", "float16"                    # names of dtypes that workers compute in
MAX_NAMED = 5                                                  # changes that a message lists


def refuse_patcher(patcher, runs=False):
    """Raise UnsupportedError if a ProxyPatcher, its options or its modules have changes that the workers do not
    support. runs: it is loaded, and a run begins."""
    if not hasattr(patcher.model, "diffusion_model"):          # part of a VAE, which no node can change
        return
    fresh = vars(comfy.model_patcher.ModelPatcher(patcher.model, patcher.remote.load_device, patcher.offload_device))
    found = []
    for name, value in vars(patcher).items():
        if name == "object_patches":
            found += _object_patches(patcher)
        elif name == "model_options":
            refuse_nodes(value)
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
    remote = patcher.remote
    _refuse(found + changed_modules(patcher.model.diffusion_model, remote.modules, remote.forwards))


def refuse_model_options(model_options, family):
    """Raise UnsupportedError if the options of a run contain anything that the workers do not support."""
    refuse_nodes(model_options)
    _refuse(_model_options(model_options, family))


def any_family():
    """A family for a file that is not known: it reads every option that some family reads, so that nothing is rejected
    which its own family may support."""
    options = {name for one in FAMILIES.values() for name in one.inputs.components.options}
    inputs = SimpleNamespace(components=SimpleNamespace(options=options), conditioning={SCALES: None},
                             choices={"ref_latents_method": ()})
    return SimpleNamespace(name="this model", inputs=inputs, unsupported_dtypes=())


def refuse_described(what):
    """Raise UnsupportedError for what a node adds to a MODEL, as a run with it does. what: its description."""
    _refuse([what])


def refuse_call(family, transformer_options, extra, diffusion_model):
    """Raise UnsupportedError if a call of the model needs anything that the workers do not support, apart from its
    attention backend, see call_backend.

    extra: its arguments, unfolded, except the latent, the timestep, ControlNet (see controlnet.py) and
    transformer_options. diffusion_model: ComfyUI's diffusion model.
    """
    own = "rope_options", family.inputs.rope_options(extra)
    if own[1] and not transformer_options.get("rope_options"):
        raise UnsupportedError("Use a sampler node, or Load Diffusion Model: a node calls this MODEL's diffusion "
                               f"model directly, without the positions that ComfyUI sets for {family.name}'s tokens "
                               "(rope_options).")
    _refuse(_transformer_options(dict(option for option in _without(family, transformer_options).items()
                                      if option != own)))
    reason = family.inputs.unsupported(extra)
    if reason is not None:
        raise UnsupportedError(f"Change the node that adds {reason}, or use Load Diffusion Model: xDiT does not "
                               f"support it for {family.name}.")
    known = {"context", CONTROLNETS_TEXT, *family.inputs.conditioning, *family.inputs.ignored}
    unknown = sorted(name for name, value in extra.items() if value is not None and name not in known)
    refuse_new_keys(family.name, diffusion_model, unknown)
    if unknown:
        raise UnsupportedError(f"Remove the node that adds {', '.join(unknown)} to the conditioning, or use Load "
                               f"Diffusion Model: xDiT does not support it for {family.name} and would silently "
                               "ignore it.")


def call_backend(config, transformer_options):
    """Return the BackendChoice of a call; a node's function is tested by one call. Raises UnsupportedError for an
    unknown function."""
    return backend_of(config, _override(transformer_options))


def refuse_changed_modules(module, modules, forwards):
    """Raise UnsupportedError if modules of a proxy model have changed since it was created. forwards: its
    ForwardPatches."""
    _refuse(changed_modules(module, modules, forwards))


def _refuse(found):
    found = list(dict.fromkeys(found))
    if found:
        more = f"; and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise UnsupportedError("Remove the node that adds it, or use Load Diffusion Model: xDiT does not support "
                               f"{'; '.join(found[:MAX_NAMED])}{more} on this MODEL and would silently ignore it.")


def _named(text, value):
    """Append the first keys to a description if the value is a dict."""
    names = [str(key) for key in value][:3] if isinstance(value, dict) else []
    return f"{text} ({', '.join(names)}{' ...' if len(value) > 3 else ''})" if names else text


def _model_options(options, family):
    found = [text for key, value in options.items() if key not in MODEL_OPTIONS for text in _unknown(MODEL, key, value)]
    found += [f"{node}, which ComfyUI's model of {family.name} ignores,"
              for node in ignored_guidance(family, options.get("sampler_post_cfg_function", ()))]
    return found + _transformer_options(_without(family, options.get("transformer_options", {})))


def _unknown(options, key, value, call_options={}):
    """Describe an option of another pack if code that runs inside the model reads it, or if it has functions.
    call_options: transformer_options with the functions that nodes have put inside."""
    if str(key).startswith(OURS) or _is_empty(value):
        return []
    if is_read(options, key) or is_read_by_patches(key, call_options):
        return [f"{key} in its {options}"]
    return [f"a function in its {options} ({key}: {name})" for name in functions_in(value)[:1]]


def _without(family, options):
    """The transformer_options without those that the family's model reads, as ComfyUI's does."""
    own = {*family.inputs.components.options, *(["rope_options"] if SCALES in family.inputs.conditioning else [])}
    return {key: value for key, value in options.items() if key not in own}


def scales_of(family, transformer_options):
    """Return {SCALES: scale and shift of frames, rows and columns by Scale ROPE}, (1, 6): the bits of float64 as int64,
    which no cast to a compute dtype rounds. {} if there are none or the family does not support them."""
    options = transformer_options.get("rope_options")
    if not options or SCALES not in family.inputs.conditioning:
        return {}
    numbers = [options.get(f"{kind}_{axis}", default) for axis in "tyx" for kind, default in (("scale", 1.0),
                                                                                             ("shift", 0.0))]
    return {SCALES: torch.tensor([numbers], dtype=torch.float64).view(torch.int64)}


def refuse_positions(family, positions, extra):
    """Raise UnsupportedError for changed positions (scales_of, ForwardPatches.positions) that the workers do not
    combine. extra: as in refuse_call."""
    if "riflex" in positions and ("riflex" not in family.inputs.conditioning or len(positions) > 1
                                  or extra.get("context_latents") is not None
                                  or extra.get("guiding_frame_index") is not None):
        raise UnsupportedError("Remove RifleX, or the node that scales positions, adds references or sets a first "
                               f"frame: for {family.name} xDiT does not combine them.")


def _transformer_options(options):
    found = []
    for key, value in options.items():
        if key == "patches_replace":
            found += [PULID_FLUX if any(map(image_adapters.is_of_flux, replaced.values())) else
                      _named(REFUSED_OPTIONS[key], {kind: replaced}) for kind, replaced in value.items()
                      if kind != image_adapters.KIND
                      and any(operation_of(kind, function) is None for function in replaced.values())]
            found += text_attention.refused_in(value.get(image_adapters.KIND, {}).values())
        elif key == "patches":
            unknown = {kind: functions for kind, functions in value.items()
                       if not _is_empty(functions)
                       and any(operation_of(kind, function) is None for function in functions)}
            found += [_named(REFUSED_OPTIONS[key], unknown)] if unknown else []
        elif key == "ar_state":                                # even an empty one requires another kind of call
            found.append(REFUSED_OPTIONS[key])
        elif key == "animate2_cache" and getattr(value, "dtype", None) == "default":
            continue                                           # workers compute the pose again, and find the same
        elif key in REFUSED_OPTIONS:
            found += [] if not value or _is_empty(value) else [_named(REFUSED_OPTIONS[key], value)]
        elif key not in TRANSFORMER_OPTIONS:
            found += _unknown(TRANSFORMER, key, value, options)
    return found + _wrappers(options.get("wrappers", {})) + _callbacks(options.get("callbacks", {}))


def _override(transformer_options):
    """Return the attention backend that a node's function stands for, or None without one. Raises UnsupportedError for
    an unknown function."""
    function = transformer_options.get(OVERRIDE)
    backend = None if function is None else override_backend(function)
    if getattr(function, "__module__", None) == SPARSE_NODE:
        _refuse(["Model Sparse Attention (BlockSparseAttention): set sparse_attention in xDiT Parallel Config "
                 "instead,"])
    if function is not None and backend is None:
        name = ", which calls ".join([getattr(function, "__qualname__", type(function).__name__),
                                      *packages_called(function)])
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
    """Describe unsupported object patches. ComfyUI itself applies those of its BaseModel (sampling, latent format), but
    not those of the diffusion model."""
    found = []
    for name, value in patcher.object_patches.items():
        top, _, rest = name.partition(".")
        known = (rest in patcher.remote.modules and is_module(value, patcher.remote.modules[rest][0])
                 or rest == DEFAULT_METHOD and "ref_latents_method" in patcher.remote.family.inputs.choices
                 or patcher.remote.forwards.of_object_patch(patcher.remote.modules, rest, value)
                 or "riflex" in patcher.remote.family.inputs.conditioning
                 and patcher.remote.forwards.riflex(patcher.remote.modules, rest, value))
        if top == "diffusion_model" and not known:
            is_attention = rest.endswith(".comfy_attention")   # which a LoRA's file may set
            found.append(f"an attention backend for one module ({rest.removesuffix('.comfy_attention')}; attention in "
                         "xDiT Parallel Config is for all of them)" if is_attention else f"a replaced {name}")
    return found


def compute_dtype_of(patcher):
    """Return the name of a ProxyPatcher's compute dtype: the loader's or ModelComputeDtype's, which defaults to that of
    the weights."""
    wanted = patcher.object_patches.get("manual_cast_dtype", patcher.model.model_config.manual_cast_dtype)
    return patcher.remote.spec.storage_dtype if wanted is None else dtype_name(wanted)


def _compute_dtype(patcher, runs):
    """Describe a compute dtype that the workers do not support, or, in a run, one that was set in another way than by
    that node."""
    name, family, now = compute_dtype_of(patcher), patcher.remote.family, patcher.model.manual_cast_dtype
    if name in family.unsupported_dtypes:
        return [f"the compute dtype {name}, whose range is too small for {family.name},"]
    if name not in COMPUTED:
        return [f"the compute dtype {name} (supported: {', '.join(COMPUTED)}),"]
    in_effect = patcher.remote.spec.storage_dtype if now is None else dtype_name(now)
    return ([f"the compute dtype {in_effect} that was set on the model itself (it computes in "
             f"{patcher.remote.spec.compute_dtype})"
            ] if runs and in_effect != patcher.remote.spec.compute_dtype else [])


def _is_empty(value):
    return value is None or (isinstance(value, (dict, list, tuple, set)) and not any(
        not _is_empty(part) for part in (value.values() if isinstance(value, dict) else value)))


def wrappers_inside(module, family, transformer_options):
    """Return the diffusion model's wrappers of a call if the forward of ComfyUI's class calls them; all of them for a
    family that ComfyUI does not have."""
    forwards = [vars(class_)["forward"] for class_ in type(module).__mro__ if "forward" in vars(class_)]
    calls_wrappers = (family.sampled
                      or any(WrapperExecutor.__name__ in forward.__code__.co_names for forward in forwards))
    return get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options) if calls_wrappers else []
