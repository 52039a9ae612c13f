"""Functions of nodes that replace the attention to the text of a U-Net: Normalized Attention Guidance (Chen et al.
2025, arXiv 2505.21179) and PLADIS (Kim et al. 2025, arXiv 2503.07677) of sd-perturbed-attention. Objects of image
adapters are in image_adapters.py.

A function is recognised by the names of the variables that it closes over and by its result for a test input.

# B batch, N heads, T tokens, C channels
"""

import types
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.specs import Entmax
from . import image_adapters
from .unet_patches import cell

KIND = image_adapters.KIND
INNER = "prev_attn2_replace"               # of guidance: the function that it wraps, or None
GUIDE = {"nag_scale", "tau", "alpha", "sigma_start", "sigma_end", "k_neg", "v_neg", INNER}
SPARSE = {"pladis_scale", "sparse_func"}
ALPHAS = 1.5, 2.0                          # of entmax: entmax-1.5 and sparsemax
HEADS, SIZE = 2, 4                         # of tests
TOLERANCE = 1e-4                           # absolute


class Guide(NamedTuple):
    """Guidance of an attention to the text away from that to a second text."""

    keys: torch.Tensor                     # (1, T, C)
    values: torch.Tensor
    strengths: tuple[float, float, float]  # scale, alpha and tau of xdit_backend/hooks/nag.py
    sigmas: tuple[float, float]            # it acts above the first, up to the second


def guides_of(function, tested):
    """(the function that is guided, or None for plain attention; its Guides, in the order in which they act). tested: a
    dict with the results of tests, which calls for several functions share."""
    guides = []
    while _closes_over(function, GUIDE) and _tested(tested, function.__code__, _is_guide, function):
        value = {name: cell(function, name).cell_contents for name in GUIDE}
        guides.insert(0, Guide(value["k_neg"], value["v_neg"], (
            float(value["nag_scale"]) + 1, float(value["alpha"]), float(value["tau"])), (
                float(value["sigma_end"]), float(value["sigma_start"]))))
        function = value[INNER]
    return function, guides


def entmax_of(function, tested):
    """The specs.Entmax of attention that extrapolates from dense to sparse weights; None for other functions. tested:
    see guides_of."""
    return _tested(tested, function, _entmax_of, function) if _closes_over(function, SPARSE) else None


def _tested(tested, key, test, function):
    if key not in tested:
        tested[key] = test(function)
    return tested[key]


def _entmax_of(function):
    scale = float(cell(function, "pladis_scale").cell_contents)
    return next((Entmax(scale, alpha) for alpha in ALPHAS if _is_sparse(function, scale, alpha)), None)


def adapters_in(function, tested):
    """The object of image adapters that a function is or guides; None without one. tested: see guides_of."""
    function, _ = guides_of(function, tested)
    return None if function is None or entmax_of(function, tested) is not None else function


def refused_in(functions):
    """Describe what is unknown of functions that replace attention to the text, for the user."""
    tested = {}
    inner = filter(None, (adapters_in(function, tested) for function in functions))
    return list(filter(None, map(image_adapters.why_refused, inner)))


def replaced_in(blocks, transformer_options):
    """{block, "input.4.0": function} of a call of a U-Net. blocks: of block_patches, with those that hold others."""
    replaced, found = transformer_options.get("patches_replace", {}).get(KIND, {}), {}
    for block in blocks:
        side, number, *index = block.split(".")
        if index:
            key = side, int(number)
            function = replaced.get((*key, int(index[0]))) or replaced.get(key)
            if function is not None:
                found[block] = function
    return found


def active_guides(blocks, transformer_options):
    """{block, "input.4.0": (Guide, ...) that act at the sigma of a call of a U-Net}; {} for a call without the positive
    prompt. blocks: see replaced_in.

    Raises UnsupportedError where the node's own code would fail.
    """
    tested = {}
    found = {block: guides for block, function in replaced_in(blocks, transformer_options).items()
             if (guides := guides_of(function, tested)[1])}
    prompts = transformer_options.get("cond_or_uncond", ())
    if any(len(guide.keys) != 1 for guides in found.values() for guide in guides):
        raise UnsupportedError("Connect one prompt to Normalized Attention Guidance (sd-perturbed-attention): it has a "
                               "batch of several, with which ComfyUI fails.")
    if not found or 0 not in prompts:
        return {}
    if any(prompts[prompts.index(0):]):
        raise UnsupportedError("Use a sampler node for a MODEL with Normalized Attention Guidance "
                               f"(sd-perturbed-attention): this call has its prompts in the order {list(prompts)}, "
                               "and the node requires the positive ones (0) last.")
    sigma = transformer_options["sigmas"][0].item()
    active = {block: tuple(guide for guide in guides if guide.sigmas[0] < sigma <= guide.sigmas[1])
              for block, guides in found.items()}
    return {block: guides for block, guides in active.items() if guides}


