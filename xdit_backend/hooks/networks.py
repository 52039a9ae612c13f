"""Networks that nodes put inside a model, and that read what its layers have: on each rank, of its own tokens.
Held by worker/networks.py, called by transformer.py and unet.py.

# B batch, T tokens, C channels
"""

import functools

import torch
import torch.nn.functional as F

# of hypernetworks, names in torch.nn.functional
ACTIVATIONS = "relu", "leaky_relu", "elu", "hardswish", "tanh", "sigmoid", "softsign", "mish"
EPSILON = 1e-6                             # of the norms, as ComfyUI has them


class Network:
    """One of specs.NetworkSpec on this rank. Weights come to the device, in the type that is computed in, when they are
    first asked for: with stages a rank has those of its own blocks."""

    def __init__(self, spec, weights, device):
        """weights: {name: tensor in host memory}."""
        self._spec, self._weights, self._device, self._here = spec, weights, device, {}

    @property
    def num_bytes(self):
        return sum(tensor.nbytes for tensor in self._here.values())

    def weight(self, name, dtype):
        key = name, dtype
        if key not in self._here:
            self._here[key] = self._weights[name].to(self._device, dtype, copy=True)
        return self._here[key]

    def linear(self, name, tensor):
        return F.linear(tensor, *(self.weight(f"{name}.{kind}", tensor.dtype) for kind in ("weight", "bias")))

    def of_block(self, number, image_BTC, picture_BTC):
        """What a block-wise ControlNet of Qwen-Image adds to the image after a block. picture: what it is to follow,
        the same tokens."""
        name, (width,) = f"{number}.", image_BTC.shape[2:]
        image, picture = (F.rms_norm(tokens, (width,), self.weight(f"{name}{norm}.weight", tokens.dtype), EPSILON)
                          for tokens, norm in ((image_BTC, "x_rms"), (picture_BTC, "y_rms")))
        return self.linear(f"{name}output_proj", F.gelu(self.linear(f"{name}input_proj", image + picture)))

    def of_layer(self, name, given_BTC, picture_BTC):
        """What an LLLite adds to what goes into a layer; None where it has nothing for it. picture: what it is to
        follow, (B or 1, T, C), the same tokens."""
        if f"{name}.down.weight" not in self._weights:
            return None
        picture = picture_BTC + self.weight(f"{name}.depth_embed", given_BTC.dtype)
        scale, shift = self.linear(f"{name}.cond_to_film", picture).chunk(2, -1)
        hidden = F.silu(self.linear(f"{name}.down", given_BTC))
        hidden = self.linear(f"{name}.mid", torch.cat([picture.expand(len(hidden), -1, -1), hidden], -1))
        return self.linear(f"{name}.up", F.silu(hidden * (1 + scale) + shift))

    def of_values(self, which, given_BTC):
        """What a hypernetwork adds to what keys ("0") or values ("1") are made of; None where it has nothing for this
        width."""
        name = f"{given_BTC.shape[2]}.{which}"
        if name not in self._spec.settings:
            return None
        tensor = given_BTC
        for number, layer in enumerate(self._spec.settings[name].split()):
            if layer == "linear":
                tensor = self.linear(f"{name}.{number}", tensor)
            elif layer == "layer_norm":
                weight, bias = (self.weight(f"{name}.{number}.{kind}", tensor.dtype) for kind in ("weight", "bias"))
                tensor = F.layer_norm(tensor, weight.shape, weight, bias)
            else:
                assert layer in ACTIVATIONS, f"{layer} is no activation of a hypernetwork"
                tensor = getattr(F, layer)(tensor)
        return tensor


def add_to_blocks(context, place, outputs):
    """Add to this rank's image tokens, in place, what the networks of a forward give after a block."""
    for number, (use, network) in enumerate(context.networks):
        if use.where != "blocks":
            continue
        tokens = context.tokens
        streams = next(streams for streams in outputs if "image" in streams)
        start, size = sum(tokens.own((name,)) for name in streams[:streams.index("image")]), tokens.own(("image",))
        image = outputs[streams][:, start:start + size]
        image += network.of_block(place.number, image, _picture(context, number, use, image)) * use.strength


def _picture(context, number, use, tokens):
    """What a network is to follow, of this rank's image tokens."""
    if ("network", number) not in context.cuts:
        context.cuts["network", number] = context.control.take(use.picture)
    return context.cuts["network", number].to(tokens.dtype)


def lead(block, number, layers, current):
    """Have what goes into these linears of a block be what the networks of a forward make of it. number: of the block.
    layers: ModelPlan.led. current(): the ForwardContext of the forward that runs."""
    for path, name in layers.items():
        linear = block.get_submodule(path)
        linear.forward = _led(linear.forward, f"lllite_dit_blocks_{number}_{name}", current)


def _led(forward, name, current):
    @functools.wraps(forward)
    def led(given):
        context = None if torch.compiler.is_compiling() else current()
        for number, (use, network) in enumerate(context.networks if context is not None else ()):
            added = (network.of_layer(name, given, _picture(context, number, use, given)) if use.where == "layers"
                     else None)
            if added is not None:
                given = given + added * use.strength
        return forward(given)
    return led


def lead_layers(context):
    """Does a network change what goes into layers inside of blocks? No graph knows of such."""
    return any(use.where == "layers" for use, _ in context.networks)


def with_networks(context, where, which, given_BTC):
    """What keys ("0") or values ("1") of an attention are made of, with what the networks of a forward add there."""
    for use, network in context.networks:
        added = network.of_values(which, given_BTC) if use.where == where else None
        if added is not None:
            given_BTC = given_BTC + added * use.strength
    return given_BTC


def control_names(context, places):
    """What of a call's `control` this rank's blocks take, in their order: what ControlNets and the like add, and the
    pictures that networks follow. places: of all blocks."""
    return [*(use.picture for use, _ in context.networks if use.picture),
            *(name for place in places if place.index in context.blocks for name in place.control)]
