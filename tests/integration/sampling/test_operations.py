"""What nodes replace inside a model and xDiT knows the meaning of: our MODEL draws what the native MODEL draws;
the rest is refused."""

import types

import pytest
import torch

from tests.integration.sampling.test_pipefusion import staged
from tests.programs.model_nodes import Matrix, model_nodes, run_node
from tests.support.tiny_checkpoints import VARIANTS, families
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
EVERY_STEP = {"start_percent": 0.0, "end_percent": 1.0}
SKIP = {"double_layers": "1, 7", "single_layers": "0", "scale": 2.0, "rescaling_scale": 0.3, **EVERY_STEP}
GUIDED = {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}
SKIPPED = [kind for kind, family in families().items()
           if kind not in VARIANTS and not family.plan.is_unet and any(list_.patched for list_ in family.blocks)]


def compare(comfyui, kind, config, node, arguments, **sampled):
    node = model_nodes(comfyui)[node]
    changed = [run_node(node, {"model": model, **arguments})[0]
               for model in (comfyui.ours(kind, config), comfyui.native(kind))]

    result, reference = (comfyui.sample(model, kind, steps=2, **sampled) for model in changed)

    close(result, reference, TOLERANCE)
    assert relative_error(reference,
                          comfyui.sample(comfyui.native(kind), kind, steps=2,
                                         **sampled)) > 1e-3, "a node that changes nothing"


@pytest.mark.parametrize("kind", [kind if kind == "sd3" else pytest.param(kind, marks=pytest.mark.slow)
                                  for kind in SKIPPED])
def test_skipped_layers_equal_native_ksampler(comfyui, kind):
    """One more layer than a model has is passed over, as ComfyUI does it."""
    compare(comfyui, kind, comfyui.config("cpu,cpu", ring=2), "SkipLayerGuidanceDiT", SKIP)


@pytest.mark.parametrize("node, kind, devices, degrees", [
    ("PerturbedAttentionGuidance", "sd15", "cpu", {}), ("SkipLayerGuidanceDiTSimple", "sd3", "cpu,cpu", {"cfg": 2}),
    ("SelfAttentionGuidance", "sd15", "cpu,cpu", {"cfg": 2}), ("NAGuidance", "sd15", "cpu,cpu", {"data": 2}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("SkipLayerGuidanceSD3", "sd3", "cpu,cpu", {"data": 2}),
        ("PerturbedAttentionGuidance", "sdxl", "cpu,cpu", {"cfg": 2}),
        ("PerturbedAttentionGuidance", "sdxl", "cpu,cpu", {"displaced": 2, "warmup_steps": 9}),
        ("SelfAttentionGuidance", "sdxl", "cpu", {}), ("SelfAttentionGuidance", "sd2", "cpu,cpu", {"data": 2}),
        ("SelfAttentionGuidance", "sdxl", "cpu,cpu", {"displaced": 2, "warmup_steps": 9}),
        ("NAGuidance", "flux", "cpu,cpu", {"cfg": 2}), ("NAGuidance", "chroma", "cpu,cpu", {"ring": 2}),
        ("NAGuidance", "flux", "cpu,cpu", {"tensor": 2}),
        ("NAGuidance", "flux2", "cpu,cpu", {"pipefusion": 2, "warmup_steps": 1}),
        ("NAGuidance", "flux", "cpu,cpu", {"displaced": 2, "warmup_steps": 1}),
        ("NAGuidance", "sdxl", "cpu,cpu", {"displaced": 2, "warmup_steps": 1}),
        ("SkipLayerGuidanceDiT", "sd3", "cpu,cpu", {"pipefusion": 2, "warmup_steps": 9}),
        ("SkipLayerGuidanceDiT", "sd3", "cpu,cpu", {"displaced": 2, "warmup_steps": 9})))], ids=str)
def test_layouts_equal_native_ksampler(comfyui, node, kind, devices, degrees):
    arguments = {"PerturbedAttentionGuidance": {"scale": 3.0}, "SkipLayerGuidanceDiT": SKIP,
                 "NAGuidance": GUIDED, "SelfAttentionGuidance": {"scale": 0.5, "blur_sigma": 2.0},
                 "SkipLayerGuidanceSD3": {"layers": "0, 2", "scale": 2.0, **EVERY_STEP},
                 "SkipLayerGuidanceDiTSimple": {"double_layers": "1", "single_layers": "", **EVERY_STEP}}[node]

    compare(comfyui, kind, comfyui.config(devices, **degrees), node, arguments)


