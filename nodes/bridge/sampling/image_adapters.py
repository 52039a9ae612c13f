"""IP-Adapter (Ye et al. 2023, arXiv 2308.06721), InstantID and PuLID in a call of a U-Net: keys and values of pictures
for each attention to the text, which the adapter's own layers make of them once a run. Used by injected_networks.py;
the workers attend to them (xdit_backend/hooks/injected_networks.py).

What the packs do with their settings: what attention to a picture gives is multiplied by a weight, which is as if the
values were; or the keys are too; in some layers it is another picture, or none; PuLID takes a part of it out. Each
layer is tried with the pack's own code when a run begins.

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

from ....xdit_backend.host.injected_networks import Network
from ....xdit_backend.protocol import specs
from ....xdit_backend.protocol.errors import ConfigError, UnsupportedError
from ..compatibility.image_adapters import COMPOSITION, EASING, KIND, STYLE, WEAK, adapters_at

ATTENTION = re.compile(r"((input|middle|output)_blocks?(?:\.(\d+))?\.\d+)\.transformer_blocks\.(\d+)\.attn2")
BEFORE_ALL = 999999999.9                   # the noise level of a call that does not say it
LAYERS_SDXL, LAYERS = 11, 16               # of the U-Nets that adapters were made for
OF_SDXL = "101_to_k_ip"                    # a layer that only adapters of SDXL have
WEAKER, LEAST = 0.2, 0.05                  # of a weight, where its kind is weak; where easing ends
PENALTY_CHANNELS = 1280
FIRST = 5                                  # tokens of PuLID's picture that say how faithful to it the image is
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
    adapters: tuple                        # the Adapters that act now

    @property
    def nodes(self):
        """What their nodes are for, and their packs."""
        return tuple(" / ".join(dict.fromkeys(names)) for names in zip(*((each.node, each.pack)
                                                                         for each in self.adapters)))


@dataclass(frozen=True)
class Shown:
    """What an adapter shows to an attention."""

    keys: Any                              # (positive and negative prompt, M or 1, T, C)
    values: Any
    mask: Any                              # (M or 1, rows, columns), or None
    first: int | None                      # of xdit_backend/hooks/pulid.py


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
    sigma = _sigma(transformer_options)
    layers = [layer for layer in _layers(modules, replaced, sigma) if layer.adapters]
    if not layers:
        return ()
    node, _ = layers[0].nodes
    if family.has_frames_as_batch:
        raise UnsupportedError(f"Remove {node}: {family.name} attends along frames too, for which it has no picture.")
    if not parts or len(x) % len(parts) or not {*parts} <= ({0, 1, 2} if len(parts) == 3 else {0, 1}):
        raise UnsupportedError("Use a sampler node, or Load Diffusion Model: a node calls this MODEL with "
                               f"{node} without saying for which prompts (cond_or_uncond).")
    images = len(x) // len(parts)
    told = [(layer.place, *(id(adapter.given) for adapter in layer.adapters)) for layer in layers]
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
            yield Layer(f"{side}.{block[1]}.{index}", block, transformers.index(match[1]), module, function,
                        adapters_at(function, sigma))


def _weights(layers, images, shape, sigma, tokens):
    """{name: tensor} of the Network, float32 on the CPU."""
    found = {}
    with torch.no_grad():
        for layer in layers:
            all_shown = [shown for adapter in layer.adapters if (shown := _shown(layer, adapter, images)) is not None]
            _check(layer, all_shown, images, sigma)
            for number, shown in enumerate(all_shown):
                name = f"{layer.place}.{number}"
                found |= {f"{name}.keys": shown.keys.cpu(), f"{name}.values": shown.values.cpu()}
                if shown.mask is not None:
                    found[f"{name}.mask"] = _on_tokens(shown.mask, shape, tokens[layer.block]).cpu()
                if shown.first is not None:
                    found[f"{name}.first"] = torch.tensor([shown.first])
    return found


def _shown(layer, adapter, images):
    """The Shown of an adapter in a layer; None where it adds nothing there."""
    given = adapter.settings
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
        raise UnsupportedError(f"Use as many negative pictures as pictures for {adapter.node}, of the same kind: for "
                               f"the two prompts it has {numbers[0]} and {numbers[1]}, of {tokens[0]} and {tokens[1]} "
                               "tokens.")
    width, key = layer.module.to_q.weight.shape[0], f"{given['module_key']}_to_k_ip"
    # PTC -> prompts, M or 1, P, T, C
    keys, values = (torch.stack([linears[name](tokens).float().unsqueeze(1 if given["unfold_batch"] else 0)
                                 for tokens in pictures]) if name in linears else torch.empty(0)
                    for name in (key, key.replace("_k_", "_v_")))
    if keys.shape[-1] != width:
        raise ConfigError(f"Use an adapter that was made for this model for {adapter.node}: {layer.place} has {width} "
                          f"channels, and the adapter's layer for it {keys.shape[-1]}.")
    if given["embeds_scaling"].endswith("penalty"):
        weight = weight * (width / PENALTY_CHANNELS)
    if given["embeds_scaling"].startswith("K+"):
        keys = keys * weight
    cached = values - values.mean(3, keepdim=True) if "mean" in given["embeds_scaling"] else 0
    first = 0 if given.get("ortho") else FIRST if given.get("ortho_v2") else None
    return Shown(keys.flatten(2, 3), (cached + (values - cached) * weight).flatten(2, 3), given["mask"], first)


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
        raise ConfigError(f"Use a latent that is less narrow, or pictures without a mask: for one of {rows} x "
                          f"{columns} the mask would have no rows.")
    height += tokens % height != 0
    fitting = F.interpolate(mask[:, None], size=(height, tokens // height), mode="bilinear").flatten(1)
    lacking = tokens - fitting.shape[1]
    return F.pad(fitting, (lacking // 2, lacking - lacking // 2)).float()[None]


def _check(layer, all_shown, images, sigma):
    """Raise UnsupportedError where the pack's object does not what is known of it, with what it was given: tried on a
    latent of six pixels."""
    shape = (2 * images, *TRIAL[1:])
    tokens = math.prod(TRIAL[2:])
    tensor, heads = layer.adapters[0].given["cond"], layer.module.heads
    drawn = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape[0], count, layer.module.to_q.weight.shape[0], generator=drawn).to(tensor)
                         for count in (tokens, 5, 5))
    options = {"cond_or_uncond": [1, 0], "sigmas": torch.tensor([sigma], dtype=torch.float64), "block": layer.block,
               "transformer_index": layer.index, "n_heads": heads, "original_shape": list(shape)}
    try:
        tried = layer.replaced(query, key, value, options).float()
    except Exception as error:                                 # another's code, given what it does not expect
        raise _other(layer) from error

    def attend(*tensors):
        each = (tensor.float().unflatten(2, (heads, -1)).transpose(1, 2) for tensor in tensors)
        return F.scaled_dot_product_attention(*each).transpose(1, 2).flatten(2)

    def of_batch(tensor):                                      # negative prompt first
        return torch.cat([each.expand(images, -1, -1) for each in tensor.flip(0)])
    expected = attend(query, key, value)
    for shown in all_shown:
        keys, values = of_batch(shown.keys), of_batch(shown.values)
        added = attend(query, keys, values)
        if shown.first is not None:
            added = _across(added, expected, query.float(), keys, shown.first)
        if shown.mask is not None:
            covered = _on_tokens(shown.mask, shape, tokens)[0]
            added = added * _as_many(covered, images).repeat(2, 1)[..., None]
        expected = expected + added
    tolerance = TOLERANCE if tensor.dtype == torch.float32 else IN_HALF
    if not (tried - expected).abs().max() <= tolerance * expected.abs().max():
        raise _other(layer)


def _across(found, before, query, keys, first):
    """As across of xdit_backend/hooks/pulid.py, (B, T, C)."""
    cached = (query @ keys.transpose(1, 2)).softmax(-1)[..., :first].sum(-1).mean(1).view(-1, 1, 1)
    along = (found * before).sum(1, keepdim=True) / before.square().sum(1, keepdim=True) * before
    return found - (1 - cached) * along


def _other(layer):
    node, pack = layer.nodes
    return UnsupportedError(f"Use another version of {pack}, or Load Diffusion Model: this one's {node} computes "
                            "something else than xDiT knows of it.")
