"""ComfyUI's context windows: it hands its model one piece of the frames after the other. Our MODEL draws of every video
family what the native MODEL draws."""

import pytest

from tests.programs.model_nodes import model_nodes, run_node
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import VARIANTS, families
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
VIDEO = [kind for kind, family in families().items() if kind not in VARIANTS and not family.plan.is_unet
         and len(family.inputs.latent.patch) == 3 and family.testing.frames > 1 and kind != "minimax-h3"]
# how far windows are from none, relatively: each frame of SeedVR2's short video attends to itself and to the text alone
LEAST = {"seedvr2": 5e-5}
LAYOUTS = {"cfg2": {"cfg": 2}, "ring2": {"ring": 2}, "pipefusion2": {"pipefusion": 2, "warmup_steps": 1},
           "displaced2": {"displaced": 2, "warmup_steps": 1}}


def windowed(comfyui, model, dim=2):
    return run_node(model_nodes(comfyui)["ContextWindowsManual"], {
        "model": model, "context_length": 2, "context_overlap": 1, "context_schedule": "standard_static",
        "context_stride": 1, "closed_loop": False, "fuse_method": "pyramid", "dim": dim, "causal_window_fix": dim == 2,
        "freenoise": False, "cond_retain_index_list": "", "split_conds_to_windows": False})[0]


@pytest.mark.parametrize("kind, layout", [
    ("wan", "ring2"), *(pytest.param(kind, "cfg2", marks=pytest.mark.slow) for kind in VIDEO),
    *(pytest.param("wan", layout, marks=pytest.mark.slow) for layout in ("pipefusion2", "displaced2"))])
def test_context_windows_equal_native_ksampler(comfyui, kind, layout):
    """With stages and displaced patches every step is whole, and the node says why."""
    reference = comfyui.sample(windowed(comfyui, comfyui.native(kind)), kind, steps=2)

    result = comfyui.sample(windowed(comfyui, comfyui.ours(kind, comfyui.config("cpu,cpu", **LAYOUTS[layout]))), kind,
                            steps=2)

    close(result, reference, TOLERANCE)
    apart = relative_error(reference, comfyui.reference(kind, steps=2))
    assert apart > LEAST.get(kind, 1e-3), "windows that change nothing"


@pytest.mark.parametrize("layout", by_default(["cfg2"], ["cfg2", "displaced2"]))
def test_windows_of_frames_that_are_a_batch_equal_native_ksampler(comfyui, layout):
    """Of Stable Video Diffusion, whose frames are dim 0. With displaced patches every step is whole."""
    given = {"steps": 2, "latent": comfyui.latent("svd", 5)}
    reference = comfyui.sample(windowed(comfyui, comfyui.native("svd"), dim=0), "svd", **given)

    result = comfyui.sample(windowed(comfyui, comfyui.ours("svd", comfyui.config("cpu,cpu", **LAYOUTS[layout])), dim=0),
                            "svd", **given)

    close(result, reference, TOLERANCE)
    assert relative_error(reference, comfyui.sample(comfyui.native("svd"), "svd", **given)) > 1e-3


def test_windows_of_rows_where_frames_are_a_batch_are_refused(comfyui):
    """ComfyUI's own ends in an error of torch's."""
    with pytest.raises(comfyui.errors.ConfigError, match="^Set dim to 0 in the context window node"):
        comfyui.sample(windowed(comfyui, comfyui.ours("svd", comfyui.config("cpu,cpu"))), "svd", steps=2,
                       latent=comfyui.latent("svd"))


def test_a_model_of_which_comfyui_cuts_no_windows_ends_in_its_own_words(comfyui):
    """Of MiniMax H3 it would have to say which of the sound belongs to a window."""
    for model in (comfyui.native("minimax-h3"), comfyui.ours("minimax-h3", comfyui.config())):
        with pytest.raises(NotImplementedError, match="must implement map_context_window_to_modalities"):
            comfyui.sample(windowed(comfyui, model), "minimax-h3", steps=2)
