"""Shared code of the U-Net families: arguments of diffusers' class from a file's shapes, tensor names and arguments of
the forward.

A U-Net has no list of blocks that tokens pass through: it works on images, and each level on images of half the size of
the level before.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from .family import Detection, Family, Inputs, SmallConfig
from .inputs import Unpacked, because, blocks, config_of, from_conditioning, has, size, timestep
from .key_mapping import table
from .plan import UNetPlan

LATENT = Unpacked((1, 1))

OF_VIDEOS = "UNetSpatioTemporalConditionModel"
CLASSES = "UNet2DConditionModel", OF_VIDEOS  # diffusers' classes of models whose files have the publisher's names

# prefix of the publisher's names -> diffusers'
OUTSIDE = {"input_blocks.0.0.": "conv_in.", "out.0.": "conv_norm_out.", "out.2.": "conv_out.",
           "time_embed.0.": "time_embedding.linear_1.", "time_embed.2.": "time_embedding.linear_2.",
           "label_emb.weight": "class_embedding.weight", "label_emb.0.0.": "class_embedding.linear_1.",
           "label_emb.0.2.": "class_embedding.linear_2.", "middle_block.0.": "mid_block.resnets.0.",
           "middle_block.1.": "mid_block.attentions.0.", "middle_block.2.": "mid_block.resnets.1."}
IN_RESNET = {"in_layers.0.": "norm1.", "in_layers.2.": "conv1.", "emb_layers.1.": "time_emb_proj.",
             "out_layers.0.": "norm2.", "out_layers.3.": "conv2.", "skip_connection.": "conv_shortcut."}
KEYS = table(
    # sampling markers; projection of the CLIP vision embedding, which ComfyUI computes itself
    (r"^(?:edm_mean|edm_std|edm_vpred\.sigma_max|edm_vpred\.sigma_min|v_pred|ztsnr|cc_projection\..*)$", None),
    *((rf"^{re.escape(own)}", other) for own, other in OUTSIDE.items()),
    *((rf"(resnets\.\d+(?:\.time_stack)?)\.{re.escape(own)}", rf"\1.{other}") for own, other in IN_RESNET.items()))
OF_RESNET = re.compile(rf"(resnets\.\d+\.(?:time_stack\.)?)({'|'.join(map(re.escape, IN_RESNET.values()))})")
# for video U-Nets, from diffusers' names of image U-Nets: temporal layers are next to the spatial ones that they follow
VIDEO_KEYS = table((r"^class_embedding\.", "add_embedding."),
                   (r"(resnets\.\d+)\.(?=norm|conv|time_emb_proj)", r"\1.spatial_res_block."),
                   (r"(resnets\.\d+)\.time_stack\.", r"\1.temporal_res_block."),
                   (r"(attentions\.\d+)\.time_stack\.", r"\1.temporal_transformer_blocks."),
                   (r"time_pos_embed\.0\.", "time_pos_embed.linear_1."),
                   (r"time_pos_embed\.2\.", "time_pos_embed.linear_2."))
# inverse of VIDEO_KEYS
FROM_VIDEO = ((".spatial_res_block.", "."), (".temporal_res_block.", ".time_stack."),
              (".temporal_transformer_blocks.", ".time_stack."), (".time_pos_embed.linear_1.", ".time_pos_embed.0."),
              (".time_pos_embed.linear_2.", ".time_pos_embed.2."))
OF_LEVEL = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Architecture:
    """Differences between the U-Nets of the families.

    context_widths: widths of the text embeddings that its files may take. num_heads(width of a level): number of
    attention heads. alone, block: see planner.memory_model.unet_memory. num_classes: number of noise level classes, for
    models with a class embedding instead of a vector. only_cross_attention: for each level, whether its first attention
    reads the text too.
    """

    context_widths: tuple[int, ...]
    num_heads: Callable[[int], int]
    alone: float
    block: float
    num_classes: int | None = None
    only_cross_attention: tuple[bool, ...] | bool = False


def unet(name, title, architecture, testing, refusals=(), values=()):
    """A family of U-Nets in ComfyUI's and the publisher's format. values: as in Family."""
    return Family(
        name=name, title=title, transformer="UNet2DConditionModel", adapt_model=_adapt,
        activation_factors={"alone": architecture.alone, "block": architecture.block},
        num_channels=lambda config: config["out_channels"], num_heads=lambda config: None,
        width=lambda config: config["block_out_channels"][0], called_by_nodes=(".attn2.to_k", ".attn2.to_v"),
        detection=Detection(
            values=values, convert=convert, config_from_tensors=("sample_size",),
            recognise=lambda shapes: (has("input_blocks.0.0.weight")(shapes)
                                      and _context_width(shapes) in architecture.context_widths
                                      and not has_temporal_layers(shapes)
                                      and has("label_emb.weight")(shapes) == (architecture.num_classes is not None)),
            refusals=(*refusals, EVEN), config=config_rules(architecture)),
        inputs=Inputs(
            latent=LATENT,
            conditioning={"context": "cross_attention_dim", "y": "projection_class_embeddings_input_dim"},
            arguments={"sample": LATENT, "timestep": timestep(), "encoder_hidden_states": from_conditioning("context"),
                       "class_labels": from_conditioning("y", where="class_embed_type")}),
        plan=PLAN, testing=testing)


def has_temporal_layers(shapes):
    """Whether a U-Net has temporal layers over the frames of videos."""
    return any(".time_stack." in name for name in shapes)


def config_rules(architecture):
    """Rules for the arguments of diffusers' class from a file's shapes."""
    return config_of(
        sample_size=64, in_channels=size("input_blocks.0.0.weight", 1), out_channels=size("out.2.weight", 0),
        block_out_channels=_widths, layers_per_block=lambda shapes: len(_levels(shapes)[0]),
        down_block_types=lambda shapes: tuple(f"{_kind(depth)}DownBlock2D" for depth in _depths(shapes)),
        up_block_types=lambda shapes: tuple(f"{_kind(depth)}UpBlock2D" for depth in reversed(_depths(shapes))),
        # the last also applies to the middle block
        transformer_layers_per_block=lambda shapes: (*(depth or 1 for depth in _depths(shapes)[:-1]),
                                                     _depth(shapes, "middle_block") or _depths(shapes)[-1] or 1),
        reverse_transformer_layers_per_block=_decoder_depths, mid_block_type=_kind_of_middle,
        # diffusers' name for the number of heads
        attention_head_dim=lambda shapes: tuple(architecture.num_heads(width) for width in _widths(shapes)),
        cross_attention_dim=_context_width, only_cross_attention=architecture.only_cross_attention,
        num_class_embeds=architecture.num_classes,
        use_linear_projection=lambda shapes: any(name.endswith(".1.proj_in.weight") and len(shape) == 2
                                                 for name, shape in shapes.items()),
        # for a vector that ComfyUI has already embedded
        class_embed_type=lambda shapes: "projection" if has("label_emb.0.")(shapes) else None,
        projection_class_embeddings_input_dim=lambda shapes: (shapes["label_emb.0.0.weight"][1]
                                                              if has("label_emb.0.")(shapes) else None))


def unet_small_config(detected, config, arguments):
    """SmallConfig of a U-Net family. config, arguments: of diffusers' class and ComfyUI's, where they are specific
    to the family."""
    return SmallConfig(
        {"sample_size": 64, "in_channels": 4, "out_channels": 4, "norm_num_groups": 8, "cross_attention_dim": 24,
         "class_embed_type": None, **config},
        "comfy.ldm.modules.diffusionmodules.openaimodel:UNetModel",
        {"image_size": 32, "use_checkpoint": False, "legacy": False, "use_spatial_transformer": True, "in_channels": 4,
         "out_channels": 4,
         **arguments}, detected=detected)


def convert(tensors, config):
    """Convert the publisher's names, which number the layers consecutively over all levels, to diffusers'."""
    return KEYS({_in_level(name, config["layers_per_block"]): tensor for name, tensor in tensors.items()}, config)


def convert_of_videos(tensors, config):
    """Convert the names of a U-Net with temporal layers."""
    return VIDEO_KEYS(convert(tensors, config), config)


def settings_of(folder_config):
    """A folder's config.json in the form of the config that is made from a file's shapes.

    Leaves out settings that the tensors imply and those that ComfyUI handles: compute dtypes, and how SDXL's vector is
    embedded.
    """
    config = {key: value for key, value in folder_config.items() if not key.startswith("_")
              and key not in ("upcast_attention", "addition_time_embed_dim", "projection_class_embeddings_input_dim")}
    kinds = config.get("down_block_types") or ()
    each = lambda value: (value,) * len(kinds) if isinstance(value, int) else tuple(value or ())  # noqa: E731
    if config.get("addition_embed_type") == "text_time" and not config.get("class_embed_type"):
        config |= {"addition_embed_type": None, "class_embed_type": "projection"}
    config["attention_head_dim"] = each(config.pop("num_attention_heads", None) or config.get("attention_head_dim", 8))
    depths = each(config.get("transformer_layers_per_block", 1))
    # The depth of a level without attention is ignored; the last also applies to the middle block.
    depths = tuple(_identical(depth) if kind.startswith("Cross") else 1
                   for kind, depth in zip(kinds, depths[:-1])) + tuple(map(_identical, depths[-1:]))
    config["transformer_layers_per_block"] = depths
    up = config.get("reverse_transformer_layers_per_block")
    if up is not None:
        up = tuple(1 if not kind.startswith("Cross") else tuple(depth) if isinstance(depth, list) else depth
                   for kind, depth in zip(config.get("up_block_types") or (), up))
        config["reverse_transformer_layers_per_block"] = None if up == depths[::-1] else tuple(map(_identical, up))
    return config


def _identical(depth):
    """A single number if all layers have the same number of blocks."""
    return depth if isinstance(depth, int) else depth[0] if len(set(depth)) == 1 else tuple(depth)


def publishers_names(names):
    """Map diffusers' names of a U-Net's tensors to the publisher's: {diffusers' name: publisher's}. Other names are
    unchanged."""
    if any(".temporal_res_block." in name for name in names):
        of_others = {name: functools.reduce(lambda name, pair: name.replace(*pair), FROM_VIDEO, name) for name in names}
        found = publishers_names(of_others.values())
        return {name: found[other] for name, other in of_others.items()}
    num_layers = len({name.split(".")[3] for name in names if name.startswith("down_blocks.0.resnets.")})
    with_attention = {name.split(".")[1] for name in names if name.startswith("up_blocks.") and ".attentions." in name}
    return {name: _publishers_name(name, num_layers, with_attention) for name in names}


def _publishers_name(name, num_layers, with_attention):
    own = {other: each for each, other in IN_RESNET.items()}
    name = OF_RESNET.sub(lambda match: match[1] + own[match[2]], name.replace("add_embedding.", "class_embedding."))
    match = OF_LEVEL.fullmatch(name)
    if match is None:
        own = {other: each for each, other in OUTSIDE.items()}
        return next((name.replace(other, each, 1) for other, each in own.items() if name.startswith(other)), name)
    way, level, kind, layer, rest = match.groups()
    first = int(level) * (num_layers + 1) + (way == "down")
    if kind == "downsamplers":
        return f"input_blocks.{first + num_layers}.0.op.{rest.removeprefix('conv.')}"
    if kind == "upsamplers":
        return f"output_blocks.{first + num_layers}.{1 + (level in with_attention)}.{rest}"
    return f"{'input' if way == 'down' else 'output'}_blocks.{first + int(layer)}.{int(kind == 'attentions')}.{rest}"


def _in_level(name, num_layers):
    match = re.match(r"(in|out)put_blocks\.(\d+)\.(\d+)\.(.*)", name)
    if match is None or match[2] == "0" and match[1] == "in":
        return name
    down = match[1] == "in"
    level, layer = divmod(int(match[2]) - down, num_layers + 1)
    block = f"{'down' if down else 'up'}_blocks.{level}"
    if match[4].startswith("op.") and down and layer == num_layers:
        return f"{block}.downsamplers.0.conv.{match[4].removeprefix('op.')}"
    if match[4].startswith("conv.") and not down and layer == num_layers:
        return f"{block}.upsamplers.0.{match[4]}"
    return f"{block}.{'resnets' if match[3] == '0' else 'attentions'}.{layer}.{match[4]}"


def _levels(shapes):
    """Numbers of the input blocks of each level. A level ends with the block that halves the image."""
    levels = [[]]
    for block in range(1, blocks("input_blocks.")(shapes)):
        if f"input_blocks.{block}.0.op.weight" in shapes:
            levels.append([])
        else:
            levels[-1].append(block)
    return levels


def _widths(shapes):
    return tuple(shapes[f"input_blocks.{layers[0]}.0.out_layers.3.weight"][0] for layers in _levels(shapes))


def _depth(shapes, block):
    """Number of transformer blocks in a block of the file; 0 without attention."""
    return blocks(f"{block}.1.transformer_blocks.")(shapes)


def _depths(shapes):
    return [_depth(shapes, f"input_blocks.{layers[0]}") for layers in _levels(shapes)]


def skips(config):
    widths = config["block_out_channels"]
    skips = [(widths[0], 0)]
    for level, width in enumerate(widths):
        skips += [(width, level)] * config["layers_per_block"] + [(width, level + 1)] * (level + 1 < len(widths))
    return skips


PLAN = UNetPlan(first="conv_in", num_levels=lambda config: len(config["block_out_channels"]), skips=skips)


def _kind(depth):
    return "CrossAttn" if depth else ""


def _up(shapes):
    """Number of transformer blocks in each layer of each decoder level, from the smallest image."""
    levels = _levels(shapes)
    a_level = len(levels[0]) + 1
    return [[_depth(shapes, f"output_blocks.{level * a_level + layer}") for layer in range(a_level)]
            for level in range(len(levels))]


def _decoder_depths(shapes):
    """Depths of the decoder levels; None if they mirror the encoder's."""
    up, middle = _up(shapes), _depth(shapes, "middle_block")
    down = [depth or 1 for depth in _depths(shapes)[:-1]] + [middle or _depths(shapes)[-1] or 1]
    found = tuple(_identical([depth or 1 for depth in depths]) for depths in up)
    return None if _kinds_only(up) == _kinds_only(up, down[::-1]) else found


