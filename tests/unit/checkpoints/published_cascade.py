"""Names and shapes of published files of Stable Cascade, which ComfyUI's own modules take: as their publisher has them,
with one matrix for queries, keys and values. Used by test_header.py."""


def _layer(name, *shape):
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _residual(width, skip=0):
    return (_layer("depthwise", width, 1, 3, 3) | _layer("channelwise.0", 4 * width, width + skip)
            | {f"channelwise.2.{name}": (1, 1, 1, 4 * width) for name in ("gamma", "beta")}
            | _layer("channelwise.4", width, 4 * width))


def _time(width, times):
    return {name: shape for which in ("mapper", *times) for name, shape in _layer(which, 2 * width, 64).items()}


def _attention(width, text):
    own = _layer("out_proj", width, width) | {"in_proj_weight": (3 * width, width), "in_proj_bias": (3 * width,)}
    return {f"attention.attn.{name}": shape for name, shape in own.items()} | _layer("kv_mapper.1", width, text)


def _level(prefix, width, count, text, times, skip=0):
    """text: width of what its attentions read; None: it has none."""
    kinds = [_residual(width), _time(width, times), *([] if text is None else [_attention(width, text)])]
    blocks = kinds * count
    blocks[0] = _residual(width, skip)
    return {f"{prefix}{number}.{name}": shape for number, block in enumerate(blocks) for name, shape in block.items()}


def _levels(widths, counts, texts, times):
    """counts: of each level, on the way down; on the way up they are the same."""
    found, last = {}, len(widths) - 1
    for level, (width, count, text) in enumerate(zip(widths, counts, texts)):
        found |= _level(f"down_blocks.{level}.", width, count, text, times)
        found |= _level(f"up_blocks.{last - level}.", width, count, text, times, 0 if level == last else width)
    return found


def stage_c(width, counts):
    return (_layer("clip_txt_mapper", width, 1280) | _layer("clip_txt_pooled_mapper", 4 * width, 1280)
            | _layer("clip_img_mapper", 4 * width, 768) | _layer("embedding.1", width, 16, 1, 1)
            | _levels((width, width), counts, (width, width), ("mapper_sca", "mapper_crp"))
            | _layer("down_downscalers.1.1.blocks.0", width, width, 1, 1)
            | _layer("up_upscalers.0.1.blocks.1", width, width, 1, 1) | _layer("clf.1", 16, width, 1, 1))


def stage_b(widths, counts, texts, repeats):
    """repeats: of each level on the way up, how often its blocks run."""
    found = _layer("clip_mapper", 5120, 1280) | _layer("embedding.1", widths[0], 16, 1, 1)
    for name, channels in (("effnet", 16), ("pixels", 3)):
        found |= _layer(f"{name}_mapper.0", 4 * widths[0], channels, 1, 1)
        found |= _layer(f"{name}_mapper.2", widths[0], 4 * widths[0], 1, 1)
    for level, (above, below) in enumerate(zip(widths, widths[1:]), 1):
        found |= _layer(f"down_downscalers.{level}.1", below, above, 2, 2)
        up = f"up_upscalers.{len(widths) - 1 - level}.1"
        found |= {f"{up}.weight": (below, above, 2, 2), f"{up}.bias": (above,)}
    for level, (width, times) in enumerate(zip(widths[::-1], repeats)):
        for number in range(times - 1):
            found |= _layer(f"up_repeat_mappers.{level}.{number}", width, width, 1, 1)
    return found | _levels(widths, counts, texts, ("mapper_sca",)) | _layer("clf.1", 16, widths[0], 1, 1)


STAGE_C, STAGE_C_LITE = stage_c(2048, (8, 24)), stage_c(1536, (4, 12))
STAGE_B = stage_b((320, 640, 1280, 1280), (2, 6, 28, 6), (None, None, 1280, 1280), (3, 3, 2, 2))
STAGE_B_LITE = stage_b((320, 576, 1152, 1152), (2, 4, 14, 4), (None, None, 1280, 1280), (2, 2, 2, 2))
