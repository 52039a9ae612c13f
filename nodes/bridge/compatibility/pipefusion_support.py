"""Why PipeFusion cannot run a workflow, or one sampler of it, by patches. Lists the nodes and samplers that are known
to allow it; for all else it says why not.

Called by sampler_wrappers.py before a run and at each step. The reasons travel in transformer_options to
remote_model.py.
"""

from comfy.patcher_extension import WrappersMP

from .block_patches import adds_to, compares_branches, has_cached_references, lllites_in, networks_in

# What is known to leave the calls of the model as the workers take them. All else makes every step whole.
# Of a prompt: ComfyUI takes a part of the latent for it, or only a part of its prediction.
PARTS = {"area": "an area for a prompt", "mask": "a mask for a prompt", "gligen": "GLIGEN",
         "hooks": "hooks on a prompt"}
# Of model_options: functions outside of the model's calls, which may look at the whole latent
GUIDANCE = {"sampler_cfg_function": "a node that changes guidance",
            "sampler_post_cfg_function": "a node that changes guidance",
            "sampler_pre_cfg_function": "a node that changes guidance",
            "sampler_calc_cond_batch_function": "a node that changes guidance",
            "denoise_mask_function": "a node that changes the noise mask"}
HARMLESS = {"transformer_options", "disable_cfg1_optimization", "to_load_options", "torch_compile_kwargs"}
OPTIONS = {"model_function_wrapper": "a node that wraps the model's function", "context_handler": "context windows"}
CACHE = "Flux KV Cache"
# Of the MODEL: objects that may be replaced
# the last: compiled, see proxy_modules.py
OBJECTS = {"model_sampling", "latent_format", "diffusion_model",
           "diffusion_model.params.default_ref_method"}
# Samplers whose steps are element by element in space, by the names of their functions
ELEMENTWISE = {f"sample_{name}" for name in (
    "euler", "euler_cfg_pp", "euler_ancestral", "euler_ancestral_cfg_pp", "heun", "heunpp2", "exp_heun_2_x0",
    "exp_heun_2_x0_sde",
    "dpm_2", "dpm_2_ancestral", "lms", "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_sde_gpu",
    "dpmpp_2m",
    "dpmpp_2m_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde",
    "dpmpp_3m_sde_gpu", "ddpm", "lcm", "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp",
    "res_multistep_ancestral", "res_multistep_ancestral_cfg_pp", "gradient_estimation", "gradient_estimation_cfg_pp",
    "er_sde", "seeds_2", "seeds_3", "sa_solver", "sa_solver_pece", "unipc", "unipc_bh2")} | {"dpm_fast_function"}
# of our wrappers, and of ComfyUI's that put the compiled model in place
KEY, COMPILE_KEY = "xdit", "torch.compile"
# in transformer_options, see sampler_wrappers.py; the last: the backend of torch.compile that a node has asked for
PATCHWISE, WHOLE, DRAINED, COMPILE = "xdit_patchwise", "xdit_whole", "xdit_drained", "xdit_compile"
BACKENDS = ("inductor",)                   # of torch.compile that the workers take


def why_synchronous(conds, model_options):
    """Why every step of this workflow has to be whole, for a person; None if it need not be."""
    options = model_options.get("transformer_options", {})
    if options.get(WHOLE) is not None:
        return options[WHOLE]
    if compares_branches(options):
        return "Normalized Attention Guidance"
    if has_cached_references(options):
        return CACHE
    for entry in (entry for cond in conds if cond for entry in cond):
        for key, text in PARTS.items():
            if entry.get(key) is not None:
                return text
    for key, value in model_options.items():
        if key not in HARMLESS and key not in GUIDANCE and value is not None:
            return OPTIONS.get(key, f'a node that sets "{key}" on the MODEL')
    for wrappers in options.get("wrappers", {}).values():
        for key, functions in wrappers.items():
            if key not in (KEY, COMPILE_KEY) and functions:
                name = key or getattr(functions[0], "__qualname__", type(functions[0]).__name__).partition(".")[0]
                return f"a node that wraps the sampling ({name})"
    return None


def why_synchronous_run(sampler, guider):
    """The same for a whole run: of the sampler, and of the MODEL of ComfyUI's guider."""
    if getattr(getattr(sampler, "sampler_function", None), "__name__", "") == "dpm_adaptive_function":
        return "dpm_adaptive, which chooses its steps by an error over the whole latent"
    replaced = sorted(set(guider.model_patcher.object_patches) - OBJECTS)
    return f"a node that replaces {replaced[0]} of the MODEL" if replaced else None


def why_drained(sampler, conds, base_model, model_options):
    """Why a run with patches has to finish each step before the next, for a person; None if it need not."""
    if any(entry.get("control") is not None for cond in conds if cond for entry in cond):
        return "a ControlNet, which reads the whole picture"
    options = model_options.get("transformer_options", {})
    if adds_to(options) or networks_in(options) or lllites_in(options):
        return "model patches, which read the whole picture"
    for key, text in GUIDANCE.items():
        if model_options.get(key):
            return text
    if base_model.remote.family.components:
        return "a latent of several parts, which ComfyUI hands to the sampler as one row of numbers"
    function = getattr(sampler, "sampler_function", None)
    if function is None or not function.__module__.startswith("comfy.") or function.__name__ not in ELEMENTWISE:
        return "a sampler that is not known to work on each piece alone"
    return why_one_call(base_model, model_options)


def why_one_call(base_model, model_options):
    """What code of others runs around each call of the model, so that no other call may come in between; None if there
    is none."""
    net, options = base_model.diffusion_model, model_options["transformer_options"]
    around = [options.get("wrappers", {}).get(kind, {})
              for kind in (WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)]
    if compares_branches(options):
        return "Normalized Attention Guidance"
    if has_cached_references(options):
        return CACHE
    if (model_options.get("model_function_wrapper")
            or any(functions for by_key in around for functions in by_key.values())):
        return "a node that wraps the model's calls"
    if any(functions for kind in options.get("callbacks", {}).values() for functions in kind.values()):
        return "a node that follows the sampling"
    if net._forward_hooks or net._forward_pre_hooks or hasattr(net, "_orig_mod"):
        return "hooks on the model, or a compiled one"
    return None
