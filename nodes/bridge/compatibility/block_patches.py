"""Block patches: functions of ComfyUI's nodes that replace a block or attention, or run after a block. Known functions
are mapped to named operations, which the workers carry out.

A function is recognised by the file and name of its definition and by its result for a test input; a network by file
and name alone. Any other function is rejected in model_options.py.
"""

import math
import os

import torch
import torch.nn.functional as F
from torchvision.transforms.functional import gaussian_blur

from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.specs import Blur, Nag
from . import image_adapters, text_attention, unet_patches
from .ltx_guidance import value_blocks
from .unet_patches import cell

ANY_SIZE = 1, 1, 1, 1                       # of a latent, for checks before a run
HYPERNETWORK = "load_hypernetwork_patch.<locals>.hypernetwork_patch.__call__"
LLLITE_OF_ATTENTION = "lllite.py", "AnimaLLLiteAttentionPatch.__call__"
# layers that an LLLite's patches of each kind apply to
LLLITE_TARGETS = {"attn1_patch": {"q": "self_attn_q_proj", "k": "self_attn_k_proj", "v": "self_attn_v_proj"},
                  "attn2_patch": {"q": "cross_attn_q_proj"}}
# kind of ComfyUI's patch -> {(file, function): operation}
KNOWN = {
    "dit": {("nodes_slg.py", "SkipLayerGuidanceDiT.execute.<locals>.skip"): "skip",
            ("nodes_slg.py", "SkipLayerGuidanceDiTSimple.execute.<locals>.skip"): "skip"},
    "attn1": {("nodes_pag.py", "PerturbedAttentionGuidance.execute.<locals>.perturbed_attention"): "values",
              ("guidance_utils.py", "perturbed_attention"): "values",          # of sd-perturbed-attention
              ("guidance_utils.py", "seg_attention_wrapper.<locals>.seg_attention"): "blur",
              ("nodes_sag.py", "SelfAttentionGuidance.execute.<locals>.attn_and_record"): "scores"},
    "attn1_output_patch": {("nodes_nag.py", "NAGuidance.execute.<locals>.nag_attention_output_patch"): "nag",
                           ("nodes_hypertile.py", "HyperTile.execute.<locals>.hypertile_out"): "tiles",
                           ("nodes_tomesd.py", "TomePatchModel.execute.<locals>.tomesd_u"): "merges"},
    "output_block_patch": {("nodes_freelunch.py", f"{node}.execute.<locals>.output_block_patch"): "free_u"
                           for node in ("FreeU",
                                        "FreeU_V2")} | {(unet_patches.FILE, unet_patches.ENLARGING): "shrinks"},
    **{kind: {(unet_patches.FILE, unet_patches.SHRINKING): "shrinks"} for kind in unet_patches.INPUT_PATCHES},
    "attn1_patch": {("nodes_hypernetwork.py", HYPERNETWORK): "network", LLLITE_OF_ATTENTION: "lllite_layer",
                    ("nodes_flux.py", "KV_Attn_Input.__call__"): "reference_cache",
                    ("model_multitalk.py", "MultiTalkGetAttnMapPatch.__call__"): "speaker_masks",
                    ("nodes_hypertile.py", "HyperTile.execute.<locals>.hypertile_in"): "tiles",
                    ("nodes_tomesd.py", "TomePatchModel.execute.<locals>.tomesd_m"): "merges"},
    "attn2_patch": {("nodes_hypernetwork.py", HYPERNETWORK): "network", LLLITE_OF_ATTENTION: "lllite_layer",
                    ("model_multitalk.py", "MultiTalkCrossAttnPatch.__call__"): "audio_attention"},
    "mlp_patch": {("lllite.py", "AnimaLLLiteMLPPatch.__call__"): "lllite_layer"},
    "post_input": {("lllite.py", "AnimaLLLitePatch.__call__"): "lllite",
                   ("nodes_flux.py", "FluxKVCache.execute.<locals>.model_input_patch"): "reference_removal",
                   ("nodes_model_patch.py", "UsoStyleProjectorPatch.__call__"): "style_tokens"},
    "double_block": {("nodes_model_patch.py", "DiffSynthCnetPatch.__call__"): "network",
                     ("nodes_model_patch.py", "ZImageControlPatch.__call__"): "residuals",
                     ("nodes_model_patch.py", "WanUni3CCnetPatch.__call__"): "residuals"},
    "noise_refiner": {("nodes_model_patch.py", "ZImageControlPatch.__call__"): "residuals"}}
