"""Refuses latents, conditioning and values in the place of links that cannot give a picture, before the workers see
them. Used by remote_model.py, and by the nodes."""

import torch

from ....xdit_backend.config import ParallelConfig
from ....xdit_backend.protocol.errors import ConfigError

# which links of any type can bring, such as a reroute's
TEXTS = "text", "label", "model_name", "weight_dtype", "ckpt_name"
NEEDED = {"model": "a MODEL", "vae": "a VAE", "samples": "a LATENT", "latent_image": "a LATENT", "pixels": "an IMAGE",
          "positive": "a CONDITIONING", "negative": "a CONDITIONING", "parallel": "what xDiT Parallel Config makes",
          **dict.fromkeys(TEXTS, "a text")}
# what a prompt of ComfyUI's API can have where a link belongs
PLAIN = type(None), bool, int, float, str, list, dict
MAX_SHOWN = 60                             # characters of what was given


def check_links(**given):
    """Refuse what is not the output of a node. ComfyUI checks the types of links, and passes any other value on
    unchecked. Raises ConfigError."""
    for name, value in given.items():
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
            fits = torch.is_tensor(value) if name == "pixels" else not isinstance(value, PLAIN)
        if not fits:
            raise ConfigError(f"Connect the output of a node that makes it: {name} is {str(value)[:MAX_SHOWN]}, and "
                              f"needs {NEEDED[name]}.")


def check_call(family, x, timestep, context):
    """Refuse a call of the diffusion model by a node that is for another kind. Raises ConfigError."""
    in_parts = family.components and isinstance(x, list)
    if not (in_parts or torch.is_tensor(timestep)) or (
            "context" in family.conditioning and not torch.is_tensor(context)):
        raise ConfigError("Use a sampler node, or the kind of model that the node is for: it calls this MODEL in a "
                          f"way of its own, and {family.name} takes a latent, a timestep and conditioning.")


def check_latent(setup, x, channels=None):
    """Refuse a latent of another model. channels: where it is not the latent alone. Raises ConfigError."""
    family, own, num_dims = setup.family, setup.latent_format.latent_channels, setup.latent_format.latent_dimensions
    if family.components and getattr(x, "is_nested", False):
        x = family.split_components(x.unbind(), torch.zeros(1), setup.transformer_config, {})[0]
        own = setup.num_channels
    channels = channels or own
    if not torch.is_tensor(x) or x.is_nested or x.ndim != num_dims + 2 or x.shape[1] != channels:
        given = f"the shape {tuple(x.shape)}" if torch.is_tensor(x) and not x.is_nested else "several parts"
        needs = f"{channels} channels, " + ("frames, rows and columns" if num_dims == 3 else "rows and columns")
        mask = ", or remove what puts channels beside it, such as a noise mask" if channels > own else ""
        raise ConfigError(f"Use the VAE or the empty latent node that belongs to this model{mask}: the latent has "
                          f"{given}, and {family.name} works on (batch, {needs}). It was made for another model.")
    if 0 in x.shape:
        raise ConfigError("Move or enlarge an area that lies outside of the picture, or remove it: the latent, or "
                          f"the area of it that a prompt is for, is empty (its shape is {tuple(x.shape)}).")


def check_text(family, text):
    """Refuse a prompt of no tokens: with most families ComfyUI fails, before the workers see it.
    text: (B, tokens, width), or None."""
    if torch.is_tensor(text) and text.ndim > 1 and not text.shape[1]:
        raise ConfigError("For an empty prompt use the text encoder's node with an empty text: the conditioning has "
                          f"a text of no tokens (its shape is {tuple(text.shape)}), and {family.name} takes one or "
                          "more.")


def check_conditioning(setup, conditioning, x):
    """Refuse text or reference latents of another model. conditioning: {name: tensor}. x: the latent.
    Raises ConfigError."""
    family, num_classes = setup.family, setup.num_classes
    for reference in (tensor for name, tensor in conditioning.items() if name.startswith("ref_latents.")):
        if reference.ndim != x.ndim or reference.shape[1] != x.shape[1]:
            raise ConfigError("Encode the reference picture with this model's VAE: the conditioning has a reference "
                              f"latent of {reference.shape[1]} channels and {reference.ndim} dims, and this "
                              f"{family.name} model takes {x.shape[1]} and {x.ndim}. Models that take pictures "
                              "otherwise (Fill, Canny, Depth) take none.")
    if family.has_frames_as_batch and len(x) % len(conditioning["num_video_frames"]):
        num_frames = len(conditioning["num_video_frames"])
        raise ConfigError("Set dim to 0 in the context window node, and causal_window_fix to false: the conditioning "
                          f"is of {num_frames} frames and the latent has {len(x)} images, which of {family.name} are "
                          "the frames.")
    maker = "xDiT Class Label" if num_classes else "the CLIP that belongs to this model"
    for name, argument in family.conditioning.items():
        if argument is None or name not in conditioning:
            continue
        given, needed = conditioning[name].shape[-1], setup.transformer_config[argument]
        if needed is None:                                 # a model without this input, as ComfyUI's
            continue
        # of a wider pooled text the first numbers count
        if given < needed or (given > needed and name != "y"):
            what = {"y": "pooled text", "clip_fea": "a picture's CLIP vision tokens"}.get(name, "text")
            raise ConfigError(f"Use {maker}: the conditioning has {what} of {given} numbers a token, and this "
                              f"{family.name} model takes {needed}. It was made by another text encoder.")


def check_finite(tensors, what, hint):
    """Refuse tensors with NaN or infinite numbers. what: they are. hint: what to do. Raises ConfigError."""
    if not all(tensor.isfinite().all() for tensor in tensors):
        raise ConfigError(f"{hint}: {what} has numbers that are not finite (NaN or infinite), and no picture can "
                          f"come of it.")
