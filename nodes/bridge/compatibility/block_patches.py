"""Functions that ComfyUI's nodes put in the place of a block or of attention, or after a block, and whose meaning is
known: named operations, which the workers carry out.

A function is recognised by the file and name that it was defined under, and by what it returns for a test input; a
network by file and name alone. One that does otherwise, or of another node, is refused (model_options.py).
"""

import math
import os

import torch
import torch.nn.functional as F

from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.specs import Nag
from . import image_adapters, unet_patches
from .unet_patches import cell

HYPERNETWORK = "load_hypernetwork_patch.<locals>.hypernetwork_patch.__call__"
LLLITE_OF_ATTENTION = "lllite.py", "AnimaLLLiteAttentionPatch.__call__"
# what an LLLite's patches of these kinds are in the place of
LLLITE_TARGETS = {"attn1_patch": {"q": "self_attn_q_proj", "k": "self_attn_k_proj", "v": "self_attn_v_proj"},
                  "attn2_patch": {"q": "cross_attn_q_proj"}}
# kind of ComfyUI's patch -> {(file, function): what it is called in specs.Branch}
KNOWN = {
    "dit": {("nodes_slg.py", "SkipLayerGuidanceDiT.execute.<locals>.skip"): "skip",
            ("nodes_slg.py", "SkipLayerGuidanceDiTSimple.execute.<locals>.skip"): "skip"},
    "attn1": {("nodes_pag.py", "PerturbedAttentionGuidance.execute.<locals>.perturbed_attention"): "values",
              ("nodes_sag.py", "SelfAttentionGuidance.execute.<locals>.attn_and_record"): "scores"},
    "attn1_output_patch": {("nodes_nag.py", "NAGuidance.execute.<locals>.nag_attention_output_patch"): "nag",
                           ("nodes_hypertile.py", "HyperTile.execute.<locals>.hypertile_out"): "tiles",
                           ("nodes_tomesd.py", "TomePatchModel.execute.<locals>.tomesd_u"): "merges"},
    "output_block_patch": {("nodes_freelunch.py", f"{node}.execute.<locals>.output_block_patch"): "free_u"
                           for node in ("FreeU",
                                        "FreeU_V2")} | {(unet_patches.FILE, unet_patches.ENLARGING): "shrinks"},
    **{kind: {(unet_patches.FILE, unet_patches.SHRINKING): "shrinks"} for kind in unet_patches.WAYS_DOWN},
    "attn1_patch": {("nodes_hypernetwork.py", HYPERNETWORK): "network", LLLITE_OF_ATTENTION: "follows",
                    ("nodes_flux.py", "KV_Attn_Input.__call__"): "keeps",
                    ("model_multitalk.py", "MultiTalkGetAttnMapPatch.__call__"): "tells_apart",
                    ("nodes_hypertile.py", "HyperTile.execute.<locals>.hypertile_in"): "tiles",
                    ("nodes_tomesd.py", "TomePatchModel.execute.<locals>.tomesd_m"): "merges"},
    "attn2_patch": {("nodes_hypernetwork.py", HYPERNETWORK): "network", LLLITE_OF_ATTENTION: "follows",
                    ("model_multitalk.py", "MultiTalkCrossAttnPatch.__call__"): "hears"},
    "mlp_patch": {("lllite.py", "AnimaLLLiteMLPPatch.__call__"): "follows"},
    "post_input": {("lllite.py", "AnimaLLLitePatch.__call__"): "leads",
                   ("nodes_flux.py", "FluxKVCache.execute.<locals>.model_input_patch"): "leaves_out",
                   ("nodes_model_patch.py", "UsoStyleProjectorPatch.__call__"): "styles"},
    "double_block": {("nodes_model_patch.py", "DiffSynthCnetPatch.__call__"): "network",
                     ("nodes_model_patch.py", "ZImageControlPatch.__call__"): "adds",
                     ("nodes_model_patch.py", "WanUni3CCnetPatch.__call__"): "adds"},
    "noise_refiner": {("nodes_model_patch.py", "ZImageControlPatch.__call__"): "adds"}}
CACHE = "input_patch_obj"                  # the variable that Flux KV Cache's functions share
OUTPUT, WAY_UP = "attn1_output_patch", "output_block_patch"
NODES = ("such as Skip Layer Guidance, Perturbed-Attention Guidance, Self-Attention Guidance or Normalized Attention "
         "Guidance")


