"""Networks that ComfyUI's nodes put inside a MODEL and that read its layers' activations, for the workers to run.

Their computation is in xdit_backend/hooks/injected_networks.py. This module provides their weights and the control
image, as the node's own code prepares them.
"""

import functools
import hashlib
import math

import torch

from ....xdit_backend.host.injected_networks import Network
from ....xdit_backend.protocol import specs
from ....xdit_backend.protocol.errors import ConfigError, UnsupportedError
from ..compatibility.block_patches import audio_networks_in, lllites_in, networks_in, styles_in, text_blocks
from ..compatibility.forward_patches import text_guide
from ..compatibility.text_attention import KIND, active_guides
from .image_adapters import adapters_of

WHERE = {"attn1_patch": "attn1", "attn2_patch": "attn2", "double_block": "blocks"}
# class names of a hypernetwork's layers -> names in specs.NetworkSpec
LAYERS = {"Linear": "linear", "LayerNorm": "layer_norm", "ReLU": "relu", "LeakyReLU": "leaky_relu", "ELU": "elu",
          "Hardswish": "hardswish", "Tanh": "tanh", "Sigmoid": "sigmoid", "Softsign": "softsign", "Mish": "mish"}


def networks_of(family, config, transformer_options, x, modules, forwards):
    """Return (((specs.NetworkUse, Network), ...), {name: control image}) for a call. x: its latent. A control image is
    (B or 1, T, C). modules: of remember_modules. forwards: ForwardPatches.

    Raises UnsupportedError if ComfyUI's model would not run the network as the node intends, ConfigError for a network
    of another model.
    """
    uses, images = [], {}
    for kind, functions in networks_in(transformer_options).items():
        if kind == "double_block" and not any(list_.added == kind for list_ in family.blocks) or (
                kind != "double_block" and not family.plan.takes_unet_patches):
            raise UnsupportedError(f"Remove the node that adds model patches ({kind}): it does not support "
                                   f"{family.name}.")
        for function in functions:
            if kind == "double_block":
                name = f"image.{len(images)}"
                images[name] = _image(function, family, config, x)
                network = _blockwise(function.model_patch.model, family, config)
            else:
                name, network = "", _hypernetwork(function.hypernet)
            uses.append((specs.NetworkUse(network.name, WHERE[kind], float(function.strength), name), network))
    for patch in lllites_in(transformer_options):
        if not family.plan.lllite_targets:
            raise UnsupportedError(f"Remove the node that adds an LLLite: it does not support {family.name}.")
        sigma = transformer_options["sigmas"].max().item()
        if patch.strength != 0 and patch.sigma_end <= sigma <= patch.sigma_start:
            name = f"image.{len(images)}"
            images[name] = _control_image(patch, family, config, x)
            network = _lllite(patch.model_patch.model)
            uses.append((specs.NetworkUse(network.name, "layers", float(patch.strength), name), network))
    return (*uses, *_audio_networks(family, config, transformer_options, x),
            *_text_guides(family, config, x, forwards.guides(modules)),
            *adapters_of(family, config, transformer_options, x, modules),
            *_unet_guides(family, config, transformer_options, x)), images


def style_of(family, config, transformer_options, x):
    """Return {"style": (B, T, C)} for a call with USO's tokens, which ComfyUI's own code computes from an image; {}
    without. x: its latent.

    Raises UnsupportedError if ComfyUI's model is not Flux.1, ConfigError if the patch does not fit the model.
    """
    functions = styles_in(transformer_options)
    if not functions:
        return {}
    if "style" not in family.inputs.conditioning:
        raise UnsupportedError(f"Remove USO Style Reference: it is for Flux.1, and this is {family.name}.")
    arguments = {"txt": x.new_zeros(1, 0, family.width(config)), "txt_ids": x.new_zeros(1, 0, 3)}
    for function in functions:
        width = function.model_patch.model(function.encoded_image.to(x.dtype)).shape[-1]
        if width != family.width(config) or len(x) != 1:
            raise ConfigError("Use batch_size 1, cfg 1 and a USO model patch that was made for this model: this one "
                              f"makes tokens of {width} channels for one image, and this {family.name} model needs "
                              f"{family.width(config)} channels and is called for {len(x)} images at once.")
        arguments = function(arguments)
    return {"style": arguments["txt"]}


