"""Networks that nodes put inside a model, and that read what its layers have: on each rank, of its own tokens.
Held by worker/injected_networks.py, called by transformer.py and unet.py.

# B batch, T tokens, C channels, N heads, H head size
"""

import functools
import itertools

import torch
import torch.nn.functional as F

from ..distributed.collectives import all_reduce
from ..partition import halved, level_of
from ..protocol.errors import UnsupportedError
from . import infinite_talk
from .block_hooks import places_of
from .pulid import across

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

    def of_block(self, number, image_BTC, hint_BTC):
        """What a block-wise ControlNet of Qwen-Image adds to the image after a block. control_image: what it is to
        follow, the same tokens."""
        name, (width,) = f"{number}.", image_BTC.shape[2:]
        image, control_image = (F.rms_norm(tokens, (width,), self.weight(f"{name}{norm}.weight", tokens.dtype), EPSILON)
                          for tokens, norm in ((image_BTC, "x_rms"), (hint_BTC, "y_rms")))
        return self.linear(f"{name}output_proj", F.gelu(self.linear(f"{name}input_proj", image + control_image)))

    def of_layer(self, name, given_BTC, hint_BTC):
        """What an LLLite adds to what goes into a layer; None where it has nothing for it. control_image: what it is to
        follow, (B or 1, T, C), the same tokens."""
        if f"{name}.down.weight" not in self._weights:
            return None
        control_image = hint_BTC + self.weight(f"{name}.depth_embed", given_BTC.dtype)
        scale, shift = self.linear(f"{name}.cond_to_film", control_image).chunk(2, -1)
        hidden = F.silu(self.linear(f"{name}.down", given_BTC))
        hidden = self.linear(f"{name}.mid", torch.cat([control_image.expand(len(hidden), -1, -1), hidden], -1))
        return self.linear(f"{name}.up", F.silu(hidden * (1 + scale) + shift))

    def of_audio(self, number, tokens_BTC, frames, places=None):
        """What InfiniteTalk (MultiTalk, Kong et al. 2025, arXiv 2505.22647) adds to a block's tokens after attention to
        the text: what each finds in the sound of its frame. frames: of the tokens, (T,). places: of tell_apart, (B, T).
        The network's tensors: "sound", (frames, T of one, C), and of two speakers "masks", (2, T of a frame)."""
        name, dtype = f"{number}.", tokens_BTC.dtype
        heads = lambda tensor: tensor.unflatten(2, (int(self._spec.settings["heads"]), -1)).transpose(1, 2)  # noqa: E731
        audio = self.weight("audio", dtype)
        normed = F.layer_norm(tokens_BTC, tokens_BTC.shape[2:], *(
            self.weight(f"{name}norm_x.{kind}", dtype) for kind in ("weight", "bias")))
        query = heads(self.linear(f"{name}audio_cross_attn.q_linear", normed))
        key, value = (heads(part).expand(len(query), -1, -1, -1) for part in self.linear(
            f"{name}audio_cross_attn.kv_linear", audio.flatten(0, 1)[None]).chunk(2, -1))
        if self.tells_apart:
            of_keys = infinite_talk.audio_places(audio.shape[1], frames.device).repeat(len(audio))
            query, key = infinite_talk.turned(query, places), infinite_talk.turned(key, of_keys[None])
        of_keys = torch.arange(len(audio), device=frames.device).repeat_interleave(audio.shape[1])
        found = F.scaled_dot_product_attention(query, key, value, frames[:, None] == of_keys)
        return self.linear(f"{name}audio_cross_attn.proj", found.transpose(1, 2).flatten(2))

    @property
    def tells_apart(self):
        """Does it hear two speakers?"""
        return "masks" in self._weights

    def num_frames(self):
        """Of the sound."""
        return self._weights["audio"].shape[0]

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

    def of_images(self, place, rows, query_BNTH):
        """Of the adapters at a place ("input.4.0"), one after the other: (key, value, mask, first). Key and value:
        (B, N, T, H) of the pictures, for each image of the call. mask: (B, T of the whole image), or None. first: of
        pulid.across, None where all that is found is added.

        rows: of specs.NetworkUse. The network's tensors: keys and values (prompts, images, T, N * H), and of some a
        mask (1, images, T of the whole image) and the number first, (1,).
        """
        for number in itertools.count():
            name = f"{place}.{number}"
            if f"{name}.keys" not in self._weights:
                return
            key, value = (self._of_rows(f"{name}.{kind}", rows, query_BNTH.dtype).unflatten(
                2, (query_BNTH.shape[1], -1)).transpose(1, 2) for kind in ("keys", "values"))   # BTC -> BNTH
            has_mask, first = f"{name}.mask" in self._weights, self._weights.get(f"{name}.first")
            yield (key, value, self._of_rows(f"{name}.mask", rows, query_BNTH.dtype) if has_mask else None,
                   None if first is None else int(first))

    def _of_rows(self, name, rows, dtype):
        """For each image of the call its part of a tensor, on the device. Where there are fewer images than the call
        has, the last one's is the others' too."""
        key = name, dtype, rows
        if key not in self._here:
            held = self._weights[name]
            self._here[key] = torch.stack([held[min(prompt, held.shape[0] - 1), min(image, held.shape[1] - 1)]
                                           for prompt, image in rows]).to(self._device, dtype)
        return self._here[key]