def operation_of(kind, function):
    """The name of the operation that a function of this kind stands for; None where it is not known."""
    if kind == image_adapters.KIND:
        return None if image_adapters.why_refused(function) else "adapters"
    name, marker = _named(kind, function), object()
    does = {"skip": lambda: function(marker, None) is marker,
            "values": lambda: function(None, None, marker, None) is marker,
            "scores": lambda: _tells_scores(function), "nag": lambda: _guides(function), "adds": lambda: True,
            **dict.fromkeys(("network", "hears", "tells_apart", "styles", "leads", "merges"), lambda: True),
            "follows": lambda: kind == "mlp_patch" or function.targets == LLLITE_TARGETS[kind],
            "free_u": lambda: unet_patches.frees(function), "shrinks": lambda: unet_patches.shrinks(kind, function),
            "keeps": lambda: _keeps(function),
            "leaves_out": lambda: _leaves_out(function), "tiles": lambda: kind == OUTPUT or _tiles(function)}
    return name if name and does[name]() else None


def _named(kind, function):
    """As operation_of, by its name alone: what it does is not tested."""
    called = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(called, "__code__", None)
    return code and KNOWN.get(kind, {}).get((os.path.basename(code.co_filename), called.__qualname__))


def operations_of(family, config, transformer_options):
    """{block, as ComfyUI calls it: operation} of a call, for the blocks that the model has: ComfyUI's models pass over
    the others too.

    Raises UnsupportedError where ComfyUI's model heeds no such patches at all.
    """
    found = {}
    for kind, replaced in transformer_options.get("patches_replace", {}).items():
        if kind == image_adapters.KIND and family.is_unet:           # sampling/image_adapters.py
            continue
        blocks = _blocks(family, config, kind)
        if replaced and not blocks:
            raise _ignored_patches(family, kind)
        for place, function in replaced.items():
            name = ".".join(map(str, place))
            if name in blocks:
                operation = operation_of(kind, function)
                if operation == "scores" and family.has_frames_as_batch:
                    raise UnsupportedError(f"Remove Self-Attention Guidance: {family.name} attends along frames too "
                                           "where the node reads how a picture's pixels attend to each other.")
                # of the negative prompt's
                if operation != "scores" or 1 in transformer_options.get("cond_or_uncond", ()):
                    found[name] = operation
            elif family.takes_unet_patches:
                raise UnsupportedError(f"Remove the node that replaces attention in {name}, or use Load Diffusion "
                                       f"Model: of {family.name} xDiT does so in the middle block only.")
    return found


def guided_of(family, transformer_options):
    """The specs.Nag of a call, one after the other; () for a call with one prompt, where ComfyUI's nodes do nothing.
    Raises UnsupportedError where ComfyUI's model ignores such patches."""
    functions, parts = _guiding(transformer_options), transformer_options.get("cond_or_uncond", ())
    if functions and not (family.takes_unet_patches or family.plan.takes_output_patches):
        raise _ignored_patches(family, OUTPUT)
    if not (0 in parts and 1 in parts):
        return ()
    return tuple(_nag_of(function, parts) for function in functions)


def adds_to(transformer_options):
    """{kind: networks} of a call that add something to the image after blocks, and read nothing of these."""
    return _of_operation("adds", transformer_options)


def styles_in(transformer_options):
    """The networks of a call that make tokens of a picture, which stand before the text's."""
    return _of_operation("styles", transformer_options).get("post_input", [])


def hearing(transformer_options):
    """(the networks of a call that find something in sound; where two speakers are in the first frame, as bool masks
    (2, its tokens), or None)"""
    apart = _of_operation("tells_apart", transformer_options).get("attn1_patch", [])
    return (_of_operation("hears", transformer_options).get("attn2_patch", []),
            next((each.ref_target_masks for each in reversed(apart) if each.ref_target_masks is not None), None))


def networks_in(transformer_options):
    """{kind: networks} of a call that workers run, since they read what a model's layers have."""
    return _of_operation("network", transformer_options)


def lllites_in(transformer_options):
    """The patches of ComfyUI's LLLite in a call, one after the other, that workers run as networks inside of blocks.
    Raises UnsupportedError for one of which a part is missing, as no node of ComfyUI's makes it."""
    found = _of_operation("leads", transformer_options).get("post_input", [])
    follows = _of_operation("follows", transformer_options)
    for kind in ("attn1_patch", "attn2_patch", "mlp_patch"):
        if found != [function.patch for function in follows.get(kind, [])]:
            raise UnsupportedError(f"Use Apply Anima LLLite as it is: a node has changed some of its patches ({kind}).")
    return found


def has_cached_references(transformer_options):
    """Has a MODEL something of Flux KV Cache?"""
    return bool(_of_operation("keeps", transformer_options) or _of_operation("leaves_out", transformer_options))


