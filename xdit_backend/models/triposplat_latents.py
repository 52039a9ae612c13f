"""TripoSplat's latents, a row of tokens and one that says the camera: how a call hands them over, what the forward is
given.

# B batch, T tokens of the shape, C numbers of each
"""

from dataclasses import dataclass

from ..protocol.errors import ConfigError
from .common.inputs import PaddedByModel

MOST_TOKENS, CAMERA = 8192, 5              # places that the class has; numbers of the camera


@dataclass(frozen=True)
class Row(PaddedByModel):
    """A row of tokens (B, C, rows, columns), which the forward takes and gives as (B, T, C)."""

    def __call__(self, call):
        return [call.latent.flatten(2).transpose(1, 2), call.conditioning["camera"]]

    def unpack(self, output, latent):
        return output.transpose(1, 2).unflatten(2, latent.shape[2:])


def split_components(latents, times, config, options):
    """The tokens as (B, C, T, 1), their timestep, and of this call: the camera, (B, 1, 5)."""
    tokens, *cameras = latents
    width = config["in_channels"]
    if (tokens.ndim != 3 or tokens.shape[2] != width or tokens.shape[1] > MOST_TOKENS or len(cameras) != 1
            or cameras[0].shape[1:] != (1, CAMERA)):
        raise ConfigError("Make it with TripoSplat Conditioning: the latent has parts of the shapes "
                          f"{', '.join(str(tuple(part.shape)) for part in latents)}, and TripoSplat works on up to "
                          f"{MOST_TOKENS} tokens of {width} numbers and a camera of (batch, 1, {CAMERA}).")
    times = times[0] if isinstance(times, tuple) else times
    return tokens.transpose(1, 2).unsqueeze(3), times, {"camera": cameras[0]}


def first_component(tokens):
    """(B, C, rows, columns) -> (B, T, C), as ComfyUI has them."""
    return tokens.flatten(2).transpose(1, 2)


def call_shapes(config, shape, length=None):
    """{name: shape} of what split_components makes, for tokens of this shape."""
    return {"camera": (shape[0], 1, CAMERA)}


def unfold(conditioning):
    """With the picture, of which ComfyUI's model reads the first, by itself."""
    pictures = conditioning.get("ref_latents")
    if pictures is None:
        return conditioning
    rest = {name: value for name, value in conditioning.items() if name != "ref_latents"}
    return rest | {"picture": pictures[0]} if len(pictures) else rest


def pictures(call):
    """The picture as a list of one, (B, C, rows, columns); None where there is none. Raises ConfigError."""
    picture = call.conditioning.get("picture")
    if picture is None:
        return None
    needed = call.config["cond2_channels"]
    if picture.ndim != 4 or picture.shape[1] != needed:
        raise ConfigError("Connect Flux.2's VAE to TripoSplat Conditioning: the picture's latent has the shape "
                          f"{tuple(picture.shape)}, and this model takes {needed} channels.")
    return [picture.expand(len(call.latent), *picture.shape[1:])]