def _text_guides(family, config, x, functions):
    """Normalized Attention Guidance of the attention to the text, of WanVideoNAG. functions: of ForwardPatches.guides.

    Raises UnsupportedError for a model whose attention the workers do not guide, and for a batch that the node does not
    guide image by image.
    """
    if not functions:
        return []
    if family.plan.is_unet or not family.plan.text_attention:
        raise UnsupportedError("Remove the node that guides attention to the text (such as WanVideoNAG): xDiT does not "
                               f"support it for {family.name}.")
    guides = {(id(text), *strengths): (text, *strengths) for text, *strengths in map(text_guide, functions.values())}
    if len(guides) > 1 or len(functions) != family.num_blocks(config):
        raise UnsupportedError("Use one node that guides attention to the text, in all blocks: xDiT does not support "
                               f"{len(guides)} of them in {len(functions)} of {family.num_blocks(config)} blocks.")
    [(text, scale, alpha, tau, is_of_all)] = guides.values()
    if len(x) > 2 and not is_of_all:
        raise UnsupportedError("Set batch_size to 1, or input_type of WanVideoNAG to batch with cfg 1: otherwise the "
                               f"node mixes the images of a batch, and this call has {len(x)}.")
    num_guided = len(x) if is_of_all else 1
    network = Network(f"network-{id(text)}-{scale}-{alpha}-{tau}", lambda: {"text": text},
                      {"scale": str(scale), "alpha": str(alpha), "tau": str(tau)})
    rows = tuple((int(index >= num_guided), 0) for index in range(len(x)))
    return [(specs.NetworkUse(network.name, "guide", 1.0, rows=rows), network)]