def test_calls_with_skipped_layers_leave_the_patches_of_others_alone(comfyui):
    """With stale keys and values: at scale 0 the calls are made, and nothing is added of them."""
    slg = model_nodes(comfyui)["SkipLayerGuidanceDiT"]
    post = []

    def silent(model):
        changed = run_node(slg, {"model": model, **SKIP})[0]
        called, = changed.model_options.pop("sampler_post_cfg_function")
        changed.set_model_sampler_post_cfg_function(lambda args: (post.append(called(args)), args["denoised"])[1])
        return changed
    plain = comfyui.sample(staged(comfyui, "sd3"), "sd3")

    close(comfyui.sample(silent(staged(comfyui, "sd3")), "sd3"), plain, TOLERANCE)
    assert len(post) == 3


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [
    {"ulysses": 2}, {"tensor": 2}, {"displaced": 2, "warmup_steps": 9},
    {"pipefusion": 2, "num_patches": 3, "warmup_steps": 9}], ids=str)
def test_a_style_of_a_image_equals_native_ksampler(comfyui, vae_of, degrees):
    """Of USO: tokens before the text's, of a network that ComfyUI runs."""
    outcome = Matrix(comfyui, comfyui.config("cpu,cpu", **degrees), vae_of).outcome("USOStyleReference")

    assert outcome.text == "equal"


def test_a_style_that_comfyuis_model_does_not_take_is_refused(comfyui):
    """Tokens of one image, where two are asked for; and a model that is no Flux.1."""
    class UsoStyleProjectorPatch:
        model_patch = encoded_image = None
    written = {}
    exec(compile("def __call__(self, kwargs): return kwargs", "nodes_model_patch.py", "exec"), written)
    UsoStyleProjectorPatch.__call__ = written["__call__"]
    UsoStyleProjectorPatch.__call__.__qualname__ = "UsoStyleProjectorPatch.__call__"
    patch = UsoStyleProjectorPatch()
    patch.model_patch = types.SimpleNamespace(model=lambda image: torch.zeros(1, 3, 256))
    patch.encoded_image = torch.zeros(1)
    for kind, error, message in (("flux", comfyui.errors.ConfigError, "^Use batch_size 1, cfg 1 .* called for 2 "),
                                 ("flux2", comfyui.errors.UnsupportedError, "^Remove USO Style Reference")):
        model = comfyui.ours(kind, comfyui.config("cpu")).clone()
        model.set_model_post_input_patch(patch)
        with pytest.raises(error, match=message):
            comfyui.sample(model, kind, steps=1)


def skip_of(comfyui):
    """The function with which ComfyUI's node passes a block by."""
    node = model_nodes(comfyui)["SkipLayerGuidanceDiT"]
    called, = run_node(node, {"model": comfyui.native("sd3"), **SKIP})[0].model_options["sampler_post_cfg_function"]
    return next(cell.cell_contents for cell in called.__closure__
                if getattr(cell.cell_contents, "__name__", "") == "skip")


def test_a_block_that_is_passed_by_in_both_branches_equals_native_ksampler(comfyui):
    """In one call of two branches, which go to the workers apart."""
    models = comfyui.ours("sd3", comfyui.config("cpu,cpu", cfg=2)), comfyui.native("sd3").clone()
    for model in models:
        model.set_model_patch_replace(skip_of(comfyui), "dit", "double_block", 1)
    result, reference = (comfyui.sample(model, "sd3") for model in models)

    close(result, reference, TOLERANCE)
    assert relative_error(reference, comfyui.reference("sd3")) > 1e-3


def test_functions_that_are_not_known_are_refused_by_name(comfyui):
    """Of another node; of a known name, and doing otherwise;
    for a place or a kind of model that ComfyUI's own would not heed."""
    pag, skip, written = model_nodes(comfyui)["PerturbedAttentionGuidance"], skip_of(comfyui), {}
    exec(compile("def skip(args, extra_args): return {}", skip.__code__.co_filename, "exec"), written)
    other = written["skip"]
    other.__qualname__ = skip.__qualname__
    for kind, key, function, message in (("sd3", "double_block", lambda args, extra: args,
                                          "model patches that replace parts of the model"),
                                         ("sd3", "double_block", other,
                                          "model patches that replace parts of the model"),
                                         ("sd15", "double_block", skip, "SD 1.5 does not support the patches")):
        model = comfyui.ours(kind, comfyui.config())
        model.set_model_patch_replace(function, "dit", key, 1)
        with pytest.raises(comfyui.errors.UnsupportedError, match=message):
            comfyui.sample(model, kind, steps=1)
    for node, arguments, kind in ((pag, {"scale": 3.0}, "attn1"),
                                  (model_nodes(comfyui)["NAGuidance"], GUIDED, "attn1_output_patch")):
        with pytest.raises(comfyui.errors.UnsupportedError,
                           match=f"^Remove the node .* SD3 does not support the patches .* this workflow .{kind}."):
            comfyui.sample(run_node(node, {"model": comfyui.ours("sd3", comfyui.config()), **arguments})[0], "sd3",
                           steps=1)


