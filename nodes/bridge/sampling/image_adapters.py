"""IP-Adapter (Ye et al. 2023, arXiv 2308.06721), InstantID and PuLID in a call of a U-Net: keys and values of reference
images for each text cross-attention, which the adapter's own layers compute once a run. The workers attend to them
(xdit_backend/hooks/injected_networks.py).

Effect of the packs' settings: the attention output for an image is scaled by a weight, which is the same as scaling the
values, or the keys are scaled too; some layers use another image, or none; PuLID removes a component of the output. At
the start of a run, each layer is compared with the pack's own code.

# B batch, M images of a prompt, P reference images, T tokens, C channels
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
from ..compatibility.text_attention import adapters_in
from ..compatibility.unet_patches import num_tokens

ATTENTION = re.compile(r"((input|middle|output)_blocks?(?:\.(\d+))?\.\d+)\.transformer_blocks\.(\d+)\.attn2")
BEFORE_ALL = 999999999.9                   # sigma of a call without one
LAYERS_SDXL, LAYERS = 11, 16               # of the U-Nets that adapters were made for
OF_SDXL = "101_to_k_ip"                    # a layer that only SDXL's adapters have
WEAKER, LEAST = 0.2, 0.05                  # factors of a weight: of a weak type; at the end of easing
PENALTY_CHANNELS = 1280
FIRST = 5                                  # PuLID's image tokens whose attention weight measures fidelity
TRIAL = (1, 4, 2, 3)                       # shape of the latent for the comparison with the pack's code
TOLERANCE, IN_HALF = 1e-3, 0.05            # relative, in float32 and in half precision


@dataclass(frozen=True)
class Layer:
    """Text cross-attention and its adapters."""

    name: str                              # "input.4.0"
    block: tuple                           # ComfyUI's id: ("input", 4)
    index: int                             # among the U-Net's transformers, counted from 0 as by ComfyUI
    module: Any                            # ComfyUI's
    replaced: Any                          # the pack's object
    adapters: tuple                        # Adapters active at this sigma

    @property
    def nodes(self):
        """Names of the adapters' nodes, and names of their packs."""
        return tuple(" / ".join(dict.fromkeys(names)) for names in zip(*((each.node, each.pack)
                                                                         for each in self.adapters)))


@dataclass(frozen=True)
class Shown:
    """Keys and values that an adapter adds to an attention."""

    keys: Any                              # (positive and negative prompt, M or 1, T, C)
    values: Any
    mask: Any                              # (M or 1, rows, columns), or None
    first: int | None                      # see xdit_backend/hooks/pulid.py


def adapters_of(family, config, transformer_options, x, modules):
    """Return ((specs.NetworkUse, Network),) of the adapters active in a call, or (). x: its latent. modules: of
    remember_modules.

    Raises UnsupportedError if ComfyUI's model has other attentions, or the adapters compute something else than
    expected; ConfigError for an adapter of another model.
    """
    replaced = transformer_options.get("patches_replace", {}).get(KIND) if family.plan.is_unet else None
    prompts = transformer_options.get("cond_or_uncond", ())
    if not replaced:
        return ()
    sigma = _sigma(transformer_options)
    layers = [layer for layer in _layers(modules, replaced, sigma) if layer.adapters]
    if not layers:
        return ()
    node, _ = layers[0].nodes
    if family.has_frames_as_batch:
        raise UnsupportedError(f"Remove {node}: {family.name} also has attention along frames, which the node does not "
                               "support.")
    if not prompts or len(x) % len(prompts) or not {*prompts} <= ({0, 1, 2} if len(prompts) == 3 else {0, 1}):
        raise UnsupportedError("Use a sampler node, or Load Diffusion Model: a node calls this MODEL with "
                               f"{node} without naming the prompts (cond_or_uncond).")
    num_images = len(x) // len(prompts)
    ids = [(layer.name, *(id(adapter.arguments) for adapter in layer.adapters)) for layer in layers]
    name = hashlib.sha256(repr((ids, num_images, *x.shape[2:])).encode()).hexdigest()
    network = Network(f"adapters-{name}", functools.partial(_weights, layers, num_images, tuple(x.shape), sigma,
                                                            num_tokens(family, config, x.shape)))
    rows = tuple((prompt % 2, image) for prompt in prompts for image in range(num_images))
    return (specs.NetworkUse(network.name, "text", 1.0, rows=rows), network),


