"""Networks that nodes inject into a model: block-wise ControlNets, LLLite, InfiniteTalk, hypernetworks and image
adapters. Each rank runs them on its own tokens.

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
from .block_hooks import token_indices_of
from .nag import guided
from .pulid import orthogonalise

# of hypernetworks, names in torch.nn.functional
ACTIVATIONS = "relu", "leaky_relu", "elu", "hardswish", "tanh", "sigmoid", "softsign", "mish"
EPSILON = 1e-6                             # of the norms, as in ComfyUI


class Network:
    """A specs.NetworkSpec on this rank. Weights are copied to the device, in the compute dtype, when first used: a
    stage has those of its own blocks."""

    def __init__(self, spec, weights, device):
        """weights: {name: tensor in system RAM}."""
        self._spec, self._weights, self._device, self._on_device = spec, weights, device, {}

    @property
    def num_bytes(self):
        return sum(tensor.nbytes for tensor in self._on_device.values())

    def has(self, name):
        """Whether the network has this tensor."""
        return name in self._weights

    def weight(self, name, dtype):
        key = name, dtype
        if key not in self._on_device:
            self._on_device[key] = self._weights[name].to(self._device, dtype, copy=True)
        return self._on_device[key]

    def linear(self, name, tensor):
        return F.linear(tensor, *(self.weight(f"{name}.{kind}", tensor.dtype) for kind in ("weight", "bias")))

    def of_block(self, number, image_BTC, hint_BTC):
        """Residual of a block-wise ControlNet of Qwen-Image after a block. hint: the control image's tokens, in the
        order of the image's."""
        name, (width,) = f"{number}.", image_BTC.shape[2:]
        image, hint = (F.rms_norm(tokens, (width,), self.weight(f"{name}{norm}.weight", tokens.dtype), EPSILON)
                       for tokens, norm in ((image_BTC, "x_rms"), (hint_BTC, "y_rms")))
        return self.linear(f"{name}output_proj", F.gelu(self.linear(f"{name}input_proj", image + hint)))

    def of_layer(self, name, input_BTC, hint_BTC):
        """LLLite's addition to the input of a layer; None if it has none for this layer. hint: the control image's
        tokens, (B or 1, T, C), in the order of the input's."""
        if f"{name}.down.weight" not in self._weights:
            return None
        hint = hint_BTC + self.weight(f"{name}.depth_embed", input_BTC.dtype)
        scale, shift = self.linear(f"{name}.cond_to_film", hint).chunk(2, -1)
        hidden = F.silu(self.linear(f"{name}.down", input_BTC))
        hidden = self.linear(f"{name}.mid", torch.cat([hint.expand(len(hidden), -1, -1), hidden], -1))
        return self.linear(f"{name}.up", F.silu(hidden * (1 + scale) + shift))

    def of_audio(self, number, tokens_BTC, frames, positions=None):
        """InfiniteTalk's (MultiTalk, Kong et al. 2025, arXiv 2505.22647) addition to a block's tokens after attention
        to the text: attention of each to the audio of its frame. frames: of the tokens, (T,). positions: from
        infinite_talk.locate_speakers, (B, T). The network's tensors: "audio", (frames, T of one, C), and for two
        speakers "masks", (2, T of a frame)."""
        name, dtype = f"{number}.", tokens_BTC.dtype
        heads = lambda tensor: tensor.unflatten(2, (int(self._spec.settings["heads"]), -1)).transpose(1, 2)  # noqa: E731
        audio = self.weight("audio", dtype)
        normed = F.layer_norm(tokens_BTC, tokens_BTC.shape[2:], *(
            self.weight(f"{name}norm_x.{kind}", dtype) for kind in ("weight", "bias")))
        query = heads(self.linear(f"{name}audio_cross_attn.q_linear", normed))
        key, value = (heads(each).expand(len(query), -1, -1, -1) for each in self.linear(
            f"{name}audio_cross_attn.kv_linear", audio.flatten(0, 1)[None]).chunk(2, -1))
        if self.has_two_speakers:
            of_keys = infinite_talk.audio_positions(audio.shape[1], frames.device).repeat(len(audio))
            query, key = infinite_talk.rotated(query, positions), infinite_talk.rotated(key, of_keys[None])
        of_keys = torch.arange(len(audio), device=frames.device).repeat_interleave(audio.shape[1])
        found = F.scaled_dot_product_attention(query, key, value, frames[:, None] == of_keys)
        return self.linear(f"{name}audio_cross_attn.proj", found.transpose(1, 2).flatten(2))

    @property
    def has_two_speakers(self):
        """True for InfiniteTalk with two speakers."""
        return "masks" in self._weights

    @property
    def strengths(self):
        """Scale, alpha and tau of Normalized Attention Guidance."""
        return [float(self._spec.settings[name]) for name in ("scale", "alpha", "tau")]

    def num_frames(self):
        """Number of the audio's frames."""
        return self._weights["audio"].shape[0]

    def of_values(self, which, input_BTC):
        """A hypernetwork's addition to the input of the key ("0") or value ("1") projection; None if it has none for
        this width."""
        name = f"{input_BTC.shape[2]}.{which}"
        if name not in self._spec.settings:
            return None
        tensor = input_BTC
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

    def of_images(self, block, rows, query_BNTH):
        """Yield for each image adapter at a block ("input.4.0"): (key, value, mask, first).

        key, value: (B, N, T, H), of the adapter's images for each image of the call. mask: (B, T of the full image), or
        None. first: of pulid.orthogonalise; None: attention to the images is added as it is.
        rows: of specs.NetworkUse. The network's tensors: keys and values (prompts, images, T, N * H), and optionally a
        mask (1, images, T of the full image) and the number first, (1,).
        """
        for number in itertools.count():
            name = f"{block}.{number}"
            if f"{name}.keys" not in self._weights:
                return
            key, value = (self._of_rows(f"{name}.{kind}", rows, query_BNTH.dtype).unflatten(
                2, (query_BNTH.shape[1], -1)).transpose(1, 2) for kind in ("keys", "values"))   # BTC -> BNTH
            has_mask, first = f"{name}.mask" in self._weights, self._weights.get(f"{name}.first")
            yield (key, value, self._of_rows(f"{name}.mask", rows, query_BNTH.dtype) if has_mask else None,
                   None if first is None else int(first))

    def _of_rows(self, name, rows, dtype):
        """Rows of a tensor for each image of the call, on the device. If there are fewer images than in the call, the
        last one serves the others."""
        key = name, dtype, rows
        if key not in self._on_device:
            stored = self._weights[name]
            self._on_device[key] = torch.stack([
                stored[min(prompt, stored.shape[0] - 1), min(image, stored.shape[1] - 1)]
                for prompt, image in rows]).to(self._device, dtype)
        return self._on_device[key]


