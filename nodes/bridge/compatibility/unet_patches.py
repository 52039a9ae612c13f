"""U-Net patches of ComfyUI's nodes that act before a decoder block is joined with its skip: FreeU, and Kohya's Deep
Shrink, which also downscales feature maps in the encoder.
"""

import math

import torch
import torch.nn.functional as F

from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.specs import FreeU, Shrink

FILE = "nodes_model_downscale.py"
SHRINKING = "PatchModelAddDownscale.execute.<locals>.input_block_patch"
ENLARGING = "PatchModelAddDownscale.execute.<locals>.output_block_patch"
INPUT_PATCHES = "input_block_patch", "input_block_patch_after_skip"
OWN = "bislerp"                            # a method that only ComfyUI has
NODE = "PatchModelAddDownscale"


def num_tokens(family, config, shape):
    """{ComfyUI's block of a U-Net, ("input", 4): its number of image tokens}. shape: of the latent."""
    skips = [math.prod(size) for name, (_, *size) in family.control_shapes(config, shape).items()
             if name.startswith("input.")]
    return {("middle", 0): skips[-1], **{("input", number): count for number, count in enumerate(skips)},
            **{("output", number): count for number, count in enumerate(reversed(skips))}}


def cell(function, name):
    """The closure variable of a node's function."""
    return function.__closure__[function.__code__.co_freevars.index(name)]


def joins_of(family, transformer_options, control, functions):
    """Return (specs.FreeU or Shrink, ...) of a call in their order. functions: of its output blocks, all known.
    control: of ComfyUI's ControlNets.

    Raises UnsupportedError if a node would change the size of another node's input.
    """
    shrinks = _shrinks(transformer_options, [each for each in functions if each.__qualname__ == ENLARGING])
    if any(shrink.is_active for shrink in shrinks):
        _refuse_others(family, transformer_options, control)
    else:
        shrinks = []
    found = []
    for function in functions:
        if function.__qualname__ != ENLARGING:
            found.append(FreeU({str(channels): tuple(map(float, scales)) for channels, scales
                                in cell(function, "scale_dict").cell_contents.items()},
                               "V2" in function.__qualname__))
        else:
            found += shrinks
            shrinks = []                                       # after the first, feature maps have the skips' size
    return tuple(found)


def _shrinks(transformer_options, enlarging):
    patches = transformer_options.get("patches", {})
    shrinking = [(kind, function) for kind in INPUT_PATCHES for function in patches.get(kind, ())]
    if len(shrinking) != len(enlarging):
        raise UnsupportedError(f"Use {NODE} without changing its patches: this MODEL has {len(shrinking)} of them that "
                               f"downscale and {len(enlarging)} that upscale.")
    found = []
    for kind, function in shrinking:
        block, factor, start, end, method = (cell(function, name).cell_contents for name in (
            "block_number", "downscale_factor", "sigma_start", "sigma_end", "downscale_method"))
        methods = method, cell(enlarging[0], "upscale_method").cell_contents
        if OWN in methods:
            raise UnsupportedError(f"Choose another method than {OWN} in {NODE}: the workers do not support it.")
        is_active = end <= transformer_options["sigmas"][0].item() <= start
        found.append(Shrink(block, float(factor), kind.endswith("after_skip"), is_active, *methods))
    return found


def _refuse_others(family, transformer_options, control):
    """Raise UnsupportedError for nodes that depend on the usual sizes of feature maps."""
    replaced, patches = (transformer_options.get(kind, {}) for kind in ("patches_replace", "patches"))
    named = [getattr(function, "__qualname__", "") for function in (*patches.get("attn1_patch", ()),
                                                                    *replaced.get("attn1", {}).values())]
    others = {"Apply ControlNet": any(tensor is not None for tensors in (control or {}).values() for tensor in tensors),
              "HyperTile": any(name.startswith("HyperTile.") for name in named),
              "Self-Attention Guidance": any(name.startswith("SelfAttentionGuidance.") for name in named),
              "the attn_mask of IP-Adapter": any(arguments.get("mask") is not None for function in replaced.get(
                  "attn2", {}).values() for arguments in function.kwargs)}
    name = next((name for name, is_there in others.items() if is_there), None)
    if name is not None:
        raise UnsupportedError(f"Remove {NODE} or {name}: the first resizes feature maps inside the model, and the "
                               "second depends on their usual sizes.")
    if family.has_frames_as_batch:
        raise UnsupportedError(f"Remove {NODE}: it is for images, and {family.name} generates videos.")


def is_shrink(kind, function):
    """Whether a function of PatchModelAddDownscale computes what xdit_backend/hooks/unet_patches.py does. Tested with
    few pixels."""
    image = torch.arange(30.0).view(1, 1, 5, 6)
    if kind not in INPUT_PATCHES:
        method = cell(function, "upscale_method").cell_contents
        large, skip = function(image, torch.zeros(1, 1, 9, 8), {})
        return method == OWN or skip.shape == (1, 1, 9, 8) and torch.equal(
            large, F.interpolate(image, size=(9, 8), mode=method))
    block, factor, start, method = (cell(function, name).cell_contents for name in (
        "block_number", "downscale_factor", "sigma_start", "downscale_method"))
    if method == OWN:
        return True
    sigmas = torch.tensor([start], dtype=torch.float64)
    image = image.repeat(1, 1, 4, 4)
    small, same = (function(image, {"block": ("input", number), "sigmas": sigmas}) for number in (block, block + 1))
    size = [round(length * (1.0 / factor)) for length in image.shape[2:]]
    return same is image and torch.equal(small, F.interpolate(image, size=size, mode=method))


def is_free_u(function):
    """Whether this function computes what free_u of xdit_backend/hooks/unet_patches.py does. Tested with two pixels and
    a skip of one."""
    channels, (strength, weakness) = next(iter(cell(function, "scale_dict").cell_contents.items()))
    hidden, skip = function(torch.tensor([0.0, 1.0]).expand(1, channels, 1, 2).clone(), torch.ones(1, 1, 1, 1), {})
    half = channels // 2
    return (torch.allclose(hidden[0, :half, 0], torch.tensor([0.0, strength]).expand(half, 2))
            and torch.allclose(hidden[0, half:, 0], torch.tensor([0.0, 1.0]).expand(channels - half, 2))
            and torch.allclose(skip, torch.tensor(weakness)))