def freed(comfyui, model):
    """With both of ComfyUI's nodes, one after the other."""
    nodes = model_nodes(comfyui)
    first = run_node(nodes["FreeU_V2"], {"model": model, "b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2})[0]
    return run_node(nodes["FreeU"], {"model": first, "b1": 1.1, "b2": 0.8, "s1": 0.7, "s2": 1.2})[0]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{}, {"cfg": 2}, {"data": 2}, {"cfg": 2, "compile": "blocks"}], ids=str)
def test_free_u_equals_native_ksampler(comfyui, degrees):
    """At odd sides. With compiled blocks they run as they are."""
    devices = "cpu,cpu" if degrees else "cpu"
    latent = comfyui.latent("sd15-blocks", batch=2 if "data" in degrees else 1, size=(18, 15))
    models = comfyui.ours("sd15-blocks", comfyui.config(devices, **degrees)), comfyui.native("sd15-blocks")

    result, reference = (comfyui.sample(freed(comfyui, model), "sd15-blocks", steps=2, latent=latent)
                         for model in models)

    close(result, reference, TOLERANCE)
    assert relative_error(reference, comfyui.sample(models[1], "sd15-blocks", steps=2, latent=latent)) > 1e-3


def tiled(comfyui, model, **settings):
    from tests.programs.model_nodes import model_nodes, run_node
    return run_node(model_nodes(comfyui)["HyperTile"], {
        "model": model, "tile_size": 32, "swap_size": 2, "max_depth": 1, "scale_depth": True, **settings})[0]


@pytest.mark.parametrize("degrees", [{"cfg": 2}, *(pytest.param(degrees, marks=pytest.mark.slow) for degrees in (
    {}, {"data": 2}, {"cfg": 2, "compile": "blocks"}))], ids=str)
def test_hyper_tile_equals_native_ksampler(comfyui, degrees):
    """Tiles that are no squares, of two sizes of the image; with guidance that PAG's kin do not make."""
    devices, kind = "cpu,cpu" if degrees else "cpu", "sd15-blocks"
    latent = comfyui.latent(kind, batch=2 if "data" in degrees else 1, size=(24, 16))
    models = comfyui.ours(kind, comfyui.config(devices, **degrees)), comfyui.native(kind)

    result, reference = (comfyui.sample(tiled(comfyui, model), kind, steps=2, latent=latent) for model in models)

    close(result, reference, TOLERANCE)
    assert relative_error(reference, comfyui.sample(models[1], kind, steps=2, latent=latent)) > 1e-3


def test_hyper_tile_is_refused_by_name_where_it_cannot_be(comfyui):
    for kind, degrees, settings, message in (
            ("sd15", {"displaced": 2}, {}, "^Set displaced_degree to 1 .* or remove HyperTile"),
            ("sd15", {}, {"swap_size": 3}, "^Set swap_size of HyperTile to 2 or less"),
            ("sd-x4-upscaler", {}, {}, "^Remove HyperTile: some tokens that it cuts into tiles in SD x4 upscaler"),
            ("svd", {}, {}, "^Remove HyperTile: some tokens that it cuts into tiles in Stable Video"),
            ("pixart", {}, {}, "does not support the patches .*attn1_patch")):
        config = comfyui.config("cpu,cpu" if degrees else "cpu", **degrees)
        model = tiled(comfyui, comfyui.ours(kind, config), **settings)

        with pytest.raises(comfyui.errors.UnsupportedError, match=message):
            comfyui.sample(model, kind, steps=1, latent=comfyui.latent(kind, size=(16, 16)))


