"""Recognition of a ComfyUI that is newer than the pack knows, and the errors about it."""

import inspect

from ....xdit_backend.comfyui.install_location import comfyui_version, find_comfyui
from ....xdit_backend.protocol.errors import UnsupportedError

# conditioning that a model of ComfyUI 0.30 reads and the pack does not run: a node has added it
REFUSED_KEYS = frozenset({
    "attention_mask", "clip_fea", "context_latents", "fps", "guidance", "guiding_frame_index", "latent",
    "local_add_cond",
    "minimax_payload.audio_cond_noise_aug", "minimax_payload.visual_cond_noise_aug", "num_video_frames", "ref_audio",
    "ref_contexts", "ref_latent", "ref_latents", "ref_mask_flag", "ref_mask_latents", "reference_latent", "sam_latents",
    "siglip_feats", "strength", "time_context", "time_dim_concat", "time_dim_replace", "txt_byt5", "y"})
# names in comfy.model_base.ModelType: how a sampler's sigma and latent become those of the model. With FLOW_AV the
# latent of audio is scaled, see Components.rescale.
MODEL_TYPES = frozenset({"EPS", "V_PREDICTION", "V_PREDICTION_EDM", "STABLE_CASCADE", "EDM", "FLOW",
                         "V_PREDICTION_CONTINUOUS", "FLUX", "IMG_TO_IMG", "FLOW_COSMOS", "IMG_TO_IMG_FLOW",
                         "V_PREDICTION_DDPM"})
TYPES_OF = {"MiniMax H3": {"FLOW_AV"}}     # family -> names that it alone is run with


def newer_comfyui(family_name, what, instead="Load Diffusion Model"):
    """Return the UnsupportedError for a part of ComfyUI's model that the pack does not know. what: a clause about it.
    instead: ComfyUI's own nodes."""
    folder = find_comfyui()
    version = comfyui_version(folder) if folder is not None else ""
    return UnsupportedError(f"Update xDiT, or use {instead}: this ComfyUI {f'({version}) ' * bool(version)}"
                            f"is newer than the pack knows, and in its model of {family_name} {what}.")


def check_model_type(family, base_model):
    """Raise UnsupportedError where ComfyUI samples a model of the family in a way that the pack does not know."""
    name = base_model.model_type.name
    if name not in MODEL_TYPES | TYPES_OF.get(family.name, set()):
        raise newer_comfyui(family.name, f"the model type is {name}, by which xDiT does not sample it")


def refuse_new_keys(family_name, diffusion_model, names):
    """Raise UnsupportedError where ComfyUI's model reads conditioning of these names that the pack does not know."""
    found = new_keys(diffusion_model, names)
    if found:
        raise newer_comfyui(family_name, f"the conditioning has {', '.join(found)}, which xDiT does not read")


def new_keys(diffusion_model, names):
    """Return those of these names of conditioning that ComfyUI's class of the model reads itself, and not in 0.30.

    diffusion_model: ComfyUI's. A name in a dict, which ComfyUI alone makes, has the dict's name and a dot before
    it."""
    read = names_in_methods(type(diffusion_model))
    return [name for name in names if name not in REFUSED_KEYS and name.partition(".")[0] in read]


def names_in_methods(cls):
    """Return the names of arguments and the strings in the code of ComfyUI's methods of a class."""
    methods = [method for each in cls.__mro__ if each.__module__.partition(".")[0] == "comfy"
               for method in vars(each).values() if inspect.isfunction(method)]
    return {word for method in methods for word in _names_in_code(method.__code__)}


def _names_in_code(code):
    yield from code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif inspect.iscode(constant):
            yield from _names_in_code(constant)
