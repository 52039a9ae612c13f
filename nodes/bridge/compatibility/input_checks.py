"""Input checks: reject latents, conditioning and link values that cannot work, before the workers get them."""

import torch

from ....xdit_backend.config import ParallelConfig
from ....xdit_backend.protocol.errors import ConfigError

# inputs that links of any type, such as a reroute's, can provide
TEXTS = "text", "label", "model_name", "weight_dtype", "ckpt_name"
NEEDED = {"model": "a MODEL", "vae": "a VAE", "samples": "a LATENT", "latent_image": "a LATENT", "pixels": "an IMAGE",
          "image": "an IMAGE", "upscale_model": "an UPSCALE_MODEL",
          "positive": "a CONDITIONING", "negative": "a CONDITIONING", "parallel": "the output of xDiT Parallel Config",
          **dict.fromkeys(TEXTS, "a text")}
# types of values that a prompt of ComfyUI's API can have in place of a link
PLAIN = type(None), bool, int, float, str, list, dict
MAX_SHOWN = 60                             # characters of a value in a message


def check_links(**inputs):
    """Raise ConfigError for a value that is not the output of a node. ComfyUI checks only the types of links and passes
    other values on."""
    for name, value in inputs.items():
        if name in ("samples", "latent_image"):
            fits = isinstance(value, dict) and hasattr(value.get("samples"), "shape")
        elif name in ("positive", "negative"):
            fits = (isinstance(value, list)
                    and all(isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[1], dict)
                           and not isinstance(entry[0], PLAIN) for entry in value))
        elif name in TEXTS:
            fits = isinstance(value, str)
        elif name == "parallel":
            fits = value is None or isinstance(value, ParallelConfig)
        else:
            fits = torch.is_tensor(value) if name in ("pixels", "image") else not isinstance(value, PLAIN)
        if not fits:
            raise ConfigError(f"Connect the output of a suitable node: {name} is {str(value)[:MAX_SHOWN]}, and must be "
                              f"{NEEDED[name]}.")


def check_call(family, x, timestep, context):
    """Raise ConfigError for a call of the diffusion model by a node for another kind of model."""
    is_list = family.inputs.components.names and isinstance(x, list)
    if not (is_list or torch.is_tensor(timestep)) or (
            "context" in family.inputs.conditioning and not torch.is_tensor(context)):
        raise ConfigError("Use a sampler node, or a model that the node supports: it calls this MODEL with other "
                          f"arguments than the latent, timestep and conditioning that {family.name} takes.")


def check_latent(setup, x, channels=None):
    """Raise ConfigError for a latent of another model. channels: if x has more channels than the latent alone."""
    family, own, num_dims = setup.family, setup.latent_format.latent_channels, setup.latent_format.latent_dimensions
    if family.inputs.components.names and getattr(x, "is_nested", False):
        x = family.inputs.components.split(x.unbind(), torch.zeros(1), setup.transformer_config, {})[0]
        own = setup.num_channels
    channels = channels or own
    if not torch.is_tensor(x) or x.is_nested or x.ndim != num_dims + 2 or x.shape[1] != channels:
        actual = (f"the shape {tuple(x.shape)}" if torch.is_tensor(x) and not x.is_nested else "several components")
        needs = f"{channels} channels, " + ("frames, rows and columns" if num_dims == 3 else "rows and columns")
        mask = ", or remove the node that adds channels to it, such as a noise mask" if channels > own else ""
        raise ConfigError(f"Use the VAE or the empty latent node that belongs to this model{mask}: the latent has "
                          f"{actual}, and {family.name} needs (batch, {needs}). It was made for another model.")
    if 0 in x.shape:
        raise ConfigError("Move, enlarge or remove an area that lies outside the image: the latent, or the area of it "
                          f"that a prompt is for, is empty (its shape is {tuple(x.shape)}).")
    family.inputs.check_size(tuple(x.shape), setup.transformer_config)


def check_text(family, text):
    """Raise ConfigError for a prompt without tokens, with which ComfyUI's model fails for most families.
    text: (B, tokens, width), or None."""
    if torch.is_tensor(text) and text.ndim > 1 and not text.shape[1]:
        raise ConfigError("Encode an empty text with the text encoder's node for an empty prompt: the conditioning has "
                          f"no text tokens (its shape is {tuple(text.shape)}), and {family.name} needs at least one.")


def check_conditioning(setup, conditioning, x):
    """Raise ConfigError for text or reference latents of another model. conditioning: {name: tensor}. x: the latent."""
    family, num_classes = setup.family, setup.num_classes
    for reference in (tensor for name, tensor in conditioning.items() if name.startswith("ref_latents.")):
        if reference.ndim != x.ndim or reference.shape[1] != x.shape[1]:
            raise ConfigError("Encode the reference image with this model's VAE: the conditioning has a reference "
                              f"latent of {reference.shape[1]} channels and {reference.ndim} dims, and this "
                              f"{family.name} model needs {x.shape[1]} and {x.ndim}. Models with other image inputs "
                              "(Fill, Canny, Depth) support no reference latents.")
    if family.has_frames_as_batch and len(x) % len(conditioning["num_video_frames"]):
        num_frames = len(conditioning["num_video_frames"])
        raise ConfigError("Set dim to 0 in the context window node, and causal_window_fix to false: the conditioning "
                          f"is for {num_frames} frames, and the latent has {len(x)} images, which are the frames of "
                          f"{family.name}.")
    maker = "xDiT Class Label" if num_classes else "the CLIP that belongs to this model"
    for name, argument in family.inputs.conditioning.items():
        if argument is None or name not in conditioning:
            continue
        width, needed = conditioning[name].shape[-1], setup.transformer_config[argument]
        if needed is None:                                 # a model without this input, as in ComfyUI
            continue
        # a wider pooled text is truncated
        if width < needed or (width > needed and name != "y"):
            what = {"y": "pooled text", "clip_fea": "CLIP vision tokens"}.get(name, "text")
            raise ConfigError(f"Use {maker}: the conditioning has {what} of {width} channels, and this {family.name} "
                              f"model needs {needed}. It was made by another text encoder.")


def check_finite(tensors, what, hint):
    """Raise ConfigError for tensors with NaN or infinite values. what: their description. hint: the remedy."""
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise ConfigError(f"{hint}: {what} contains NaN or infinite values, so no image can be generated.")
