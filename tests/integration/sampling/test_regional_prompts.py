"""Prompts for parts of a picture, by masks and by areas:
ComfyUI's own nodes on our MODEL give what they give on its own."""

import pytest
import torch

from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
# kind of model, degrees
LAYOUTS = [("sd3", {"cfg": 2}), ("sd3", {"pipefusion": 2, "num_patches": 4}),
           *(pytest.param(*case, marks=pytest.mark.slow) for case in (
               ("sd3", {"ulysses": 2}), ("sd3", {"tensor": 2}), ("flux", {"ring": 2}), ("sdxl", {"cfg": 2}),
               ("sdxl", {"data": 2}),
               ("sdxl", {"displaced": 2, "displaced_mode": "full_sync"})))]


def split_components(comfyui, kind, how):
    """A prompt for a part of the picture, and another one for the rest of it or for all."""
    nodes, first, other = comfyui.nodes, comfyui.conditioning(kind, 1), comfyui.conditioning(kind, 3, tokens=27)
    mask = torch.zeros(1, 64, 64)
    mask[:, :30, 9:] = 1
    mask[:, 30:40] = 0.5
    if how.startswith("mask"):
        where = "mask bounds" if how == "mask bounds" else "default"
        return (nodes.ConditioningSetMask().append(first, mask, where, 0.8)[0]
                + nodes.ConditioningSetMask().append(other, 1 - mask, "default", 1.0)[0])
    if how == "area":                                          # in pixels
        return nodes.ConditioningSetArea().append(first, 64, 72, 16, 8, 0.7)[0] + other
    return nodes.ConditioningSetAreaPercentage().append(first, 0.5, 1.0, 0.25, 0.0, 0.7)[0] + other


@pytest.mark.parametrize("kind, degrees", LAYOUTS, ids=str)
def test_masks_and_areas_equal_native(comfyui, kind, degrees):
    """PipeFusion with patches too: every step is whole where a prompt is for a part."""
    model = comfyui.ours(kind, comfyui.config("cpu,cpu", **degrees))
    for how in ("mask", "mask bounds", "area", "percentage"):
        arguments = {"positive": split_components(comfyui, kind, how), "steps": 2}

        result, reference = comfyui.sample(model, kind,
                                           **arguments), comfyui.sample(comfyui.native(kind), kind, **arguments)

        close(result, reference, TOLERANCE, how)
        whole = [[text, {key: value for key, value in options.items()
                         if key not in ("mask", "area", "strength", "set_area_to_bounds")}]
                 for text, options in arguments["positive"]]
        assert relative_error(reference,
                              comfyui.sample(comfyui.native(kind), kind, positive=whole, steps=2)) > 1e-3, how
