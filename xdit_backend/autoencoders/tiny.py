"""Tiny autoencoders (TAESD) of pictures, of any latent's channels but Flux.2's."""

import re

from ..protocol.errors import CheckpointError
from .family import VaeFamily, size_of


def _config(shapes, settings):
    given = size_of(shapes)
    if any(".pool." in name for name in shapes):
        raise CheckpointError("It is a tiny autoencoder of Flux.2's latents, whose blocks have norms.")
    return {"latent_channels": given("taesd_decoder.1.weight", 1) or given("taesd_encoder.14.weight", 0)}


def _convert(tensors, config):
    """Layers are numbered alike, but that ComfyUI's decoder begins with a clamp. Scale and shift are the host's."""
    def renamed(name):
        name = name.replace("taesd_encoder.", "encoder.layers.")
        return re.sub(r"taesd_decoder\.(\d+)", lambda match: f"decoder.layers.{int(match[1]) - 1}", name)
    return {renamed(name): tensor for name, tensor in tensors.items()}


TINY = VaeFamily(
    models=("TAESD",),
    autoencoder="AutoencoderTiny",
    markers=("taesd_decoder.", "taesd_encoder."),
    decoder=("taesd_decoder.",),
    encoder=("taesd_encoder.",),
    config=_config,
    convert=_convert,
)
