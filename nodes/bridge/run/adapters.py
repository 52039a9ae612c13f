"""IP-Adapter (Ye et al. 2023, arXiv 2308.06721) in a call of a U-Net: keys and values of pictures for each attention to
the text, which the adapter's own layers make of them once a run. Used by networks.py; the workers attend to them
(xdit_backend/hooks/networks.py).

What the pack ComfyUI_IPAdapter_plus does with its settings: what attention to a picture gives is multiplied by a
weight, which is as if the values were; or the keys are too; in some layers it is another picture, or none. Each layer
is tried with the pack's own code when a run begins.

# B batch, M images of a prompt, P pictures, T tokens, C channels
"""

import functools
import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ....xdit_backend.host.networks import Network
from ....xdit_backend.protocol import specs
from ....xdit_backend.protocol.errors import ConfigError, UnsupportedError
from ..supported.adapters import COMPOSITION, EASING, GIVEN, KIND, STYLE, WEAK

ATTENTION = re.compile(r"((input|middle|output)_blocks?(?:\.(\d+))?\.\d+)\.transformer_blocks\.(\d+)\.attn2")
BEFORE_ALL = 999999999.9                   # the noise level of a call that does not say it
LAYERS_SDXL, LAYERS = 11, 16               # of the U-Nets that adapters were made for
OF_SDXL = "101_to_k_ip"                    # a layer that only adapters of SDXL have
WEAKER, LEAST = 0.2, 0.05                  # of a weight, where its kind is weak; where easing ends
PENALTY_CHANNELS = 1280
TRIAL = (1, 4, 2, 3)                       # shape of a latent that what an adapter does is tried with
TOLERANCE, IN_HALF = 1e-3, 0.05            # relative


@dataclass(frozen=True)
class Layer:
    """An attention to the text, and the adapters in it."""

    place: str                             # "input.4.0"
    block: tuple                           # as ComfyUI calls it: ("input", 4)
    index: int                             # among the U-Net's transformers, which ComfyUI counts from 0
    module: Any                            # ComfyUI's
    replaced: Any                          # the pack's object
    given: tuple                           # what each of its adapters that act now was given


def adapters_of(family, config, transformer_options, x, modules):
    """((specs.NetworkUse, Network),) of the adapters that act in a call, () where none does. x: its latent. modules: of
    remember_modules.

    Raises UnsupportedError where ComfyUI's model has other attentions than these, or they do otherwise than is known;
    ConfigError for an adapter of another model.
    """
    replaced = transformer_options.get("patches_replace", {}).get(KIND) if family.is_unet else None
    parts = transformer_options.get("cond_or_uncond", ())
    if not replaced:
        return ()
    if family.has_frames_as_batch:
        raise UnsupportedError(f"Remove IP-Adapter: {family.name} attends along frames too, for which it has no "
                               "picture.")
    if not parts or len(x) % len(parts) or not {*parts} <= ({0, 1, 2} if len(parts) == 3 else {0, 1}):
        raise UnsupportedError("Use a sampler node, or Load Diffusion Model: a node calls this MODEL with IP-Adapter "
                               "without saying for which prompts (cond_or_uncond).")
    images, sigma = len(x) // len(parts), _sigma(transformer_options)
    layers = [layer for layer in _layers(modules, replaced, sigma) if layer.given]
    if not layers:
        return ()
    told = [(layer.place, *map(id, layer.given)) for layer in layers]
    name = hashlib.sha256(repr((told, images, *x.shape[2:])).encode()).hexdigest()
    network = Network(f"adapters-{name}", functools.partial(_weights, layers, images, tuple(x.shape), sigma,
                                                            _tokens(family, config, x.shape)))
    rows = tuple((part % 2, image) for part in parts for image in range(images))
    return (specs.NetworkUse(network.name, "text", 1.0, rows=rows), network),