def keeps_references(family, transformer_options):
    """Does a call keep the keys and values of references, or attend to those that are kept, as Flux KV Cache has it?
    Raises UnsupportedError where ComfyUI's model does not heed that, and for two such nodes, after which it fails."""
    kept = _of_operation("keeps", transformer_options).get("attn1_patch", [])
    left_out = _of_operation("leaves_out", transformer_options).get("post_input", [])
    if not (kept or left_out):
        return False
    if family.takes_unet_patches or family.plan.cached_references is None:
        raise UnsupportedError(f"Remove Flux KV Cache: it is for Flux models, and this is {family.name}.")
    if len(kept) != 1 or kept != [cell(function, CACHE).cell_contents for function in left_out]:
        raise UnsupportedError("Use Flux KV Cache once, as it is: this MODEL has parts of several, or of none.")
    return True


def _of_operation(operation, transformer_options):
    found = {kind: [function for function in functions
                    if _named(kind, function) == operation == operation_of(kind, function)]
             for kind, functions in transformer_options.get("patches", {}).items()
             if operation in KNOWN.get(kind, {}).values()}
    return {kind: functions for kind, functions in found.items() if functions}


def free_u_of(family, transformer_options, control=None):
    """The specs.FreeU and Shrink of a call, one after the other. Raises UnsupportedError where ComfyUI's model ignores
    them; else as unet_patches.joins_of."""
    functions = transformer_options.get("patches", {}).get(WAY_UP, ())
    if functions and not family.takes_unet_patches:
        raise _ignored_patches(family, WAY_UP)
    return unet_patches.joins_of(family, transformer_options, control, functions)


def compares_branches(transformer_options):
    """Are the branches of a call compared in each layer, so that they must stay in one batch?"""
    return bool(_guiding(transformer_options))


def _guiding(transformer_options):
    return [function for function in transformer_options.get("patches", {}).get(OUTPUT, ())
            if _named(OUTPUT, function) not in ("tiles", "merges")]


def tiles_of(family, config, transformer_options, shape):
    """specs.Branch.tiles of a call: what HyperTile's own function says of each size of the image. shape: of the latent.

    Raises UnsupportedError where ComfyUI's model ignores it, where tiles are chosen by chance, and where something else
    is in the place of the attention, or its keys are no pixels of one image; and for ToMe.
    """
    if _of_operation("merges", transformer_options):
        raise UnsupportedError("Remove TomePatchModel, or use Load Diffusion Model: it draws lots in every layer for "
                               "the tokens that others are merged into, and each device would draw its own.")
    functions = _of_operation("tiles", transformer_options).get("attn1_patch", [])
    if not functions:
        return {}
    if not family.takes_unet_patches:
        raise _ignored_patches(family, "attn1_patch")
    if family.has_frames_as_batch or config["only_cross_attention"]:
        raise UnsupportedError(f"Remove HyperTile: some of what it cuts in {family.name} are no pixels of one picture.")
    if len(functions) > 1 or transformer_options.get("patches_replace", {}).get("attn1"):
        raise UnsupportedError("Remove HyperTile, or the other node that changes self-attention (another HyperTile, "
                               "Perturbed-Attention or Self-Attention Guidance): each takes what the other makes.")
    if cell(functions[0], "swap_size").cell_contents > 2:
        raise UnsupportedError("Set swap_size of HyperTile to 2 or less: above that it draws lots for the size of "
                               "tiles in every layer, and each device would draw its own.")
    found = {}
    for _, rows, columns in family.control_shapes(config, shape).values():
        cut, tile = _tile_of(functions[0], torch.empty(1, rows * columns, 1, device="meta"), shape)
        if tile is not None:
            found[str(rows * columns)] = tile
    return found