CACHE = "input_patch_obj"                  # variable shared by Flux KV Cache's functions
OUTPUT, OUTPUT_BLOCK = "attn1_output_patch", "output_block_patch"
NODES = ("such as Skip Layer Guidance, Perturbed-Attention Guidance, Self-Attention Guidance or Normalized Attention "
         "Guidance")


def operation_of(kind, function):
    """Return the operation of a function of this kind, or None if it is not known."""
    if kind == image_adapters.KIND:
        return None if text_attention.refused_in([function]) else "adapters"
    name, marker = _named(kind, function), object()
    tests = {"skip": lambda: function(marker, None) is marker,
             "values": lambda: function(None, None, marker, None) is marker,
             "blur": lambda: _blurs_queries(function),
             "scores": lambda: _writes_scores(function), "nag": lambda: _is_nag(function),
             **dict.fromkeys(("network", "audio_attention", "speaker_masks", "style_tokens", "lllite", "residuals",
                              "merges"), lambda: True),
             "lllite_layer": lambda: kind == "mlp_patch" or function.targets == LLLITE_TARGETS[kind],
             "free_u": lambda: unet_patches.is_free_u(function),
             "shrinks": lambda: unet_patches.is_shrink(kind, function),
             "reference_cache": lambda: _caches_references(function),
             "reference_removal": lambda: _removes_references(function),
             "tiles": lambda: kind == OUTPUT or _cuts_tiles(function)}
    return name if name and tests[name]() else None


def _named(kind, function):
    """Return the operation by the function's file and name alone, without testing its result."""
    called = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(called, "__code__", None)
    return code and KNOWN.get(kind, {}).get((os.path.basename(code.co_filename), called.__qualname__))


def operations_of(family, config, transformer_options, shape, displaced_degree):
    """Return {block, by ComfyUI's name: operation} of a call, for the blocks that the model has; ComfyUI's models
    ignore other blocks as well. shape: of the latent.

    Raises UnsupportedError if ComfyUI's model supports no such patches, or the workers not with this displaced_degree.
    """
    found = {}
    for kind, replaced in transformer_options.get("patches_replace", {}).items():
        if kind == image_adapters.KIND and family.plan.is_unet:           # adapters: sampling/image_adapters.py
            found |= text_attention.sparse_of(family, text_blocks(family, config), transformer_options)
            continue
        blocks = _blocks(family, config, kind)
        if replaced and not blocks:
            raise _ignored_patches(family, kind)
        for key, function in replaced.items():
            name = ".".join(map(str, key))
            if name in blocks:
                operation = operation_of(kind, function)
                if operation == "scores" and family.has_frames_as_batch:
                    raise UnsupportedError("Remove Self-Attention Guidance: the node needs attention between the "
                                           f"pixels of one image, and {family.name} also attends along frames there.")
                if operation == "blur":
                    if displaced_degree > 1:
                        raise UnsupportedError("Use cfg_degree or data_degree instead of displaced_degree: Smoothed "
                                               "Energy Guidance blurs queries over the full image.")
                    sigma = cell(function, "blur_sigma").cell_contents
                    operation = Blur(float(sigma), *shape[-2:])
                # scores are those of the negative prompt
                if operation != "scores" or 1 in transformer_options.get("cond_or_uncond", ()):
                    found[name] = operation
            elif family.plan.takes_unet_patches and family.has_frames_as_batch:
                raise UnsupportedError(f"Remove the node that replaces attention in {name}, or use Load Diffusion "
                                       f"Model: for {family.name} xDiT supports this in the middle block only.")
    values = {f"double_block.{number}" for number in value_blocks(family, transformer_options)}
    return dict.fromkeys(values & family.plan.patched_blocks(config, "dit"), "values") | found


def guided_of(family, transformer_options):
    """Return the specs.Nag of a call in their order; () for a call with one prompt, in which ComfyUI's nodes do
    nothing. Raises UnsupportedError if ComfyUI's model ignores such patches."""
    functions, prompts = _guiding(transformer_options), transformer_options.get("cond_or_uncond", ())
    if functions and not family.plan.takes_output_patches:
        raise _ignored_patches(family, OUTPUT)
    if not (0 in prompts and 1 in prompts):
        return ()
    return tuple(_nag_of(function, prompts) for function in functions)


def residual_networks_in(transformer_options):
    """Return {kind: networks} of a call that add residuals to the image tokens after blocks and do not read these."""
    return _of_operation("residuals", transformer_options)


def styles_in(transformer_options):
    """Return the networks of a call that compute tokens from an image, which are prepended to the text's."""
    return _of_operation("style_tokens", transformer_options).get("post_input", [])


