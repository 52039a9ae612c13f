"""What the two stages of Stable Cascade have in common: networks of ComfyUI's whose levels are lists of residual,
attention and time blocks. A file's names say which block is which.

Pernias et al. 2023 (Wuerstchen, arXiv 2306.00637); shapes and arguments as of ComfyUI's comfy/ldm/cascade.
"""

from ...protocol.errors import ConfigError
from .inputs import because, blocks, from_conditioning
from .key_mapping import table
from .plan import ReplicatedPlan

# what a block of each kind has of its own -> what the class calls the kind
KINDS = {"depthwise": "C", "mapper": "T", "attention": "A"}
HEAD = 64                                  # width of an attention head
TIMES, KERNEL, CLIP_TOKENS = 64, 3, 4      # width of a time; of residual blocks; tokens that a vector of CLIP's becomes
WHY = ("each of its residual blocks weighs a channel by its size over the whole picture beside the other channels' "
       "(global response norm), which a device that has a part of the picture or of the channels lacks")
REFUSED = dict.fromkeys(("ulysses", "ring", "pipefusion", "displaced", "tensor"), WHY)

# as it is published, a layer of torch's own; ComfyUI takes it apart
KEYS = table((r"attn\.in_proj_(weight|bias)$", (r"attn.to_q.\1", r"attn.to_k.\1", r"attn.to_v.\1"), (1, 1, 1)))


def plan(control=lambda config: []):
    return ReplicatedPlan(num_levels=lambda config: len(config["c_hidden"]), control=control)


def _kinds(shapes, side, level):
    """The kinds of the blocks of a level, in order, such as "CTACTA"."""
    found, prefix = {}, f"{side}.{level}."
    for number, part in (name[len(prefix):].split(".")[:2] for name in shapes if name.startswith(prefix)):
        if part in KINDS:
            found[int(number)] = KINDS[part]
    return "".join(found.get(number, "?") for number in range(blocks(prefix)(shapes)))


def _of_levels(rule, *sides):
    """A tuple of a rule's answers for each level of a side; of both, one for each."""
    def found(shapes):
        of_sides = tuple(tuple(rule(shapes, side, level) for level in range(blocks(f"{side}.")(shapes)))
                         for side in sides)
        return of_sides if len(sides) > 1 else of_sides[0]
    return found


def _order(shapes, side, level):
    """The blocks of which a level is so many repetitions, such as "CTA"."""
    first, *_ = _kinds(shapes, side, level)[1:].split("C")
    return f"C{first}"


def _width(shapes, side, level):
    return shapes[f"{side}.{level}.0.depthwise.weight"][0]


def _heads(shapes, side, level):
    """-1 where a level has no attention, as the class has it."""
    return _width(shapes, side, level) // HEAD if "A" in _kinds(shapes, side, level) else -1


def _is_uneven(shapes):
    kinds, orders = _of_levels(_kinds, "down_blocks", "up_blocks")(shapes), _of_levels(_order, "down_blocks")(shapes)
    return any(of_level != order * (len(of_level) // len(order))
               for of_side, own in zip(kinds, (orders, orders[::-1])) for of_level, order in zip(of_side, own))


REFUSALS = (because("its levels are no repetitions of residual, time and attention blocks", _is_uneven),)


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
    """A pooled text, which the forward cannot do without."""
    rule = from_conditioning(name)

    def found(call):
        if name not in call.conditioning:
            raise ConfigError("Encode the prompt with the CLIP that belongs to Stable Cascade: the conditioning has no "
                              "pooled text, which its model reads.")
        return rule(call)
    return found
