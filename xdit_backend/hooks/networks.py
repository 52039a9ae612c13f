"""Networks that nodes put inside a model, and that read what its layers have: on each rank, of its own tokens.
Held by worker/networks.py, called by transformer.py and unet.py.

# B batch, T tokens, C channels
"""

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
        key, tokens = ("network", number), context.tokens
        if key not in context.cuts:
            context.cuts[key] = context.control.take(use.picture)
        streams = next(streams for streams in outputs if "image" in streams)
        start, size = sum(tokens.own((name,)) for name in streams[:streams.index("image")]), tokens.own(("image",))
        image = outputs[streams][:, start:start + size]
        image += network.of_block(place.number, image, context.cuts[key].to(image.dtype)) * use.strength


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
    return [*(use.picture for use, _ in context.networks if use.where == "blocks"),
            *(name for place in places if place.index in context.blocks for name in place.control)]
