"""TripoSplat's latents, a row of shape tokens and a camera token: components of a call and arguments of the forward.

# B batch, T tokens of the shape, C numbers of each
"""

from dataclasses import dataclass

from ..protocol.errors import ConfigError
from .common.inputs import PaddedByModel

MOST_TOKENS, CAMERA = 8192, 5              # positions in the class's table; values of the camera token


@dataclass(frozen=True)
class Row(PaddedByModel):
    """A row of tokens (B, C, rows, columns), which the forward takes and returns as (B, T, C)."""

    def __call__(self, call):
        return [call.latent.flatten(2).transpose(1, 2), call.conditioning["camera"]]

    def unpack(self, output, latent):
        return output.transpose(1, 2).unflatten(2, latent.shape[2:])


def split_components(latents, times, config, options):
    """Return the tokens as (B, C, T, 1), their timestep, and for this call the camera (B, 1, 5)."""
    tokens, *cameras = latents
    width = config["in_channels"]
    if (tokens.ndim != 3 or tokens.shape[2] != width or tokens.shape[1] > MOST_TOKENS or len(cameras) != 1
        or cameras[0].shape[1:] != (1, CAMERA)):
        raise ConfigError("Make the latent with TripoSplat Conditioning: its components have the shapes "
                          f"{', '.join(str(tuple(part.shape)) for part in latents)}, and TripoSplat needs up to "
                          f"{MOST_TOKENS} tokens of {width} values and a camera of (batch, 1, {CAMERA}).")
    times = times[0] if isinstance(times, tuple) else times
    return tokens.transpose(1, 2).unsqueeze(3), times, {"camera": cameras[0]}


def first_component(tokens):
    """(B, C, rows, columns) -> (B, T, C), ComfyUI's layout."""
    return tokens.flatten(2).transpose(1, 2)


def call_shapes(config, shape, length=None):
    """Shapes of what split_components returns, {name: shape}, for tokens of this shape."""
    return {"camera": (shape[0], 1, CAMERA)}


def unfold(conditioning):
    """Replace ref_latents by its first image, the only one that ComfyUI's model reads."""
    references = conditioning.get("ref_latents")
    if references is None:
        return conditioning
    rest = {name: value for name, value in conditioning.items() if name != "ref_latents"}
    return rest | {"reference_image": references[0]} if len(references) else rest


def reference_images(call):
    """The reference image as a list of one, (B, C, rows, columns); None without one. Raises ConfigError for another
    number of channels."""
    image = call.conditioning.get("reference_image")
    if image is None:
        return None
    needed = call.config["cond2_channels"]
    if image.ndim != 4 or image.shape[1] != needed:
        raise ConfigError("Connect Flux.2's VAE to TripoSplat Conditioning: the image's latent has the shape "
                          f"{tuple(image.shape)}, and this model takes {needed} channels.")
    return [image.expand(len(call.latent), *image.shape[1:])]