def add_to_blocks(context, position, outputs):
    """Add the residuals of a forward's networks after a block to this rank's image tokens, in place."""
    for number, (use, network) in enumerate(context.patches.networks):
        if use.where != "blocks":
            continue
        tokens = context.tokens
        streams = next(streams for streams in outputs if "image" in streams)
        start, size = sum(tokens.own((name,)) for name in streams[:streams.index("image")]), tokens.own(("image",))
        image = outputs[streams][:, start:start + size]
        image += network.of_block(position.number, image, _hint(context, number, use, image)) * use.strength


def _hint(context, number, use, tokens):
    """The control image of a network, for this rank's image tokens."""
    if ("network", number) not in context.state.cuts:
        context.state.cuts["network", number] = context.patches.control.take(use.image)
    return context.state.cuts["network", number].to(tokens.dtype)


def install_lllite(block, number, layers, current):
    """Hook the linears of a block whose input LLLite networks change. number: of the block. layers:
    ModelPlan.lllite_targets. current(): the context of the running forward, or None."""
    for path, name in layers.items():
        linear = block.get_submodule(path)
        linear.forward = _with_lllite(linear.forward, f"lllite_dit_blocks_{number}_{name}", current)


def _with_lllite(forward, name, current):
    @functools.wraps(forward)
    def with_lllite(tensor):
        context = None if torch.compiler.is_compiling() else current()
        for number, (use, network) in enumerate(context.patches.networks if context is not None else ()):
            added = (network.of_layer(name, tensor, _hint(context, number, use, tensor)) if use.where == "layers"
                     else None)
            if added is not None:
                tensor = tensor + added * use.strength
        return forward(tensor)
    return with_lllite


