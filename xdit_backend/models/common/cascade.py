"""Shared code of the two stages of Stable Cascade: networks of ComfyUI's whose levels are lists of residual, attention
and time blocks. The names of a file's tensors give the kind of each block.

Pernias et al. 2023 (Wuerstchen, arXiv 2306.00637); shapes and arguments as in ComfyUI's comfy/ldm/cascade.
"""

from ...protocol.errors import ConfigError
from .inputs import because, blocks, from_conditioning
from .key_mapping import table
from .plan import ReplicatedPlan

# module that only this kind of block has -> the class's letter for the kind
KINDS = {"depthwise": "C", "mapper": "T", "attention": "A"}
HEAD = 64                                  # width of an attention head
# width of the time embedding; kernel size of residual blocks; tokens per CLIP vector
TIMES, KERNEL, CLIP_TOKENS = 64, 3, 4
WHY = ("each of its residual blocks scales a channel by its norm over the full image relative to the other channels "
       "(global response norm), which a device with only a shard of the image or of the channels cannot compute")
REFUSED = dict.fromkeys(("ulysses", "ring", "pipefusion", "displaced", "tensor"), WHY)

# published files have torch's fused attention projection, which ComfyUI splits
KEYS = table((r"attn\.in_proj_(weight|bias)$", (r"attn.to_q.\1", r"attn.to_k.\1", r"attn.to_v.\1"), (1, 1, 1)))


def plan(control=lambda config: []):
    return ReplicatedPlan(num_levels=lambda config: len(config["c_hidden"]), control=control)


def _kinds(shapes, side, level):
    """Kinds of the blocks of a level, in order, such as "CTACTA"."""
    found, prefix = {}, f"{side}.{level}."
    for number, part in (name[len(prefix):].split(".")[:2] for name in shapes if name.startswith(prefix)):
        if part in KINDS:
            found[int(number)] = KINDS[part]
    return "".join(found.get(number, "?") for number in range(blocks(prefix)(shapes)))


def _of_levels(rule, *sides):
    """Apply a rule to each level of a side, and return a tuple; for two sides, a tuple for each."""
    def found(shapes):
        of_sides = tuple(tuple(rule(shapes, side, level) for level in range(blocks(f"{side}.")(shapes)))
                         for side in sides)
        return of_sides if len(sides) > 1 else of_sides[0]
    return found


def _order(shapes, side, level):
    """Kinds of the blocks that a level repeats, such as "CTA"."""
    first, *_ = _kinds(shapes, side, level)[1:].split("C")
    return f"C{first}"


def _width(shapes, side, level):
    return shapes[f"{side}.{level}.0.depthwise.weight"][0]


def _heads(shapes, side, level):
    """Number of attention heads; -1 for a level without attention, as in the class."""
    return _width(shapes, side, level) // HEAD if "A" in _kinds(shapes, side, level) else -1


def _is_uneven(shapes):
    kinds, orders = _of_levels(_kinds, "down_blocks", "up_blocks")(shapes), _of_levels(_order, "down_blocks")(shapes)
    return any(of_level != order * (len(of_level) // len(order))
               for of_side, own in zip(kinds, (orders, orders[::-1])) for of_level, order in zip(of_side, own))


REFUSALS = (because("its levels do not repeat the same residual, time and attention blocks", _is_uneven),)


def rules(patch_size):
    """Arguments of either class from a file's shapes."""
    return {
        "c_in": lambda shapes: shapes["embedding.1.weight"][1] // patch_size ** 2,
        "c_out": lambda shapes: shapes["clf.1.weight"][0] // patch_size ** 2, "patch_size": patch_size,
        "c_r": TIMES, "c_clip_seq": CLIP_TOKENS, "kernel_size": KERNEL,
        "c_hidden": _of_levels(_width, "down_blocks"), "nhead": _of_levels(_heads, "down_blocks"),
        "level_config": _of_levels(_order, "down_blocks"),
        "blocks": _of_levels(lambda shapes, side, level: _kinds(shapes, side, level).count("C"), "down_blocks",
                             "up_blocks"),
        "block_repeat": _of_levels(
            lambda shapes, side, level: 1 + blocks(f"{side[:-len('blocks')]}repeat_mappers.{level}.")(shapes),
            "down_blocks", "up_blocks")}


def vector(name):
    """Rule for a pooled text embedding, which the forward requires. Raises ConfigError without one."""
    rule = from_conditioning(name)

    def found(call):
        if name not in call.conditioning:
            raise ConfigError("Encode the prompt with the CLIP of Stable Cascade: the conditioning has no pooled text, "
                              "which the model needs.")
        return rule(call)
    return found