def _unet_guides(family, config, transformer_options, x):
    """Normalized Attention Guidance of a U-Net's attention to the text, of sd-perturbed-attention: a network for the
    guides of the same strengths in all blocks, in the order in which they act."""
    if not (family.plan.is_unet and transformer_options.get("patches_replace", {}).get(KIND)):
        return []
    by_block = active_guides(text_blocks(family, config), transformer_options)
    prompts, networks = transformer_options.get("cond_or_uncond", ()), {}
    for block, guides in by_block.items():
        for number, guide in enumerate(guides):
            networks.setdefault((number, guide.strengths), {})[block] = guide
    rows = tuple((int(prompt != 0), 0) for prompt in prompts for _ in range(len(x) // len(prompts)))
    found = []
    for (_, strengths), by_block in sorted(networks.items()):
        ids = strengths, [(block, id(guide.keys), id(guide.values)) for block, guide in by_block.items()]
        network = Network(f"guide-{hashlib.sha256(repr(ids).encode()).hexdigest()}",
                          functools.partial(_keys_and_values, by_block),
                          dict(zip(("scale", "alpha", "tau"), map(str, strengths))))
        found.append((specs.NetworkUse(network.name, "guide", 1.0, rows=rows), network))
    return found


def _keys_and_values(by_block):
    return {f"{block}.{kind}": getattr(guide, kind).cpu() for block, guide in by_block.items()
            for kind in ("keys", "values")}


def _audio_networks(family, config, transformer_options, x):
    """InfiniteTalk's networks with their weights and the audio tokens that the node has computed."""
    functions, masks = audio_networks_in(transformer_options)
    if not functions:
        return []
    if not family.plan.audio_attention:
        raise UnsupportedError(f"Remove WanInfiniteTalkToVideo: it is for Wan, and this is {family.name}.")
    audio = transformer_options["audio_embeds"]               # (1, frames, T of one for all speakers, C)
    _check_audio(family, audio, masks, x)
    found = []
    for function in functions:
        model = function.model_patch.model
        blocks, (width,) = model.blocks, model.blocks[0].norm_x.weight.shape
        _check_blocks(len(blocks), width, family, config)
        network = Network(f"network-{id(model)}-{id(audio)}-{id(masks)}",
                          functools.partial(_with_audio, blocks, audio, masks),
                          {"heads": str(blocks[0].audio_cross_attn.num_heads)})
        found.append((specs.NetworkUse(network.name, "audio", float(function.audio_scale)), network))
        masks = None                                           # the first one removes them from ComfyUI's options
    return found


def _check_audio(family, audio, masks, x):
    frames, *sides = family.inputs.latent.counts(x.shape)
    if audio.shape[1] != frames:
        raise ConfigError("Use the latent that WanInfiniteTalkToVideo outputs: its audio is for "
                          f"{audio.shape[1]} latent frames, and this latent has {frames}.")
    if masks is not None and len(masks) != 2:
        raise ConfigError("Connect one image to mask_1 and one to mask_2 of WanInfiniteTalkToVideo: it has "
                          f"{len(masks)} masks for two speakers.")
    if masks is not None and masks.shape[1] != math.prod(sides):
        raise ConfigError("Set width and height of WanInfiniteTalkToVideo to multiples of 16 and use the latent that "
                          f"it outputs: its masks have {masks.shape[1]} tokens for each frame, and this latent has "
                          f"{math.prod(sides)}.")


def _with_audio(blocks, audio, masks):
    return blocks.state_dict() | {"audio": audio[0]} | ({} if masks is None else {"masks": masks.float()})


def _lllite(model):
    return Network(f"network-{id(model)}", lambda: {name: tensor for name, tensor in model.state_dict().items()
                                                    if not name.startswith("lllite_conditioning")})


def _control_image(patch, family, config, x):
    """An LLLite's features for each token, which ComfyUI's own code computes from the control image."""
    if x.shape[2] != 1:
        raise ConfigError(f"Use a latent of one frame: LLLite is for images, and this latent has {x.shape[2]} frames.")
    if patch.model_patch.model.model_dim != family.width(config):
        raise ConfigError(f"Use an LLLite that was made for this model: this one has "
                          f"{patch.model_patch.model.model_dim} channels, and this {family.name} model has "
                          f"{family.width(config)}.")
    options = {"model_patch_data": {}}
    patch({"x": family.inputs.latent.padded(x), "transformer_options": options})
    image = options["model_patch_data"][patch]
    if len(x) % len(image):
        raise ConfigError(f"Use one control image, or as many as latents, for the LLLite: {len(image)} do not fit "
                          f"{len(x)} latents.")
    return image.to(x.dtype) if len(image) == 1 else image.to(x.dtype).repeat(len(x) // len(image), 1, 1)


def _blockwise(model, family, config):
    blocks = model.controlnet_blocks
    width, = blocks[0].x_rms.weight.shape
    _check_blocks(len(blocks), width, family, config)
    return Network(f"network-{id(model)}", blocks.state_dict)


def _check_blocks(number, width, family, config):
    if number < family.num_blocks(config) or width != family.width(config):
        raise ConfigError(f"Use a model patch that was made for this model: this one has {number} blocks of {width} "
                          f"channels, and this {family.name} model has {family.num_blocks(config)} of "
                          f"{family.width(config)}.")


def _image(patch, family, config, x):
    """Control image at the latent's size, which ComfyUI's own code prepares when it is called for a block."""
    tokens = family.inputs.latent.num_tokens(x.shape)
    patch({"x": x, "img": torch.zeros(1, tokens, family.width(config), dtype=x.dtype, device=x.device),
           "block_index": 0})
    image = patch.encoded_image
    if image.shape[0] not in (1, len(x)) or image.shape[1] != tokens:
        raise ConfigError(f"Use one control image, or as many as latents, for the model patch: its {len(image)} of "
                          f"{image.shape[1]} tokens do not fit {len(x)} latents of {tokens}.")
    return image.to(x.dtype)


def _hypernetwork(by_width):
    """by_width: {channels: modules for keys and for values}. Raises UnsupportedError for unknown layers, such as random
    ones."""
    settings = {}
    for width, pair in by_width.items():
        for which, layers in enumerate(pair):
            unknown = [type(layer).__name__ for layer in layers if type(layer).__name__ not in LAYERS]
            if unknown:
                raise UnsupportedError("Use another hypernetwork, or Load Diffusion Model: this one has layers that "
                                       f"xDiT does not support ({', '.join(dict.fromkeys(unknown))}).")
            settings[f"{width}.{which}"] = " ".join(LAYERS[type(layer).__name__] for layer in layers)
    return Network(f"network-{id(by_width)}", functools.partial(_weights, by_width), settings)


def _weights(by_width):
    return {f"{width}.{which}.{name}": tensor for width, pair in by_width.items() for which, layers in enumerate(pair)
            for name, tensor in layers.state_dict().items()}