def install_audio(block, number, names, current):
    """Hook a block so that networks of a forward add their attention to audio after its attention to the text. number:
    of the block. names: ModelPlan.audio_attention. current(): see install_lllite."""
    norm, attention = map(block.get_submodule, names)
    normalise, attend = norm.forward, attention.forward

    def running():
        context = None if torch.compiler.is_compiling() else current()
        if context is None or not any(use.where == "audio" for use, _ in context.patches.networks):
            return None
        return context

    @functools.wraps(normalise)
    def normalised(tokens):
        if context := running():
            context.state.cuts["hidden_states"] = tokens       # to which the block will add its attention
        return normalise(tokens)

    @functools.wraps(attend)
    def attended(*args, **kwargs):
        found = attend(*args, **kwargs)
        if context := running():
            before = context.state.cuts["hidden_states"].to(found.dtype)
            for use, network in context.patches.networks:
                if use.where == "audio":
                    found = found + network.of_audio(number, before + found, _frames(context, network, found),
                                                     context.state.cuts.get("speakers")) * use.strength
        return found
    norm.forward, attention.forward = normalised, attended


def _frames(context, network, tokens_BTC):
    """Index of the audio frame of each of this rank's tokens, (T,), all of which are the image's."""
    if any(count for stream, count in context.tokens.counts.items() if stream != "image"):
        raise UnsupportedError("Remove Bernini Conditioning, or InfiniteTalk: InfiniteTalk's audio is for frames of "
                               "the video only, and references have none.")
    key = "audio_frames", network.num_frames()
    if key not in context.state.cuts:
        indices, num_tokens = token_indices_of(context, ("image",), tokens_BTC.device)
        context.state.cuts[key] = indices // (num_tokens // network.num_frames())
    return context.state.cuts[key]


def install_guide(attention, current):
    """Hook an attention to the text (ModelPlan.text_attention) so that networks of a forward guide its output.
    current(): see install_lllite."""
    forward = attention.forward

    @functools.wraps(forward)
    def attended(*args, **kwargs):
        context = None if torch.compiler.is_compiling() else current()
        if context is None or not any(use.where == "guide" for use, _ in context.patches.networks):
            return forward(*args, **kwargs)
        context.state.guided_attention = attention
        if hasattr(attention, "changed_text"):                 # attends to an image as well, by torch's own function
            attention.changed_text = lambda query, out: guide_text(context, query, out, F.scaled_dot_product_attention)
        output = forward(*args, **kwargs)
        if hasattr(attention, "changed_text"):
            attention.changed_text = lambda query, out: out
        assert context.state.guided_attention is None, "the attention to the text has called no attention function"
        return output
    attention.forward = attended