def audio_networks_in(transformer_options):
    """Return (networks of a call with attention to audio, bool masks (2, tokens) of two speakers in the first frame or
    None)."""
    apart = _of_operation("speaker_masks", transformer_options).get("attn1_patch", [])
    return (_of_operation("audio_attention", transformer_options).get("attn2_patch", []),
            next((each.ref_target_masks for each in reversed(apart) if each.ref_target_masks is not None), None))


def networks_in(transformer_options):
    """Return {kind: networks} of a call that workers run because they read the model's activations."""
    return _of_operation("network", transformer_options)


def lllites_in(transformer_options):
    """Return the LLLite patches of a call in their order, which workers run as networks inside blocks.
    Raises UnsupportedError for an incomplete one, which no node of ComfyUI creates."""
    found = _of_operation("lllite", transformer_options).get("post_input", [])
    layers = _of_operation("lllite_layer", transformer_options)
    for kind in ("attn1_patch", "attn2_patch", "mlp_patch"):
        if found != [function.patch for function in layers.get(kind, [])]:
            raise UnsupportedError("Use Apply Anima LLLite without changing its patches: a node has changed some of "
                                   f"them ({kind}).")
    return found


def has_cached_references(transformer_options):
    """Whether a MODEL has patches of Flux KV Cache."""
    return bool(_of_operation("reference_cache", transformer_options)
                or _of_operation("reference_removal", transformer_options))


def caches_references(family, transformer_options):
    """Whether a call fills or uses Flux KV Cache's keys and values of references. Raises UnsupportedError if ComfyUI's
    model does not support it, and for two such nodes, with which ComfyUI fails."""
    caching = _of_operation("reference_cache", transformer_options).get("attn1_patch", [])
    removing = _of_operation("reference_removal", transformer_options).get("post_input", [])
    if not (caching or removing):
        return False
    if family.plan.cached_references is None:
        raise UnsupportedError(f"Remove Flux KV Cache: it is for Flux models, and this is {family.name}.")
    if len(caching) != 1 or caching != [cell(function, CACHE).cell_contents for function in removing]:
        raise UnsupportedError("Use Flux KV Cache once, without changing its patches: this MODEL has patches of "
                               "several such nodes, or only some patches of one.")
    return True


def _of_operation(operation, transformer_options):
    found = {kind: [function for function in functions
                    if _named(kind, function) == operation == operation_of(kind, function)]
             for kind, functions in transformer_options.get("patches", {}).items()
             if operation in KNOWN.get(kind, {}).values()}
    return {kind: functions for kind, functions in found.items() if functions}


def free_u_of(family, transformer_options, control=None):
    """Return the specs.FreeU and Shrink of a call in their order. Raises UnsupportedError if ComfyUI's model ignores
    them, and as unet_patches.joins_of."""
    functions = transformer_options.get("patches", {}).get(OUTPUT_BLOCK, ())
    if functions and not family.plan.takes_unet_patches:
        raise _ignored_patches(family, OUTPUT_BLOCK)
    return unet_patches.joins_of(family, transformer_options, control, functions)


def compares_branches(transformer_options):
    """Whether a call's branches are compared in each layer, so that they must stay in one batch."""
    return bool(_guiding(transformer_options))


def _guiding(transformer_options):
    return [function for function in transformer_options.get("patches", {}).get(OUTPUT, ())
            if _named(OUTPUT, function) not in ("tiles", "merges")]


def tiles_of(family, config, transformer_options, shape):
    """Return specs.Branch.tiles of a call: the result of HyperTile's own function for each size of feature map. shape:
    of the latent.

    Raises UnsupportedError if ComfyUI's model ignores it, if tiles are selected at random, if the attention is also
    replaced, or if its keys are not pixels of one image; and for ToMe.
    """
    refuse_random_merges(transformer_options)
    functions = _of_operation("tiles", transformer_options).get("attn1_patch", [])
    if not functions:
        return {}
    if not family.plan.takes_unet_patches:
        raise _ignored_patches(family, "attn1_patch")
    if family.has_frames_as_batch or config["only_cross_attention"]:
        raise UnsupportedError(f"Remove HyperTile: some tokens that it cuts into tiles in {family.name} are not pixels "
                               "of one image.")
    if len(functions) > 1 or transformer_options.get("patches_replace", {}).get("attn1"):
        raise UnsupportedError("Remove HyperTile, or the other node that changes self-attention (another HyperTile, "
                               "Perturbed-Attention or Self-Attention Guidance): xDiT does not combine them.")
    if cell(functions[0], "swap_size").cell_contents > 2:
        raise UnsupportedError("Set swap_size of HyperTile to 2 or less: above that it selects tile sizes at random "
                               "in every layer, and each device would select different ones.")
    found = {}
    for _, rows, columns in family.control_shapes(config, shape).values():
        cut, tile = _tile_of(functions[0], torch.empty(1, rows * columns, 1, device="meta"), shape)
        if tile is not None:
            found[str(rows * columns)] = tile
    return found