def add_to_blocks(context, place, outputs):
    """Add to this rank's image tokens, in place, what the networks of a forward give after a block."""
    for number, (use, network) in enumerate(context.networks):
        if use.where != "blocks":
            continue
        tokens = context.tokens
        streams = next(streams for streams in outputs if "image" in streams)
        start, size = sum(tokens.own((name,)) for name in streams[:streams.index("image")]), tokens.own(("image",))
        image = outputs[streams][:, start:start + size]
        image += network.of_block(place.number, image, _image(context, number, use, image)) * use.strength


def _image(context, number, use, tokens):
    """What a network is to follow, of this rank's image tokens."""
    if ("network", number) not in context.cuts:
        context.cuts["network", number] = context.control.take(use.control_image)
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
            added = (network.of_layer(name, given, _image(context, number, use, given)) if use.where == "layers"
                     else None)
            if added is not None:
                given = given + added * use.strength
        return forward(given)
    return led


def hear(block, number, heard, current):
    """Have this block add, after its attention to the text, what networks of a forward find in sound. number: of the
    block. heard: ModelPlan.heard. current(): as of lead."""
    norm, attention = map(block.get_submodule, heard)
    normalise, attend = norm.forward, attention.forward

    def running():
        context = None if torch.compiler.is_compiling() else current()
        return None if context is None or not any(use.where == "audio" for use, _ in context.networks) else context

    @functools.wraps(normalise)
    def normalised(tokens):
        if context := running():
            context.cuts["heard"] = tokens                     # which the block adds to
        return normalise(tokens)

    @functools.wraps(attend)
    def attended(*args, **kwargs):
        found = attend(*args, **kwargs)
        if context := running():
            before = context.cuts["heard"].to(found.dtype)
            for use, network in context.networks:
                if use.where == "audio":
                    found = found + network.of_audio(number, before + found, _frames(context, network, found),
                                                     context.cuts.get("speakers")) * use.strength
        return found
    norm.forward, attention.forward = normalised, attended


def _frames(context, network, tokens_BTC):
    """Of this rank's tokens, all of which are the image's."""
    if any(count for stream, count in context.tokens.counts.items() if stream != "image"):
        raise UnsupportedError("Remove Bernini Conditioning, or InfiniteTalk: the sound is of a video's frames alone, "
                               "and references have none.")
    key = "heard", network.num_frames()
    if key not in context.cuts:
        places, whole = places_of(context, ("image",), tokens_BTC.device)
        context.cuts[key] = places // (whole // network.num_frames())
    return context.cuts[key]


def lead_layers(context):
    """Does a network change what layers inside of blocks take or give? No graph knows of such."""
    return any(use.where in ("layers", "audio") for use, _ in context.networks)


def with_networks(context, where, which, given_BTC):
    """What keys ("0") or values ("1") of an attention are made of, with what the networks of a forward add there."""
    for use, network in context.networks:
        added = network.of_values(which, given_BTC) if use.where == where else None
        if added is not None:
            given_BTC = given_BTC + added * use.strength
    return given_BTC


def with_images(context, place, query_BNTH, out_BNTH, attend):
    """What attention to the text gives, with what the networks of a forward find in pictures: IP-Adapters (Ye et al.
    2023, arXiv 2308.06721) and others like it. place: of text_places. attend(query, key, value) -> like query. Every
    rank that has rows of the image calls it."""
    name, level = place
    own = _own_tokens(context, level, query_BNTH.shape[2])
    for use, network in context.networks:
        if use.where != "text":
            continue
        for key, value, mask, first in network.of_images(name, use.rows, query_BNTH):
            found = attend(query_BNTH, key, value)
            if first is not None:
                found = across(found, out_BNTH, query_BNTH, key, first, functools.partial(_add_up, context))
            if mask is not None:
                found = found * mask[:, None, own, None]
            out_BNTH = out_BNTH + found * use.strength
    return out_BNTH


def _own_tokens(context, level, tokens):
    """The slice of an image's tokens that this rank has, which are so many."""
    if context.bands is None:
        return slice(None)
    start, end = halved(context.bands, level)[context.exchange.rank:][:2]
    width = tokens // max(1, end - start)
    return slice(start * width, end * width)


def _add_up(context, tensors):
    """Over the ranks that have rows of the image."""
    return tensors if context.bands is None else all_reduce(tensors, context.exchange.group, context.traffic)


def text_places(model, num_levels):
    """{path of an attention to the text of diffusers' U-Net: (what ComfyUI calls its block, "input.4.0"; its level)}"""
    found = {}
    for side, way, number in (("input", "down_blocks", 1), ("output", "up_blocks", 0)):
        for level, block in enumerate(getattr(model, way)):
            for layer, attention in enumerate(getattr(block, "attentions", None) or ()):
                found |= {f"{way}.{level}.attentions.{layer}.transformer_blocks.{index}.attn2":
                          f"{side}.{number + layer}.{index}" for index in range(len(attention.transformer_blocks))}
            number += len(block.resnets) + len(getattr(block, "downsamplers", None) or ())
    for layer, attention in enumerate(getattr(model.mid_block, "attentions", None) or ()):
        found |= {f"mid_block.attentions.{layer}.transformer_blocks.{index}.attn2": f"middle.0.{index}"
                  for index in range(len(attention.transformer_blocks))}
    return {path: (name, level_of(path, num_levels)) for path, name in found.items()}


def control_names(context, places):
    """What of a call's `control` this rank's blocks take, in their order: what ControlNets and the like add, and the
    pictures that networks follow. places: of all blocks."""
    return [*(use.control_image for use, _ in context.networks if use.control_image),
            *(name for place in places if place.index in context.blocks for name in place.control)]