def _kinds_only(up, depths=None):
    """Depths of the levels that have attention: one for each layer, or the level's repeated."""
    return [list(layers) if depths is None else [depths[level]] * len(layers)
            for level, layers in enumerate(up) if layers[0]]


def _kind_of_middle(shapes):
    if _depth(shapes, "middle_block"):
        return "UNetMidBlock2DCrossAttn"
    return "UNetMidBlock2D" if has("middle_block.0.")(shapes) else None


def _adapt(model, config):
    """Without a middle block (KOALA), add a ControlNet's middle output where that block would be, as ComfyUI does."""
    if model.mid_block is None:
        model.mid_block = NoMiddle()


class NoMiddle(nn.Module):
    """Placeholder for a missing middle block: (B, C, H, W) to the same."""

    resnets = ()

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


def _is_uneven(shapes):
    levels, up, middle = _levels(shapes), _up(shapes), _depth(shapes, "middle_block")
    down = [[_depth(shapes, f"input_blocks.{block}") for block in layers] for layers in levels]
    return (len({len(layers) for layers in levels}) > 1 or any(len(set(depths)) > 1 for depths in down)
            or any((depth > 0) != (depths[0] > 0) for depths, of_level in zip(reversed(down), up) for depth in of_level)
            or bool(middle) and down[-1][0] not in (0, middle))


EVEN = because("its levels have layers or attention in an arrangement that diffusers' U-Net does not support",
               _is_uneven)


def _context_width(shapes):
    """Width of the text that cross-attention reads; None without cross-attention."""
    shape = next((shape for name, shape in shapes.items() if name.endswith(".attn2.to_k.weight")), ())
    return shape[1] if len(shape) == 2 and math.prod(shape) else None
