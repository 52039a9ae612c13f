"""PipeFusion support: reasons for which a workflow, or a sampler of it, cannot be run patch by patch. Lists the nodes
and samplers that are known to allow it; for anything else there is a reason.

The reasons are passed to remote_model.py in transformer_options.
"""

from comfy.patcher_extension import WrappersMP

from . import enhance_video
from .block_patches import compares_branches, has_cached_references, lllites_in, networks_in, residual_networks_in
from .option_keys import MODEL, is_read

# Known to leave the model's calls as the workers need them; anything else makes every step synchronous.
# of a prompt: ComfyUI cuts the latent for it, or masks its prediction
PROMPT_OPTIONS = {"area": "an area for a prompt", "mask": "a mask for a prompt", "gligen": "GLIGEN",
                  "hooks": "hooks on a prompt"}
# of model_options: functions outside the model's calls, which may read the full latent
GUIDANCE = {"sampler_cfg_function": "a node that changes guidance",
            "sampler_post_cfg_function": "a node that changes guidance",
            "sampler_pre_cfg_function": "a node that changes guidance",
            "sampler_calc_cond_batch_function": "a node that changes guidance",
            "denoise_mask_function": "a node that changes the noise mask"}
HARMLESS = {"transformer_options", "disable_cfg1_optimization", "to_load_options", "torch_compile_kwargs"}
OPTIONS = {"model_function_wrapper": "a node that wraps the model's function", "context_handler": "context windows"}
CACHE = "Flux KV Cache"
TEXT_GUIDE = "guidance of the attention to the text"
# objects of the MODEL that may be replaced; diffusion_model by a compiled one, see proxy_modules.py
OBJECTS = {"model_sampling", "latent_format", "diffusion_model",
           "diffusion_model.params.default_ref_method"}
INSIDE = "diffusion_model."
# samplers that work elementwise in space, by the names of their functions
ELEMENTWISE = {f"sample_{name}" for name in (
    "euler", "euler_cfg_pp", "euler_ancestral", "euler_ancestral_cfg_pp", "heun", "heunpp2", "exp_heun_2_x0",
    "exp_heun_2_x0_sde",
    "dpm_2", "dpm_2_ancestral", "lms", "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_sde_gpu",
    "dpmpp_2m",
    "dpmpp_2m_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde",
    "dpmpp_3m_sde_gpu", "ddpm", "lcm", "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp",
    "res_multistep_ancestral", "res_multistep_ancestral_cfg_pp", "gradient_estimation", "gradient_estimation_cfg_pp",
    "er_sde", "seeds_2", "seeds_3", "sa_solver", "sa_solver_pece", "unipc", "unipc_bh2")} | {"dpm_fast_function"}
# keys of our wrappers, and of ComfyUI's that install the compiled model
KEY, COMPILE_KEY = "xdit", "torch.compile"
# keys of transformer_options, see sampler_wrappers.py; COMPILE: a node's backend of torch.compile
PATCHWISE, SYNCHRONOUS, DRAINED, COMPILE = "xdit_patchwise", "xdit_synchronous", "xdit_drained", "xdit_compile"
BACKENDS = ("inductor",)                   # of torch.compile that the workers support


def why_synchronous(conds, model_options):
    """Return the reason, for the user, for which every step of this workflow must be synchronous, or None."""
    options = model_options.get("transformer_options", {})
    if options.get(SYNCHRONOUS) is not None:
        return options[SYNCHRONOUS]
    if compares_branches(options):
        return "Normalized Attention Guidance"
    if has_cached_references(options):
        return CACHE
    for entry in (entry for cond in conds if cond for entry in cond):
        for key, text in PROMPT_OPTIONS.items():
            if entry.get(key) is not None:
                return text
    for key, value in model_options.items():
        if key not in HARMLESS and key not in GUIDANCE and value is not None and is_read(MODEL, key):
            return OPTIONS.get(key, f'a node that sets "{key}" on the MODEL')
    for kind, wrappers in options.get("wrappers", {}).items():
        for key, functions in wrappers.items():
            if kind != WrappersMP.PREPARE_SAMPLING and key not in (KEY, COMPILE_KEY) and functions:
                name = key or getattr(functions[0], "__qualname__", type(functions[0]).__name__).partition(".")[0]
                return f"a node that wraps the sampling ({name})"
    return None


def why_synchronous_run(sampler, guider):
    """The same for a full run: from its sampler and the MODEL of ComfyUI's guider."""
    if getattr(getattr(sampler, "sampler_function", None), "__name__", "") == "dpm_adaptive_function":
        return "dpm_adaptive, which selects its steps by an error over the full latent"
    remote, patches = guider.inner_model.remote, guider.model_patcher.object_patches
    if remote.forwards.enhanced(remote.modules):
        return enhance_video.NODE
    replaced = sorted(name for name, value in patches.items() if name not in OBJECTS
                      and not remote.forwards.is_local(remote.modules, name.removeprefix(INSIDE), value))
    return f"a node that replaces {replaced[0]} of the MODEL" if replaced else None


def why_drained(sampler, conds, base_model, model_options):
    """Return the reason, for the user, for which a run with patches must finish each step before the next, or None."""
    if any(entry.get("control") is not None for cond in conds if cond for entry in cond):
        return "a ControlNet, which reads the full image"
    options = model_options.get("transformer_options", {})
    if residual_networks_in(options) or networks_in(options) or lllites_in(options):
        return "model patches, which read the full image"
    for key, text in GUIDANCE.items():
        if model_options.get(key):
            return text
    if base_model.remote.family.inputs.components.names:
        return "a latent of several components, which ComfyUI packs into one row for the sampler"
    function = getattr(sampler, "sampler_function", None)
    if function is None or not function.__module__.startswith("comfy.") or function.__name__ not in ELEMENTWISE:
        return "a sampler that is not known to work elementwise"
    return why_one_call(base_model, model_options)


def why_one_call(base_model, model_options):
    """Return a description of other code that runs around each call of the model, so that calls may not interleave, or
    None."""
    module, options = base_model.diffusion_model, model_options["transformer_options"]
    around = [options.get("wrappers", {}).get(kind, {})
              for kind in (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)]
    if compares_branches(options):
        return "Normalized Attention Guidance"
    if has_cached_references(options):
        return CACHE
    if base_model.remote.forwards.guides(base_model.remote.modules):
        return TEXT_GUIDE
    if base_model.remote.forwards.enhanced(base_model.remote.modules):
        return enhance_video.NODE
    if (model_options.get("model_function_wrapper")
            or any(functions for by_key in around for functions in by_key.values())):
        return "a node that wraps the model's calls"
    if any(functions for kind in options.get("callbacks", {}).values() for functions in kind.values()):
        return "a node with sampling callbacks"
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_orig_mod"):
        return "hooks on the model, or a compiled model"
    return None
