"""Token Perturbation Guidance (Rajabi et al. 2025, arXiv 2506.10036): nodes that replace the forwards of transformer
blocks of a U-Net by ones that shuffle their tokens in calls with an option.

A function is recognised by what it passes on to the forward that it closes over. The orders of the tokens are
sampled here, from the same generator and in the same sequence as by ComfyUI's own model.
"""

import inspect
import re
import types

import torch

from ....xdit_backend.protocol.errors import UnsupportedError
from .unet_patches import INPUT_PATCHES, num_tokens

BLOCK = re.compile(r"(input|middle|output)_blocks?(?:\.(\d+))?\.\d+\.transformer_blocks\.(\d+)")
NUM_TOKENS = 7                             # of tests


class _Options(dict):
    """Options that record the keys that are looked up."""

    def __init__(self, *entries):
        super().__init__(*entries)
        self.looked_up = []

    def get(self, key, default=None):
        self.looked_up.append(key)
        return super().get(key, default)


def option_of(module, function):
    """Key of transformer_options with which a function in place of a module's forward shuffles its tokens; None for
    other functions."""
    inner = inspect.unwrap(function)
    contents = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
    if [each for each in contents if _is_forward(module, each)] != contents or len(contents) != 1:
        return None
    passed = []

    def forward(tokens, **more):
        passed[:] = [tokens, more]
        return tokens
    same = types.FunctionType(inner.__code__, inner.__globals__, "same", inner.__defaults__, (types.CellType(forward),))
    tokens, text, options = torch.arange(2.0 * NUM_TOKENS).view(2, NUM_TOKENS, 1), object(), _Options()

    def passes_on(expected):
        out = same(tokens, context=text, transformer_options=options)
        return torch.equal(out, expected) and torch.equal(passed[0], expected) and passed[1] == {
            "context": text, "transformer_options": options}
    if not passes_on(tokens) or len(set(options.looked_up)) != 1:
        return None
    options[options.looked_up[0]] = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        order, after = torch.randperm(NUM_TOKENS), torch.get_rng_state()
        torch.manual_seed(0)
        shuffles = passes_on(tokens[:, order]) and torch.equal(torch.get_rng_state(), after)
    return options.looked_up[0] if shuffles else None


def _is_forward(module, value):
    return (isinstance(value, types.MethodType) and value.__self__ is module
            and value.__func__ is type(module).forward)


def orders_of(family, config, x, options, transformer_options, displaced_degree):
    """Return {block of a U-Net, "input.4.0": order of its tokens, (T,) int64} of a call, sampled now. x: its
    latent. options: {path of a block: key}, of ForwardPatches.shuffling.

    Raises UnsupportedError for blocks and methods that the workers do not support.
    """
    active = [path for path, key in options.items() if transformer_options.get(key)]
    if not active:
        return {}
    matches = {path: BLOCK.fullmatch(path) for path in active}
    if not family.plan.takes_unet_patches or family.has_frames_as_batch or not all(matches.values()):
        raise UnsupportedError(f"Remove Token Perturbation Guidance: it is for image models with a U-Net, and this is "
                               f"{family.name}.")
    if displaced_degree > 1:
        raise UnsupportedError("Use cfg_degree or data_degree instead of displaced_degree: Token Perturbation Guidance "
                               "shuffles the tokens of the full image.")
    if any(transformer_options.get("patches", {}).get(kind) for kind in INPUT_PATCHES):
        raise UnsupportedError("Remove Token Perturbation Guidance or PatchModelAddDownscale: the second resizes the "
                               "feature maps whose tokens the first shuffles.")
    tokens, found = num_tokens(family, config, x.shape), {}
    for match in matches.values():                             # in the order in which the model runs them
        block = match[1], int(match[2] or 0)
        found[f"{block[0]}.{block[1]}.{match[3]}"] = torch.randperm(tokens[block], device=x.device)
    return found