def _tile_of(function, tokens_BTC, shape):
    """Return (these tokens as HyperTile cuts them, (rows and columns of tiles, rows and columns of one tile) or
    None)."""
    cut = function(tokens_BTC, None, None, {"original_shape": list(shape)})[0]
    variable = cell(function, "temp")
    tile, variable.cell_contents = variable.cell_contents, None
    if tile is None:
        return cut, None
    rows, columns, height, width = tile
    return cut, (rows, columns, height // rows, width // columns)


def _cuts_tiles(function):
    """Whether this function cuts tokens as xdit_backend/hooks/unet_patches.py does. Tested with an image of 2 x 2
    tiles, if it cuts that."""
    side = 2 * cell(function, "latent_tile_size").cell_contents
    tokens = torch.arange(side * side).view(1, -1, 1)
    cut, tile = _tile_of(function, tokens, (1, 4, side, side))
    if tile is None:
        return torch.equal(cut, tokens)
    rows, columns, height, width = tile
    return torch.equal(cut, tokens.view(rows, height, columns, width).transpose(1, 2).reshape(rows * columns, -1, 1))


def refuse_random_merges(transformer_options):
    """Raise UnsupportedError for ToMe."""
    if _of_operation("merges", transformer_options):
        raise UnsupportedError("Remove TomePatchModel, or use Load Diffusion Model: it selects the tokens to merge at "
                               "random in every layer, and each device would select different ones.")


def refuse_patches(family, config, transformer_options):
    """Raise UnsupportedError for patches that a call of this family's model would reject whatever its inputs are.
    config: arguments of the transformer's class."""
    refuse_random_merges(transformer_options)
    for check in (guided_of, free_u_of, caches_references):
        check(family, transformer_options)
    operations_of(family, config, transformer_options, ANY_SIZE, 1)


class Scores:
    """Attention scores of a call's negative prompt, for Self-Attention Guidance. buffer: filled by the workers, see
    specs.Branch.scores."""

    def __init__(self, family, config, transformer_options, shape, displaced_degree):
        """shape: of the call's latent."""
        functions = transformer_options.get("patches_replace", {}).get("attn1", {}).values()
        self._functions = [function for function in functions if operation_of("attn1", function) == "scores"]
        self._prompts = transformer_options.get("cond_or_uncond", ())
        _, *sizes = family.control_shapes(config, shape)["middle.0"]
        self.buffer = torch.zeros(displaced_degree, shape[0], torch.Size(sizes).numel())

    def write(self, device):
        """Write the workers' scores to the node's own variable. The node reduces (images x heads, queries, keys) by a
        mean over heads and a sum over queries; the workers have done both."""
        size = self.buffer.shape[1] // len(self._prompts)
        scores = self.buffer.sum(0)[size * self._prompts.index(1):][:size, None].to(device)
        for function in self._functions:
            cell(function, "attn_scores").cell_contents = scores


def scores_of(family, config, transformer_options, shape, displaced_degree):
    """Return the Scores of a call, or None if no node reads them or the call has no negative prompt."""
    operations = operations_of(family, config, transformer_options, shape, displaced_degree)
    wanted = "scores" in operations.values()
    return Scores(family, config, transformer_options, shape, displaced_degree) if wanted else None


def _nag_of(function, prompts):
    scale, alpha, tau = (float(cell(function, name).cell_contents) for name in ("nag_scale", "nag_alpha", "nag_tau"))
    return Nag(scale, alpha, tau, prompts.index(0), prompts.index(1), len(prompts))


def _is_nag(function):
    """Whether this function computes what xdit_backend/hooks/nag.py does. Tested with one channel, 1 for the positive
    and -1 for the negative prompt."""
    out = torch.tensor([-1.0, 1.0]).view(2, 1, 1).expand(2, 3, 1).clone()
    nag = _nag_of(function, [1, 0])
    guided = 2 * nag.scale - 1
    final = math.copysign(min(abs(guided), nag.tau), guided) * nag.alpha + 1 - nag.alpha
    expected = torch.tensor([[-1, final, final], [1, final, final]])
    return torch.allclose(function(out, {"cond_or_uncond": [1, 0], "img_slice": [1, 3]})[..., 0], expected, atol=1e-4)


def _caches_references(function):
    """Whether this object computes what xdit_backend/parallel/reference_kv_cache.py does. Tested with a new object of
    its class, one image token and one reference token."""
    fresh, block = type(function)(), {"block_type": "single", "block_index": 0}
    keys, values, later = torch.randn(3, 1, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    with_references = {**block, "reference_image_num_tokens": [1]}
    first, again = (fresh(keys, key, values, with_references) for key in (keys, later))
    return (not function.cache and not fresh(keys, keys, values, block) and torch.equal(first["k"], keys)
            and torch.equal(again["k"], torch.cat([later, keys[:, :, 1:]], 2))
            and torch.equal(again["v"], torch.cat([values, values[:, :, 1:]], 2)))


def _removes_references(function):
    """Whether this function removes the image's last tokens, those of references, once the cache is filled."""
    cache, image = cell(function, CACHE).cell_contents.cache, torch.zeros(1, 5, 2)

    def tokens():
        options = {"reference_image_num_tokens": [1, 2]}
        return function({"img": image, "transformer_options": options})["img"].shape[1]
    before = tokens()
    cache["tested"] = None
    try:
        return (before, tokens()) == (5, 2)
    finally:
        del cache["tested"]


def _blurs_queries(function):
    """Whether this function is attention whose queries are blurred as in xdit_backend/hooks/unet_patches.py. Tested
    with an image of 8 x 12 tokens, against torchvision's blur."""
    sigma, (rows, columns, heads, size) = cell(function, "blur_sigma").cell_contents, (8, 12, 2, 4)
    query, key, value = torch.randn(3, 1, rows * columns, heads * size, generator=torch.Generator().manual_seed(0))
    out = function(query.clone(), key, value, {"n_heads": heads, "original_shape": [1, 4, 8 * rows, 8 * columns]})
    taps = min(math.ceil(6 * sigma) // 2 * 2 + 1, columns + 1)
    if sigma < 0:
        query = query.mean(1, keepdim=True).expand_as(query)
    elif taps // 2 < rows:
        image = query.transpose(1, 2).unflatten(2, (rows, columns))
        query = gaussian_blur(image, [taps, taps], [sigma, sigma]).flatten(2).transpose(1, 2)
    else:                                                      # wider than the image
        return False
    query, key, value = (each.unflatten(2, (heads, size)).transpose(1, 2) for each in (query, key, value))
    expected = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    return torch.allclose(out, expected, atol=1e-4)


def _writes_scores(function):
    """Whether this function is attention that writes its scores to the node's variable."""
    query, key, value = torch.randn(3, 1, 2, 4, generator=torch.Generator().manual_seed(0))
    scores_of_node = cell(function, "attn_scores")
    before = scores_of_node.cell_contents
    try:
        out = function(query, key, value, {"n_heads": 1, "cond_or_uncond": [1], "attn_precision": None})
        scores = (query @ key.transpose(-1, -2) / 2).softmax(-1)
        return torch.allclose(out, F.scaled_dot_product_attention(query, key, value), atol=1e-5) and torch.allclose(
            scores_of_node.cell_contents, scores, atol=1e-5)
    finally:
        scores_of_node.cell_contents = before


def _outer_blocks(config):
    """ComfyUI's names of the blocks with attention in a U-Net's encoder and decoder, and of those in each."""
    found, depths = set(), config["transformer_layers_per_block"]
    for side, number, more, types, depths_of_side in (
            ("input", 1, 0, config["down_block_types"], depths),
            ("output", 0, 1, config["up_block_types"], config["reverse_transformer_layers_per_block"] or depths[::-1])):
        for type_, depth in zip(types, depths_of_side):
            for layer in range(config["layers_per_block"] + more):
                if type_.startswith("CrossAttn"):
                    name = f"{side}.{number + layer}"
                    count = depth if isinstance(depth, int) else depth[layer]  # SSD-1B
                    found |= {name, *(f"{name}.{index}" for index in range(count))}
            number += config["layers_per_block"] + 1           # of the encoder, a layer that halves the image
    return found


def _ignored_patches(family, kind):
    return UnsupportedError(f"Remove the node ({NODES}): ComfyUI's {family.name} does not support the patches that it "
                            f"adds to this workflow ({kind}) and would silently ignore them.")


def text_blocks(family, config):
    """Names of a U-Net's transformer blocks, "input.4.0", and of those that hold them."""
    found = family.plan.patched_blocks(config, "attn1")
    return found if family.has_frames_as_batch else found | _outer_blocks(config)


def _blocks(family, config, kind):
    """Names of the blocks that patches of a kind can replace."""
    is_of_unet = kind == "attn1" and family.plan.takes_unet_patches
    return text_blocks(family, config) if is_of_unet else family.plan.patched_blocks(config, kind)
