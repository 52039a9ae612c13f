"""SeedVR2's models of 7 billion weights, which ComfyUI's class tells by their width: tiny ones of their shapes equal
the class itself, alone and under each method."""

import pytest
import torch

from tests.support.compare_single_device import Saved, errors_of_saved, examples, execute, layouts_of, save, words
from tests.support.model_zoo import example
from tests.support.tolerances import within
from xdit_backend.comfyui.native_models import class_at
from xdit_backend.models import FAMILIES

NAME = "SeedVR2"
OF_7B = {"rope_type": "rope3d", "vid_out_norm": None}
# every block has weights of its own for text, or later ones share the video's
KINDS = {"apart": OF_7B | {"mlp_type": "normal", "mm_layers": 4}, "shared": OF_7B | {"mm_layers": 2}}
# their queries and keys turn in float32
TOLERANCE = 1e-6
LAYOUTS = [layout for count in (1, 2) for layout in layouts_of(NAME, count)]


def take_width(set_attribute=setattr):
    """Have ComfyUI's class take the tiny model's width for that of 7 billion weights."""
    class_at(FAMILIES[NAME].transformer)
    import comfy.ldm.seedvr.model as module
    set_attribute(module, "SEEDVR2_7B_VID_DIM", FAMILIES[NAME].testing.config["vid_dim"])


def execute_7b(rank, world_size, runs):
    take_width()
    execute(rank, world_size, runs)


@pytest.fixture(autouse=True)
def of_7b(monkeypatch):
    take_width(monkeypatch.setattr)


@pytest.mark.parametrize("kind", KINDS)
def test_the_prediction_is_that_of_comfyuis_class(kind):
    import comfy.ops
    one = example(NAME, more=KINDS[kind], batch=2, frames=3)
    native = class_at(one.family.transformer)(**one.config, dtype=torch.float64, device="cpu",
                                              operations=comfy.ops.disable_weight_init)
    native.load_state_dict(one.model.state_dict())

    want = native(one.latent, one.timestep, transformer_options={"cond_or_uncond": [0]}, **one.conditioning)

    assert all(block.version for block in native.blocks) and want.std() > 0.1
    within((one.run() - want).abs().max().item(), 1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_equals_one_device(kind, tmp_path):
    """Under each of two and of four devices, from a file."""
    branches = examples(NAME, (7, 9, 7), KINDS[kind])
    saved = Saved(NAME, branches, save(branches[0], tmp_path))
    for count in (2, 4):
        requested = [(NAME, layout) for layout in LAYOUTS if words(layout).count(" x ") == count // 2 - 1]
        outcomes = errors_of_saved(requested, lambda name: saved, count, execute=execute_7b)

        assert [outcome for outcome in outcomes.values() if isinstance(outcome, Exception)] == []
        within(max(outcomes.values()), TOLERANCE)
    assert KINDS[kind].items() <= branches[0].config.items()   # as the file says it