def sparse_of(family, blocks, transformer_options):
    """{"attn2." and the block: specs.Entmax} of a call of a U-Net. blocks: see replaced_in. Raises UnsupportedError for
    guidance or sparse weights in a video model."""
    tested = {}
    for function in transformer_options["patches_replace"][KIND].values() if family.has_frames_as_batch else ():
        inner, guides = guides_of(function, tested)
        if guides or entmax_of(inner, tested) is not None:
            node = "Normalized Attention Guidance (sd-perturbed-attention)" if guides else "PLADIS"
            raise UnsupportedError(f"Remove {node}: it is for images, and {family.name} generates videos.")
    return {f"{KIND}.{block}": entmax for block, function in replaced_in(blocks, transformer_options).items()
            if (entmax := entmax_of(guides_of(function, tested)[0], tested)) is not None}


def _closes_over(function, names):
    return isinstance(function, types.FunctionType) and names == {*function.__code__.co_freevars}


def _with(function, **values):
    """The function with other closure variables."""
    cells = (types.CellType(values[name]) if name in values else each
             for name, each in zip(function.__code__.co_freevars, function.__closure__))
    return types.FunctionType(function.__code__, function.__globals__, "same", function.__defaults__, tuple(cells))


def _inputs(num_images):
    """Queries, keys and values, (B, T, C)."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(num_images, count, HEADS * SIZE, generator=generator) for count in (5, 6, 6))


def _attention(query, key, value):
    each = (tensor.unflatten(2, (HEADS, SIZE)).transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(*each).transpose(1, 2).flatten(2)


def _is_guide(function):
    """Whether this function computes what guide_images of xdit_backend/hooks/injected_networks.py does. Tested with
    another text and other strengths, for both prompts and at a sigma at which it does not act."""
    query, key, value = _inputs(4)
    keys, values = 0.5 * key[:1, :3].flip(2), value[:1, :3].flip(2)
    scale, tau, alpha = 2.0, 1.3, 0.4
    same = _with(function, nag_scale=scale, tau=tau, alpha=alpha, sigma_start=2.0, sigma_end=0.5, k_neg=keys,
                 v_neg=values, **{INNER: None})
    expected = _attention(query, key, value)
    positive, negative = expected[2:], _attention(query[2:], keys.expand(2, -1, -1), values.expand(2, -1, -1))
    far = positive * (scale + 1) - negative * scale
    ratio = far.abs().sum(-1, keepdim=True) / positive.abs().sum(-1, keepdim=True)
    guided = alpha * far * (ratio.clamp_max(tau) / ratio) + (1 - alpha) * positive
    try:
        return all(torch.allclose(same(query, key, value, {
            "n_heads": HEADS, "attn_precision": None, "cond_or_uncond": [1, 0],
            "sigmas": torch.tensor([sigma])}), torch.cat([expected[:2], acts]), atol=TOLERANCE)
                   for sigma, acts in ((1.0, guided), (0.5, positive), (2.5, positive)))
    except Exception:                                          # raised by a node's code for unexpected arguments
        return False


def _is_sparse(function, scale, alpha):
    """Whether this function computes attention by xdit_backend/attention/entmax.py."""
    query, key, value = _inputs(2)
    logits = (3 * query.unflatten(2, (HEADS, SIZE)).transpose(1, 2)
              @ key.unflatten(2, (HEADS, SIZE)).permute(0, 2, 3, 1)) / SIZE ** 0.5
    weights = scale * _entmax(logits, alpha) + (1 - scale) * logits.softmax(-1)
    expected = (weights @ value.unflatten(2, (HEADS, SIZE)).transpose(1, 2)).transpose(1, 2).flatten(2)
    try:
        found = function(3 * query, key, value, {"n_heads": HEADS, "attn_precision": None})
    except Exception:                                          # raised by a node's code for unexpected arguments
        return False
    return torch.allclose(found, expected, atol=TOLERANCE * max(1, scale))


def _entmax(logits, alpha, steps=50):
    """Entmax over the last dim, by bisection of its threshold (Peters, Niculae and Martins 2019, arXiv 1905.05702)."""
    logits = (logits.double() - logits.amax(-1, keepdim=True)) * (alpha - 1)

    def weights(threshold):
        return (logits - threshold).clamp_min(0) ** (1 / (alpha - 1))
    low, high = -torch.ones_like(logits[..., :1]), torch.zeros_like(logits[..., :1])
    for _ in range(steps):
        middle = (low + high) / 2
        is_low = weights(middle).sum(-1, keepdim=True) > 1
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    return weights((low + high) / 2).float()