def _tokens(family, config, shape):
    """{ComfyUI's block: tokens of its image}"""
    skips = [math.prod(size) for name, (_, *size) in family.control_shapes(config, shape).items()
             if name.startswith("input.")]
    return {("middle", 0): skips[-1], **{("input", number): count for number, count in enumerate(skips)},
            **{("output", number): count for number, count in enumerate(reversed(skips))}}


def _sigma(transformer_options):
    sigmas = transformer_options.get("sigmas")
    return BEFORE_ALL if sigmas is None else sigmas[0].item()


def _layers(modules, replaced, sigma):
    """The Layers of ComfyUI's U-Net in which something is replaced; it passes over all else."""
    transformers = list(dict.fromkeys(name.partition(".transformer_blocks.")[0] for name in modules
                                      if ".transformer_blocks." in name))
    for name, (module, _) in modules.items():
        match = ATTENTION.fullmatch(name)
        if match is None:
            continue
        side, index = match[2], int(match[4])
        block = side, int(match[3] or 0)
        function = replaced.get((*block, index)) or replaced.get(block)
        if function is not None:
            given = tuple(GIVEN | given for given in function.kwargs
                          if given.get("sigma_end", 1.0) <= sigma <= given.get("sigma_start", 0.0))
            yield Layer(f"{side}.{block[1]}.{index}", block, transformers.index(match[1]), module, function, given)


def _weights(layers, images, shape, sigma, tokens):
    """{name: tensor} of the Network, float32 on the CPU."""
    found = {}
    with torch.no_grad():
        for layer in layers:
            made = [pair for given in layer.given if (pair := _keys_and_values(layer, given, images)) is not None]
            _check(layer, made, images, sigma)
            for number, (keys_and_values, mask) in enumerate(made):
                found |= {f"{layer.place}.{number}.{kind}": tensor.cpu()
                          for kind, tensor in zip(("keys", "values"), keys_and_values)}
                if mask is not None:
                    found[f"{layer.place}.{number}.mask"] = _on_tokens(
                        mask, shape, tokens[layer.block]).cpu()
    return found


def _keys_and_values(layer, given, images):
    """((keys, values), mask) of an adapter in a layer; None where it adds nothing there. Keys and values:
    (positive and negative prompt, M or 1, T, C)."""
    linears = given["ipadapter"].ip_layers.to_kvs
    weight, pictures = _weight(layer, given, linears), _pictures(layer, given, linears)
    if torch.is_tensor(weight):
        weight = _as_many(weight, images).float().view(-1, 1, 1, 1)
    if weight is None or not (weight.any() if torch.is_tensor(weight) else weight):
        return None
    if given["unfold_batch"]:                                  # a picture for each image
        pictures = [_as_many(tokens, images) for tokens in pictures]
    if pictures[0].shape != pictures[1].shape:
        numbers, tokens = zip(*(each.shape[:2] for each in pictures))
        raise UnsupportedError("Use as many negative pictures as pictures for IP-Adapter, of the same kind: for the "
                               f"two prompts it has {numbers[0]} and {numbers[1]}, of {tokens[0]} and {tokens[1]} "
                               "tokens.")
    width, key = layer.module.to_q.weight.shape[0], f"{given['module_key']}_to_k_ip"
    # PTC -> prompts, M or 1, P, T, C
    keys, values = (torch.stack([linears[name](tokens).float().unsqueeze(1 if given["unfold_batch"] else 0)
                                 for tokens in pictures]) if name in linears else torch.empty(0)
                    for name in (key, key.replace("_k_", "_v_")))
    if keys.shape[-1] != width:
        raise ConfigError(f"Use an IP-Adapter that was made for this model: {layer.place} has {width} channels, and "
                          f"the adapter's layer for it {keys.shape[-1]}.")
    if given["embeds_scaling"].endswith("penalty"):
        weight = weight * (width / PENALTY_CHANNELS)
    if given["embeds_scaling"].startswith("K+"):
        keys = keys * weight
    kept = values - values.mean(3, keepdim=True) if "mean" in given["embeds_scaling"] else 0
    return (keys.flatten(2, 3), (kept + (values - kept) * weight).flatten(2, 3)), given["mask"]