def _sigma(transformer_options):
    sigmas = transformer_options.get("sigmas")
    return BEFORE_ALL if sigmas is None else sigmas[0].item()


def _layers(modules, replaced, sigma):
    """Yield the Layers of ComfyUI's U-Net in which something is replaced."""
    transformers = list(dict.fromkeys(name.partition(".transformer_blocks.")[0] for name in modules
                                      if ".transformer_blocks." in name))
    tested = {}
    for name, (module, _) in modules.items():
        match = ATTENTION.fullmatch(name)
        if match is None:
            continue
        side, index = match[2], int(match[4])
        block = side, int(match[3] or 0)
        function = adapters_in(replaced.get((*block, index)) or replaced.get(block), tested)
        if function is not None:
            yield Layer(f"{side}.{block[1]}.{index}", block, transformers.index(match[1]), module, function,
                        adapters_at(function, sigma))


def _weights(layers, num_images, shape, sigma, tokens):
    """{name: tensor} of the Network, float32 on the CPU."""
    found = {}
    with torch.no_grad():
        for layer in layers:
            all_shown = [shown for adapter in layer.adapters
                         if (shown := _shown(layer, adapter, num_images)) is not None]
            _check(layer, all_shown, num_images, sigma)
            for number, shown in enumerate(all_shown):
                name = f"{layer.name}.{number}"
                found |= {f"{name}.keys": shown.keys.cpu(), f"{name}.values": shown.values.cpu()}
                if shown.mask is not None:
                    found[f"{name}.mask"] = _on_tokens(shown.mask, shape, tokens[layer.block]).cpu()
                if shown.first is not None:
                    found[f"{name}.first"] = torch.tensor([shown.first])
    return found


def _shown(layer, adapter, num_images):
    """Shown of an adapter in a layer; None if it adds nothing there."""
    settings = adapter.settings
    linears = settings["ipadapter"].ip_layers.to_kvs
    weight, references = _weight(layer, settings, linears), _references(layer, settings, linears)
    if torch.is_tensor(weight):
        weight = _as_many(weight, num_images).float().view(-1, 1, 1, 1)
    if weight is None or not (weight.any() if torch.is_tensor(weight) else weight):
        return None
    if settings["unfold_batch"]:                               # one reference for each image
        references = [_as_many(tokens, num_images) for tokens in references]
    if references[0].shape != references[1].shape:
        numbers, tokens = zip(*(each.shape[:2] for each in references))
        raise UnsupportedError(f"Use as many negative images as images of the same kind for {adapter.node}: for the "
                               f"two prompts it has {numbers[0]} and {numbers[1]}, of {tokens[0]} and {tokens[1]} "
                               "tokens.")
    width, key = layer.module.to_q.weight.shape[0], f"{settings['module_key']}_to_k_ip"
    # PTC -> prompts, M or 1, P, T, C
    keys, values = (torch.stack([linears[name](tokens).float().unsqueeze(1 if settings["unfold_batch"] else 0)
                                 for tokens in references]) if name in linears else torch.empty(0)
                    for name in (key, key.replace("_k_", "_v_")))
    if keys.shape[-1] != width:
        raise ConfigError(f"Use an adapter that was made for this model for {adapter.node}: {layer.name} has {width} "
                          f"channels, and the adapter's layer for it {keys.shape[-1]}.")
    if settings["embeds_scaling"].endswith("penalty"):
        weight = weight * (width / PENALTY_CHANNELS)
    if settings["embeds_scaling"].startswith("K+"):
        keys = keys * weight
    unscaled = values - values.mean(3, keepdim=True) if "mean" in settings["embeds_scaling"] else 0
    first = 0 if settings.get("ortho") else FIRST if settings.get("ortho_v2") else None
    return Shown(keys.flatten(2, 3), (unscaled + (values - unscaled) * weight).flatten(2, 3), settings["mask"], first)


def _weight(layer, settings, linears):
    """Weight of an adapter in a layer: a number, a tensor with one for each image, or None."""
    weight, kind = settings["weight"], settings["weight_type"]
    if isinstance(weight, dict):
        return weight.get(layer.index)
    if kind in EASING:
        depth = layer.index / (LAYERS_SDXL if OF_SDXL in linears else LAYERS)
        return weight * (LEAST + (1 - LEAST) * EASING[kind](depth))
    return weight * WEAKER if layer.block[0] in WEAK.get(kind, ()) else weight