def test_free_u_is_refused_by_name_where_it_cannot_be(comfyui):
    for kind, degrees, message in (("sd15", {"displaced": 2}, "^Set displaced_degree to 1 .* or remove FreeU"),
                                   ("sd15", {}, None), ("pixart", {}, "does not support the patches .*output_block")):
        devices = "cpu,cpu" if degrees else "cpu"
        model = comfyui.ours(kind, comfyui.config(devices, **degrees))
        if kind == "pixart":                                   # the node itself asks for a U-Net's channels
            model.set_model_output_block_patch(freed(comfyui, comfyui.native("sd15")).model_options[
                "transformer_options"]["patches"]["output_block_patch"][0])
        else:
            model = freed(comfyui, model)
        if message is None:
            assert comfyui.sample(model, kind, steps=1).isfinite().all()
            continue
        with pytest.raises(comfyui.errors.UnsupportedError, match=message):
            comfyui.sample(model, kind, steps=1)


def shrunk(comfyui, model, **settings):
    return run_node(model_nodes(comfyui)["PatchModelAddDownscale"], {
        "model": model, "block_number": 2, "downscale_factor": 1.7, "downscale_after_skip": True, **EVERY_STEP,
        "downscale_method": "bicubic", "upscale_method": "bilinear", **settings})[0]


@pytest.mark.parametrize("kind, degrees", [("sdxl", {"cfg": 2}), *(
    pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sd15-blocks", {}), ("sdxl-blocks", {"data": 2}), ("koala-700m", {"cfg": 2})))], ids=str)
def test_deep_shrink_equals_native_ksampler(comfyui, kind, degrees):
    """After and before a skip, twice, with FreeU between them, at sides that no level halves; and for some steps."""
    devices = "cpu,cpu" if degrees else "cpu"
    models = comfyui.ours(kind, comfyui.config(devices, **degrees)), comfyui.native(kind)
    changes = (lambda model: shrunk(comfyui, model),
               lambda model: shrunk(comfyui, model, downscale_after_skip=False),
               lambda model: shrunk(comfyui, freed(comfyui, shrunk(comfyui, model, block_number=1)), block_number=4,
                                    upscale_method="area", downscale_method="nearest-exact", downscale_factor=0.8),
               lambda model: shrunk(comfyui, model, end_percent=0.4, upscale_method="bicubic"))
    for number, change in enumerate(changes):
        if number == 2 and kind != "sd15-blocks":
            continue                                           # FreeU is for the published widths
        latent = comfyui.latent(kind, 2 if "data" in degrees else 1, (24, 16) if number < 2 else (23, 18))
        plain = comfyui.sample(models[1], kind, steps=2, latent=latent)
        result, reference = (comfyui.sample(change(model), kind, steps=2, latent=latent) for model in models)

        close(result, reference, TOLERANCE, number)
        assert relative_error(reference, plain) > 1e-3, number


def test_deep_shrink_is_refused_by_name_where_it_cannot_be(comfyui):
    nodes = model_nodes(comfyui)
    for kind, degrees, settings, node, message in (
            ("sdxl", {"displaced": 2}, {}, None, "^Set displaced_degree to 1 .* or remove PatchModelAddDownscale"),
            ("sdxl", {}, {"upscale_method": "bislerp"}, None, "^Choose another method than bislerp"),
            ("sdxl", {}, {"downscale_method": "bislerp"}, None, "^Choose another method than bislerp"),
            ("svd", {}, {}, None, "^Remove PatchModelAddDownscale: it is for images"),
            ("sdxl", {}, {}, "SelfAttentionGuidance", "^Remove PatchModelAddDownscale or Self-Attention Guidance"),
            ("sdxl", {}, {}, "HyperTile", "^Remove PatchModelAddDownscale or HyperTile"),
            ("sd3", {}, {}, None, "does not support the patches .*output_block")):
        model = comfyui.ours(kind, comfyui.config("cpu,cpu" if degrees else "cpu", **degrees))
        changed = shrunk(comfyui, model if node is None else tiled(comfyui, model) if node == "HyperTile" else run_node(
            nodes[node], {"model": model, "scale": 0.5, "blur_sigma": 2.0})[0], **settings)

        with pytest.raises(comfyui.errors.UnsupportedError, match=message):
            comfyui.sample(changed, kind, steps=1)
    parted = shrunk(comfyui, comfyui.ours("sdxl", comfyui.config()))
    parted.model_options["transformer_options"]["patches"]["output_block_patch"] *= 2
    with pytest.raises(comfyui.errors.UnsupportedError, match="^Use PatchModelAddDownscale without changing"):
        comfyui.sample(parted, "sdxl", steps=1)