def guide_text(context, query_BNTH, out_BNTH, attend):
    """The output of the running attention to the text, pushed away from that to the texts of a forward's networks
    (nag.py). attend(query, key, value) -> like query. Every rank of the tensor axis calls it."""
    attention, context.state.guided_attention = context.state.guided_attention, None
    for use, network in context.patches.networks:
        images = [index for index, (kind, _) in enumerate(use.rows) if kind == 0] if use.where == "guide" else []
        if images:
            query, positive = query_BNTH[images], out_BNTH[images]
            text = network.weight("text", query.dtype)
            key, value = (each.unflatten(2, (-1, query.shape[3])).transpose(1, 2).expand(len(images), -1, -1, -1)
                          for each in (attention.norm_k(attention.to_k(text)), attention.to_v(text)))
            out_BNTH = out_BNTH.clone()
            out_BNTH[images] = guided(positive, attend(query, key, value), network.strengths, (1, 3), context.mesh,
                                      context.traffic)
    return out_BNTH


def guide_images(context, block, query_BNTH, out_BNTH, attend):
    """The output of an attention to the text of a U-Net, pushed away from that to the keys and values of a forward's
    networks (nag.py), for the images that they guide. block: its name, "input.4.0". attend: see guide_text."""
    for use, network in context.patches.networks:
        images = [index for index, (kind, _) in enumerate(use.rows) if kind == 0]
        if use.where == "guide" and images and network.has(f"{block}.keys"):
            query, positive = query_BNTH[images], out_BNTH[images]
            key, value = (network.weight(f"{block}.{kind}", query.dtype).unflatten(
                2, (query.shape[1], -1)).transpose(1, 2).expand(len(images), -1, -1, -1) for kind in ("keys", "values"))
            out_BNTH = out_BNTH.clone()
            out_BNTH[images] = guided(positive, attend(query, key, value), network.strengths, (1, 3))
    return out_BNTH


def has_layer_networks(context):
    """True if a network changes layers inside blocks, which compiled graphs do not support."""
    return any(use.where in ("layers", "audio", "guide") for use, _ in context.patches.networks)


def with_networks(context, where, which, input_BTC):
    """The input of an attention's key ("0") or value ("1") projection, plus the additions of a forward's networks."""
    for use, network in context.patches.networks:
        added = network.of_values(which, input_BTC) if use.where == where else None
        if added is not None:
            input_BTC = input_BTC + added * use.strength
    return input_BTC


def with_images(context, block, query_BNTH, out_BNTH, attend):
    """The output of an attention to the text plus that of image adapters, such as IP-Adapter (Ye et al. 2023, arXiv
    2308.06721). block: of text_attentions. attend(query, key, value) -> like query. Every rank that has rows of the
    image calls it."""
    name, level = block
    own = _own_tokens(context, level, query_BNTH.shape[2])
    for use, network in context.patches.networks:
        if use.where != "text":
            continue
        for key, value, mask, first in network.of_images(name, use.rows, query_BNTH):
            found = attend(query_BNTH, key, value)
            if first is not None:
                found = orthogonalise(found, out_BNTH, query_BNTH, key, first, functools.partial(_add_up, context))
            if mask is not None:
                found = found * mask[:, None, own, None]
            out_BNTH = out_BNTH + found * use.strength
    return out_BNTH


def _own_tokens(context, level, tokens):
    """Slice of an image's tokens that this rank has. tokens: their number."""
    if context.bands is None:
        return slice(None)
    start, end = halved(context.bands, level)[context.exchange.rank:][:2]
    width = tokens // max(1, end - start)
    return slice(start * width, end * width)


def _add_up(context, tensors):
    """Sum tensors over the ranks that have rows of the image."""
    return tensors if context.bands is None else all_reduce(tensors, context.exchange.group, context.traffic)


def text_attentions(model, num_levels):
    """{path of an attention to the text of diffusers' U-Net: (ComfyUI's name of its block, "input.4.0"; its level)}"""
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


def control_names(context, positions):
    """Names of the entries of a call's `control` that this rank's blocks take, in order: control images of networks,
    and insertion points of ControlNets and the like. positions: BlockPositions of all blocks."""
    return [*(use.image for use, _ in context.patches.networks if use.image),
            *(name for position in positions if position.index in context.blocks for name in position.control)]