def _references(layer, settings, linears):
    """[for the positive prompt, for the negative prompt] (P, T, C)"""
    references = [settings["cond"], settings["uncond"]]
    if not isinstance(settings["weight"], dict):
        return references
    is_composed = layer.index in ({3} if OF_SDXL in linears else {4, 5})
    if settings["weight_type"] == (STYLE if is_composed else COMPOSITION):
        references = [torch.zeros_like(settings["cond"]), settings["cond"]]
    if layer.index in (settings["cond_alt"] or ()):
        references[0] = settings["cond_alt"][layer.index]
    return references


def _as_many(tensor, count):
    """The first `count` rows; the last row is repeated if there are fewer."""
    return tensor[[min(number, len(tensor) - 1) for number in range(count)]]


def _on_tokens(mask, shape, tokens):
    """Resize masks (M, rows, columns) to (1, M, T) for T tokens of a latent of this shape. If rows and columns in the
    latent's aspect ratio give fewer tokens, both ends are zero."""
    rows, columns = shape[-2:]
    height = int(rows / math.sqrt(rows * columns / tokens))
    if not height:
        raise ConfigError(f"Use a latent that is less narrow, or reference images without a mask: the mask has no rows "
                          f"left for a latent of {rows} x {columns}.")
    height += tokens % height != 0
    fitting = F.interpolate(mask[:, None], size=(height, tokens // height), mode="bilinear").flatten(1)
    lacking = tokens - fitting.shape[1]
    return F.pad(fitting, (lacking // 2, lacking - lacking // 2)).float()[None]


def _check(layer, all_shown, num_images, sigma):
    """Raise UnsupportedError if the pack's object computes something else than expected on a latent of six pixels."""
    shape = (2 * num_images, *TRIAL[1:])
    tokens = math.prod(TRIAL[2:])
    tensor, heads = layer.adapters[0].arguments["cond"], layer.module.heads
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape[0], count, layer.module.to_q.weight.shape[0], generator=generator).to(tensor)
                         for count in (tokens, 5, 5))
    options = {"cond_or_uncond": [1, 0], "sigmas": torch.tensor([sigma], dtype=torch.float64), "block": layer.block,
               "transformer_index": layer.index, "n_heads": heads, "original_shape": list(shape)}
    try:
        tried = layer.replaced(query, key, value, options).float()
    except Exception as error:                                 # raised by the pack's code for unexpected arguments
        raise _other(layer) from error

    def attend(*tensors):
        each = (tensor.float().unflatten(2, (heads, -1)).transpose(1, 2) for tensor in tensors)
        return F.scaled_dot_product_attention(*each).transpose(1, 2).flatten(2)

    def of_batch(tensor):                                      # negative prompt first
        return torch.cat([each.expand(num_images, -1, -1) for each in tensor.flip(0)])
    expected = attend(query, key, value)
    for shown in all_shown:
        keys, values = of_batch(shown.keys), of_batch(shown.values)
        added = attend(query, keys, values)
        if shown.first is not None:
            added = _across(added, expected, query.float(), keys, shown.first)
        if shown.mask is not None:
            covered = _on_tokens(shown.mask, shape, tokens)[0]
            added = added * _as_many(covered, num_images).repeat(2, 1)[..., None]
        expected = expected + added
    tolerance = TOLERANCE if tensor.dtype == torch.float32 else IN_HALF
    if not (tried - expected).abs().max() <= tolerance * expected.abs().max():
        raise _other(layer)


def _across(found, before, query, keys, first):
    """`across` of xdit_backend/hooks/pulid.py, (B, T, C)."""
    fidelity = (query @ keys.transpose(1, 2)).softmax(-1)[..., :first].sum(-1).mean(1).view(-1, 1, 1)
    along = (found * before).sum(1, keepdim=True) / before.square().sum(1, keepdim=True) * before
    return found - (1 - fidelity) * along


def _other(layer):
    node, pack = layer.nodes
    return UnsupportedError(f"Use another version of {pack}, or Load Diffusion Model: {node} of the installed one "
                            "computes something else than xDiT expects.")
