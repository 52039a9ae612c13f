"""Enhance-A-Video (Luo et al. 2025, arXiv 2502.07508): nodes that replace the forward of a video model's self-attention
by one whose output is multiplied by a factor, which grows with the attention between frames.

A function is recognised by the two settings of the object that it closes over and by its result for a test input.

# B batch, N heads, T tokens, C channels
"""

import copy
import inspect
import types

import torch

from ....xdit_backend.protocol.errors import ConfigError, UnsupportedError
from ....xdit_backend.protocol.specs import Enhance
from .attention_override import OVERRIDE

NODE = "Enhance-A-Video"
SETTINGS = "num_frames", "enhance_weight"  # attributes of the object that a function closes over
FRAMES, WEIGHT, POSITIONS = 3, 5.0, 4      # of tests; the last: tokens of a frame
INPUTS = 0.02, 3.0                         # standard deviations of tests: with the first, the factor is above 1
TOLERANCE = 1e-4                           # absolute


def settings_of(function):
    """(frames, weight) of such a method; None for other functions."""
    owner = _owner(function)
    return None if owner is None else tuple(getattr(owner, name) for name in SETTINGS)


def _owner(function):
    contents = [cell.cell_contents for cell in function.__func__.__closure__ or () if cell != types.CellType()]
    return next((each for each in contents if all(hasattr(each, name) for name in SETTINGS)), None)


def enhances(light, width, own, function):
    """Whether a method computes the forward of a module's class, multiplied by the factor of
    xdit_backend/hooks/enhance_video.py. light: the module with elementwise functions in place of layers with weights.
    width: C. own: the forward of its class, (module, tokens (B, T, C), ...)."""
    owner = copy.copy(_owner(function))
    owner.num_frames, owner.enhance_weight = FRAMES, WEIGHT
    called = function.__func__
    cells = (types.CellType(owner) if all(hasattr(cell.cell_contents, name) for name in SETTINGS) else cell
             for cell in called.__closure__)
    same = types.FunctionType(called.__code__, called.__globals__, "same", called.__defaults__, tuple(cells))
    attended = []

    def attend(attention, query, key, value, heads, *args, **options):
        attended[:] = [each.unflatten(2, (heads, -1)).transpose(1, 2) for each in (query, key)]    # BTC -> BNTH
        return attention(query, key, value, heads, *args, **options)

    for deviation in INPUTS:
        generator = torch.Generator().manual_seed(0)
        tokens = deviation * torch.randn(2, FRAMES * POSITIONS, width, generator=generator)
        more = {"transformer_options": {OVERRIDE: attend}}
        if "freqs" in inspect.signature(own).parameters:       # Wan's positions, as rotations of pairs
            angles = torch.rand(1, FRAMES * POSITIONS, 1, light.head_dim // 2, generator=generator)
            rotations = [angles.cos(), -angles.sin(), angles.sin(), angles.cos()]
            more["freqs"] = torch.stack(rotations, -1).unflatten(-1, (2, 2))
        found = same(light, tokens.clone(), **more)
        expected = own(light, tokens.clone(), **more)
        if not torch.allclose(found, expected * _factor(*attended), atol=TOLERANCE):
            return False
    return True


def _factor(query_BNTH, key_BNTH):
    query, key = (each.unflatten(2, (FRAMES, POSITIONS)).transpose(2, 3) for each in (query_BNTH, key_BNTH))
    weights = (query @ key.transpose(3, 4) / query.shape[-1] ** 0.5).softmax(-1)
    between = weights.sum() - weights.diagonal(dim1=3, dim2=4).sum()
    mean = between / (weights.numel() - weights.numel() / FRAMES)
    return (mean * (FRAMES + WEIGHT)).clamp_min(1)


def enhanced_of(family, config, enhanced, transformer_options, count_tokens):
    """Return {path of a block: specs.Enhance} of a call. enhanced: {path of an attention: (frames, weight)}, of
    ForwardPatches.enhanced. count_tokens() -> Family.token_counts of the call.

    Raises UnsupportedError for modules that are no self-attention of a block, and for inputs or patches that the node's
    forward ignores; ConfigError for a latent that it cannot process.
    """
    if not enhanced:
        return {}
    blocks = {f"{list_.file_prefix}{number}" for list_ in family.blocks for number in range(config[list_.count])}
    paths = [path.rpartition(".")[0] for path in enhanced]
    unknown = next((path for path in paths if path not in blocks), None)
    if unknown is not None:
        raise UnsupportedError(f"Remove Enhance-A-Video: for {family.name} xDiT does not support its change of the "
                               f"attention in {unknown}.")
    counts = count_tokens()
    others = [name for name, count in counts.items()
              if count and name != "image" and any("image" in each and name in each for list_ in family.plan.lists
                                                   for each in list_.attention.values())]
    if others or transformer_options.get("patches", {}).get("attn1_patch"):
        raise UnsupportedError("Remove Enhance-A-Video, or the node that adds "
                               f"{', '.join(others) or 'InfiniteTalk'}: the first processes the frames of the latent "
                               "only.")
    for frames, _ in enhanced.values():
        if frames < 2:
            raise ConfigError(f"Remove Enhance-A-Video, or connect a latent of more frames to it: it compares frames, "
                              f"and its latent has {frames}.")
        if counts["image"] % frames:
            raise ConfigError(f"Connect the latent that the sampler gets to Enhance-A-Video: its latent has {frames} "
                              f"frames, which do not divide the {counts['image']} tokens of this one.")
    return {path: Enhance(int(frames), float(weight)) for path, (frames, weight) in zip(paths, enhanced.values())}
