"""Networks that ComfyUI's nodes put inside a MODEL, and that read what its layers have: the workers run them. Used by
remote_model.py.

What such a network computes is xdit_backend/hooks/injected_networks.py; here are its weights, and the picture that it
follows, as the node's own code prepares them.
"""

import functools
import math

import torch

from ....xdit_backend.host.injected_networks import Network
from ....xdit_backend.protocol import specs
from ....xdit_backend.protocol.errors import ConfigError, UnsupportedError
from ..compatibility.block_patches import hearing, lllites_in, networks_in, styles_in
from .image_adapters import adapters_of

WHERE = {"attn1_patch": "attn1", "attn2_patch": "attn2", "double_block": "blocks"}
# classes of a hypernetwork's layers -> what specs.NetworkSpec calls them
LAYERS = {"Linear": "linear", "LayerNorm": "layer_norm", "ReLU": "relu", "LeakyReLU": "leaky_relu", "ELU": "elu",
          "Hardswish": "hardswish", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softsign": "softsign", "Mish": "mish"}


def networks_of(family, config, transformer_options, x, modules):
    """(((specs.NetworkUse, Network), ...), {name: picture}) of a call; x: its latent. A picture: (B or 1, T, C).
    modules: of remember_modules.

    Raises UnsupportedError where ComfyUI's model would not run the network as the node means it, ConfigError for one of
    another model.
    """
    uses, images = [], {}
    for kind, functions in networks_in(transformer_options).items():
        if kind == "double_block" and not any(list_.added == kind for list_ in family.blocks) or (
                kind != "double_block" and not family.takes_unet_patches):
            raise UnsupportedError(f"Remove the node that adds model patches ({kind}): it is for other models than "
                                   f"{family.name}.")
        for function in functions:
            if kind == "double_block":
                name = f"picture.{len(images)}"
                images[name] = _image(function, family, config, x)
                network = _blockwise(function.model_patch.model, family, config)
            else:
                name, network = "", _hypernetwork(function.hypernet)
            uses.append((specs.NetworkUse(network.name, WHERE[kind], float(function.strength), name), network))
    for patch in lllites_in(transformer_options):
        if not family.plan.lllite_targets:
            raise UnsupportedError(f"Remove the node that adds an LLLite: it is for other models than {family.name}.")
        sigma = transformer_options["sigmas"].max().item()
        if patch.strength != 0 and patch.sigma_end <= sigma <= patch.sigma_start:
            name = f"picture.{len(images)}"
            images[name] = _followed(patch, family, config, x)
            network = _lllite(patch.model_patch.model)
            uses.append((specs.NetworkUse(network.name, "layers", float(patch.strength), name), network))
    return (*uses, *_hearing(family, config, transformer_options, x),
            *adapters_of(family, config, transformer_options, x, modules)), images


def style_of(family, config, transformer_options, x):
    """{"style": (B, T, C)} of a call with USO's tokens, which ComfyUI's own code makes of a picture; {} without. x: its
    latent.

    Raises UnsupportedError where ComfyUI's model is no Flux.1, ConfigError where it fails.
    """
    functions = styles_in(transformer_options)
    if not functions:
        return {}
    if "style" not in family.conditioning:
        raise UnsupportedError(f"Remove USO Style Reference: it is for Flux.1, and this is {family.name}.")
    given = {"txt": x.new_zeros(1, 0, family.width(config)), "txt_ids": x.new_zeros(1, 0, 3)}
    for function in functions:
        width = function.model_patch.model(function.encoded_image.to(x.dtype)).shape[-1]
        if width != family.width(config) or len(x) != 1:
            raise ConfigError("Use batch_size 1, cfg 1 and a USO model patch that was made for this model: the one "
                              f"given makes tokens of {width} channels for one image, and this {family.name} model "
                              f"has {family.width(config)} and is asked for {len(x)} images at once.")
        given = function(given)
    return {"style": given["txt"]}


def _hearing(family, config, transformer_options, x):
    """What of networks_of is of InfiniteTalk: its weights, and the sound, which the node has made tokens of."""
    functions, masks = hearing(transformer_options)
    if not functions:
        return []
    if family.is_unet or not family.plan.audio_attention:
        raise UnsupportedError(f"Remove WanInfiniteTalkToVideo: it is for Wan, and this is {family.name}.")
    audio = transformer_options["audio_embeds"]               # (1, frames, T of one for all speakers, C)
    _check_hearing(family, audio, masks, x)
    found = []
    for function in functions:
        net = function.model_patch.model
        blocks, (width,) = net.blocks, net.blocks[0].norm_x.weight.shape
        _check_blocks(len(blocks), width, family, config)
        network = Network(f"network-{id(net)}-{id(audio)}-{id(masks)}",
                          functools.partial(_with_audio, blocks, audio, masks),
                          {"heads": str(blocks[0].audio_cross_attn.num_heads)})
        found.append((specs.NetworkUse(network.name, "audio", float(function.audio_scale)), network))
        masks = None                                           # the first takes them out of ComfyUI's options
    return found


def _check_hearing(family, audio, masks, x):
    frames, *sides = family.latent.counts(x.shape)
    if audio.shape[1] != frames:
        raise ConfigError("Use the latent that WanInfiniteTalkToVideo gives: its sound is of "
                          f"{audio.shape[1]} frames of latents, and this latent has {frames}.")
    if masks is not None and len(masks) != 2:
        raise ConfigError("Give WanInfiniteTalkToVideo one picture as mask_1 and one as mask_2: it has "
                          f"{len(masks)} of them for two speakers.")
    if masks is not None and masks.shape[1] != math.prod(sides):
        raise ConfigError("Set width and height of WanInfiniteTalkToVideo to multiples of 16 and use the latent that "
                          f"it gives: its masks are of {masks.shape[1]} tokens of a frame, and this latent has "
                          f"{math.prod(sides)}.")


def _with_audio(blocks, audio, masks):
    return blocks.state_dict() | {"audio": audio[0]} | ({} if masks is None else {"masks": masks.float()})


def _lllite(net):
    return Network(f"network-{id(net)}", lambda: {name: tensor for name, tensor in net.state_dict().items()
                                                  if not name.startswith("lllite_conditioning")})


def _followed(patch, family, config, x):
    """What an LLLite follows, for each token, as ComfyUI's own code makes it of the picture."""
    if x.shape[2] != 1:
        raise ConfigError(f"Use a latent of one frame: an LLLite is for pictures, and this latent has {x.shape[2]}.")
    if patch.model_patch.model.model_dim != family.width(config):
        raise ConfigError(f"Use an LLLite that was made for this model: the one given is for "
                          f"{patch.model_patch.model.model_dim} channels, and this {family.name} model has "
                          f"{family.width(config)}.")
    options = {"model_patch_data": {}}
    patch({"x": family.latent.padded(x), "transformer_options": options})
    image = options["model_patch_data"][patch]
    if len(x) % len(image):
        raise ConfigError(f"Use one picture, or as many as there are latents, for the LLLite: {len(image)} do not "
                          f"fit {len(x)} latents.")
    return image.to(x.dtype) if len(image) == 1 else image.to(x.dtype).repeat(len(x) // len(image), 1, 1)


def _blockwise(net, family, config):
    blocks = net.controlnet_blocks
    width, = blocks[0].x_rms.weight.shape
    _check_blocks(len(blocks), width, family, config)
    return Network(f"network-{id(net)}", blocks.state_dict)


def _check_blocks(number, width, family, config):
    if number < family.num_blocks(config) or width != family.width(config):
        raise ConfigError(f"Use a model patch that was made for this model: the one given is for {number} blocks "
                          f"of {width} channels, and this {family.name} model has {family.num_blocks(config)} of "
                          f"{family.width(config)}.")


def _image(patch, family, config, x):
    """What the network follows, at the latent's size: ComfyUI's own code prepares it, when it is called for a block."""
    tokens = family.latent.num_tokens(x.shape)
    patch({"x": x, "img": torch.zeros(1, tokens, family.width(config), dtype=x.dtype, device=x.device),
           "block_index": 0})
    image = patch.encoded_image
    if image.shape[0] not in (1, len(x)) or image.shape[1] != tokens:
        raise ConfigError(f"Use one picture, or as many as there are latents, for the model patch: its {len(image)} "
                          f"of {image.shape[1]} tokens do not fit {len(x)} latents of {tokens}.")
    return image.to(x.dtype)


def _hypernetwork(by_width):
    """by_width: {channels: modules for keys and for values}. Raises UnsupportedError for layers that draw at random."""
    settings = {}
    for width, pair in by_width.items():
        for which, layers in enumerate(pair):
            unknown = [type(layer).__name__ for layer in layers if type(layer).__name__ not in LAYERS]
            if unknown:
                raise UnsupportedError("Use another hypernetwork, or Load Diffusion Model: this one has layers that "
                                       f"xDiT does not run ({', '.join(dict.fromkeys(unknown))}).")
            settings[f"{width}.{which}"] = " ".join(LAYERS[type(layer).__name__] for layer in layers)
    return Network(f"network-{id(by_width)}", functools.partial(_weights, by_width), settings)


def _weights(by_width):
    return {f"{width}.{which}.{name}": tensor for width, pair in by_width.items() for which, layers in enumerate(pair)
            for name, tensor in layers.state_dict().items()}
