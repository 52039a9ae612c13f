"""ComfyUI's Scale ROPE: our MODEL has the places that the native MODEL has, of every family whose class reads them."""

import inspect
import itertools

import pytest
import torch

from tests.support.model_zoo import lacks_module, takes
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import VARIANTS, families
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
SCALES = {"scale_x": 1.5, "shift_x": 2.0, "scale_y": 0.7, "shift_y": -3.5, "scale_t": 1.3, "shift_t": 4.0}
KINDS = [kind for kind, family in families().items()
         if "rope_scales" in family.inputs.conditioning and kind not in VARIANTS]
LAYOUTS = {"ring2": {"ring": 2}, "pipefusion2": {"pipefusion": 2, "num_patches": 3, "warmup_steps": 9}}


def scaled(model, scales=SCALES):
    from comfy_extras.nodes_rope import ScaleROPE
    return ScaleROPE.execute(model, **scales).args[0]


DEFAULT = {("flux", "ring2"), ("z-image", "pipefusion2"), ("lumina-2", "ring2"), ("wan-camera", "pipefusion2")}


@pytest.mark.everyone
@pytest.mark.parametrize("kind, layout", [pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow)
                                          for case in itertools.product(KINDS, LAYOUTS)
                                          if takes(families()[case[0]], LAYOUTS[case[1]])])
def test_moved_places_equal_native_ksampler(comfyui, kind, layout):
    """Where few steps are drawn they are all of the warm-up."""
    want = comfyui.sample(scaled(comfyui.native(kind)), kind, steps=2)

    result = comfyui.sample(scaled(comfyui.ours(kind, comfyui.config("cpu,cpu", **LAYOUTS[layout]))), kind, steps=2)

    close(result, want, TOLERANCE)
    assert relative_error(want, comfyui.reference(kind, steps=2)) > 1e-3, "places that change nothing"


@pytest.mark.slow
def test_compiled_blocks_that_make_places_themselves_move_them(comfyui):
    want = comfyui.sample(scaled(comfyui.native("pixeldit")), "pixeldit", steps=2)
    config = comfyui.config("cpu", compile="blocks")

    close(comfyui.sample(scaled(comfyui.ours("pixeldit", config)), "pixeldit", steps=2), want, TOLERANCE)


@pytest.mark.parametrize("kind", by_default(["flux2"], ["flux", "flux2", "longcat-image"]))
def test_references_move_too(comfyui, kind):
    """Each from where it begins."""
    (text, options), = comfyui.conditioning(kind, 1)
    generator = torch.Generator().manual_seed(1)
    shape = comfyui.latent(kind, size=(8, 6))["samples"].shape
    positive = [[text, {**options, "reference_latents": [torch.randn(shape, generator=generator)]}]]
    want = comfyui.sample(scaled(comfyui.native(kind)), kind, steps=2, positive=positive)

    result = comfyui.sample(scaled(comfyui.ours(kind, comfyui.config("cpu,cpu", cfg=2))), kind, steps=2,
                            positive=positive)

    close(result, want, TOLERANCE)


def test_references_at_time_zero_do_not_move_along_the_axis_that_tells_them(comfyui):
    (text, options), = comfyui.conditioning("flux2", 1)
    references = {"reference_latents": [torch.ones_like(comfyui.latent("flux2", size=(8, 6))["samples"])],
                  "reference_latents_method": "index_timestep_zero"}
    given = {"steps": 1, "positive": [[text, {**options, **references}]]}
    model = comfyui.ours("flux2", comfyui.config("cpu"))

    with pytest.raises(comfyui.errors.ConfigError, match="^Set shift_t of Scale ROPE to 0"):
        comfyui.sample(scaled(model), "flux2", **given)
    want = comfyui.sample(scaled(comfyui.native("flux2"), SCALES | {"shift_t": 0.0}), "flux2", **given)
    close(comfyui.sample(scaled(model, SCALES | {"shift_t": 0.0}), "flux2", **given), want, TOLERANCE)


def test_every_class_of_comfyuis_that_reads_scales_has_them(comfyui):
    """By the words of their files."""
    silent = []
    for kind, family in families().items():
        if kind not in KINDS and kind not in VARIANTS and not lacks_module(family):
            module = type(comfyui.native(kind).model.diffusion_model)
            silent += [kind] if any("rope_options" in inspect.getsource(cls) for cls in module.__mro__[:-2]
                                    if cls.__module__.startswith("comfy")) else []
    assert not silent