def _weight(layer, given, linears):
    """Of an adapter in a layer: a number, a tensor of one for each image, or None."""
    weight, kind = given["weight"], given["weight_type"]
    if isinstance(weight, dict):
        return weight.get(layer.index)
    if kind in EASING:
        share = layer.index / (LAYERS_SDXL if OF_SDXL in linears else LAYERS)
        return weight * (LEAST + (1 - LEAST) * EASING[kind](share))
    return weight * WEAKER if layer.block[0] in WEAK.get(kind, ()) else weight


def _pictures(layer, given, linears):
    """[for the positive prompt, for the negative one] (P, T, C)"""
    pictures = [given["cond"], given["uncond"]]
    if not isinstance(given["weight"], dict):
        return pictures
    is_composed = layer.index in ({3} if OF_SDXL in linears else {4, 5})
    if given["weight_type"] == (STYLE if is_composed else COMPOSITION):
        pictures = [torch.zeros_like(given["cond"]), given["cond"]]
    if layer.index in (given["cond_alt"] or ()):
        pictures[0] = given["cond_alt"][layer.index]
    return pictures


def _as_many(tensor, count):
    """The first of them, or the last one more often."""
    return tensor[[min(number, len(tensor) - 1) for number in range(count)]]


def _on_tokens(mask, shape, tokens):
    """A mask (M, rows, columns) for so many tokens of a latent of this shape: (1, M, T). Where rows and columns that
    fit its sides make fewer, there is nothing at both ends."""
    rows, columns = shape[-2:]
    height = int(rows / math.sqrt(rows * columns / tokens))
    if not height:
        raise ConfigError(f"Use a latent that is less narrow, or IP-Adapter without attn_mask: for one of {rows} x "
                          f"{columns} its mask would have no rows.")
    height += tokens % height != 0
    fitting = F.interpolate(mask[:, None], size=(height, tokens // height), mode="bilinear").flatten(1)
    lacking = tokens - fitting.shape[1]
    return F.pad(fitting, (lacking // 2, lacking - lacking // 2)).float()[None]


def _check(layer, made, images, sigma):
    """Raise UnsupportedError where the pack's object does not what is known of it, with what it was given: tried on a
    latent of six pixels."""
    shape = (2 * images, *TRIAL[1:])
    tokens = math.prod(TRIAL[2:])
    tensor, heads = layer.given[0]["cond"], layer.module.heads
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape[0], count, layer.module.to_q.weight.shape[0], generator=drawn).to(tensor)
                         for count in (tokens, 5, 5))
    options = {"cond_or_uncond": [1, 0], "sigmas": torch.tensor([sigma], dtype=torch.float64), "block": layer.block,
               "transformer_index": layer.index, "n_heads": heads, "original_shape": list(shape)}
    try:
        tried = layer.replaced(query, key, value, options).float()
    except Exception as error:                                 # another's code, given what it does not expect
        raise _other() from error

    def attend(*tensors):
        each = (tensor.float().unflatten(2, (heads, -1)).transpose(1, 2) for tensor in tensors)
        return F.scaled_dot_product_attention(*each).transpose(1, 2).flatten(2)

    def of_batch(tensor):                                      # negative prompt first
        return torch.cat([each.expand(images, -1, -1) for each in tensor.flip(0)])
    expected = attend(query, key, value)
    for keys_and_values, mask in made:
        added = attend(query, *map(of_batch, keys_and_values))
        if mask is not None:
            covered = _on_tokens(mask, shape, tokens)[0]
            added = added * _as_many(covered, images).repeat(2, 1)[..., None]
        expected = expected + added
    tolerance = TOLERANCE if tensor.dtype == torch.float32 else IN_HALF
    if not (tried - expected).abs().max() <= tolerance * expected.abs().max():
        raise _other()


def _other():
    return UnsupportedError("Use another version of ComfyUI_IPAdapter_plus, or Load Diffusion Model: this one's "
                            "IP-Adapter computes something else than xDiT knows of it.")