def _tile_of(function, tokens_BTC, shape):
    """(these tokens as HyperTile cuts them, rows and columns of tiles and of one; None where it does not)"""
    cut = function(tokens_BTC, None, None, {"original_shape": list(shape)})[0]
    held = cell(function, "temp")
    tile, held.cell_contents = held.cell_contents, None
    if tile is None:
        return cut, None
    rows, columns, height, width = tile
    return cut, (rows, columns, height // rows, width // columns)


def _tiles(function):
    """Does this function cut tokens as xdit_backend/hooks/unet_patches.py does? Tested with a picture of 2 x 2 tiles,
    where it cuts one."""
    side = 2 * cell(function, "latent_tile_size").cell_contents
    tokens = torch.arange(side * side).view(1, -1, 1)
    cut, tile = _tile_of(function, tokens, (1, 4, side, side))
    if tile is None:
        return torch.equal(cut, tokens)
    rows, columns, height, width = tile
    return torch.equal(cut, tokens.view(rows, height, columns, width).transpose(1, 2).reshape(rows * columns, -1, 1))


class Scores:
    """The attention scores of a call's negative prompt, which Self-Attention Guidance uses. buffer: filled by the
    workers, as specs.Branch.scores."""

    def __init__(self, family, config, transformer_options, shape, displaced_degree):
        """shape: of the call's latent."""
        functions = transformer_options.get("patches_replace", {}).get("attn1", {}).values()
        self._functions = [function for function in functions if operation_of("attn1", function) == "scores"]
        self._parts = transformer_options.get("cond_or_uncond", ())
        _, *sizes = family.control_shapes(config, shape)["middle.0"]
        self.buffer = torch.zeros(displaced_degree, shape[0], torch.Size(sizes).numel())

    def write(self, device):
        """Write the workers' scores to the node's own variable. The node expects (images x heads, queries, keys), of
        which it uses a mean over heads and a sum over queries; these are computed already."""
        size = self.buffer.shape[1] // len(self._parts)
        scores = self.buffer.sum(0)[size * self._parts.index(1):][:size, None].to(device)
        for function in self._functions:
            cell(function, "attn_scores").cell_contents = scores


def scores_of(family, config, transformer_options, shape, displaced_degree):
    """The Scores of a call; None where no node asks for them, or the call has no negative prompt."""
    wanted = "scores" in operations_of(family, config, transformer_options).values()
    return Scores(family, config, transformer_options, shape, displaced_degree) if wanted else None


def _nag_of(function, parts):
    scale, alpha, tau = (float(cell(function, name).cell_contents) for name in ("nag_scale", "nag_alpha", "nag_tau"))
    return Nag(scale, alpha, tau, parts.index(0), parts.index(1), len(parts))


def _guides(function):
    """Does this function do what xdit_backend/hooks/nag.py does? Tested with one number a token, 1 for the positive
    and -1 for the negative prompt."""
    out = torch.tensor([-1.0, 1.0]).view(2, 1, 1).expand(2, 3, 1).clone()
    nag = _nag_of(function, [1, 0])
    guided = 2 * nag.scale - 1
    final = math.copysign(min(abs(guided), nag.tau), guided) * nag.alpha + 1 - nag.alpha
    expected = torch.tensor([[-1, final, final], [1, final, final]])
    return torch.allclose(function(out, {"cond_or_uncond": [1, 0], "img_slice": [1, 3]})[..., 0], expected, atol=1e-4)


def _keeps(function):
    """Does this object do what xdit_backend/parallel/reference_kv_cache.py does? Tested with a new one of its class,
    with one token of an image and one of a reference."""
    fresh, place = type(function)(), {"block_type": "single", "block_index": 0}
    keys, values, later = torch.randn(3, 1, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    with_references = {**place, "reference_image_num_tokens": [1]}
    first, again = (fresh(keys, key, values, with_references) for key in (keys, later))
    return (not function.cache and not fresh(keys, keys, values, place) and torch.equal(first["k"], keys)
            and torch.equal(again["k"], torch.cat([later, keys[:, :, 1:]], 2))
            and torch.equal(again["v"], torch.cat([values, values[:, :, 1:]], 2)))


def _leaves_out(function):
    """Does this function leave out the image's last tokens, those of references, once something is kept of them?"""
    held, image = cell(function, CACHE).cell_contents.cache, torch.zeros(1, 5, 2)

    def tokens():
        options = {"reference_image_num_tokens": [1, 2]}
        return function({"img": image, "transformer_options": options})["img"].shape[1]
    before = tokens()
    held["tested"] = None
    try:
        return (before, tokens()) == (5, 2)
    finally:
        del held["tested"]


def _tells_scores(function):
    """Is this function attention that writes the scores to its variable?"""
    query, key, value = torch.randn(3, 1, 2, 4, generator=torch.Generator().manual_seed(0))
    scores_of_node = cell(function, "attn_scores")
    held = scores_of_node.cell_contents
    try:
        out = function(query, key, value, {"n_heads": 1, "cond_or_uncond": [1], "attn_precision": None})
        scores = (query @ key.transpose(-1, -2) / 2).softmax(-1)
        return torch.allclose(out, F.scaled_dot_product_attention(query, key, value), atol=1e-5) and torch.allclose(
            scores_of_node.cell_contents, scores, atol=1e-5)
    finally:
        scores_of_node.cell_contents = held


def _ignored_patches(family, kind):
    return UnsupportedError(f"Remove the node ({NODES}): ComfyUI's {family.name} does not heed what it replaces in "
                            f"this workflow ({kind}), which is for other models and would be dropped without notice.")


def _blocks(family, config, kind):
    """Names of the blocks in which patches of a kind replace something."""
    if family.takes_unet_patches:
        depths = config["transformer_layers_per_block"]
        return {"middle.0", *(f"middle.0.{number}" for number in range(depths[-1]))} if kind == "attn1" else set()
    return {f"{list_.patched}_block.{number}" for list_ in family.blocks if list_.patched and kind == "dit"
            for number in range(config[list_.count])}
