"""Videos beside Wan's latent are of its size, or refused in words; of a piece of the latent too. So is a video for a
model of images."""

from types import SimpleNamespace

import pytest
import torch

from xdit_backend.models import FAMILIES
from xdit_backend.models.common.family import CallInputs
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.protocol.specs import Patch


@pytest.mark.parametrize("family, name, scale, title", [("Wan Camera", "camera_conditions", 8, "camera path"),
                                                        ("Wan Animate", "pose_latents", 1, "pose")])
@pytest.mark.parametrize("patch, rows", [(None, 6), (Patch(3, 2, 6), 4)], ids=["whole", "a patch"])
def test_a_video_beside_the_latent_is_of_its_size(family, name, scale, title, patch, rows):
    latent = torch.zeros(1, 16, 3, rows, 10)
    rule = next(iter(FAMILIES[family].inputs.arguments.values()))          # of the latent

    def call(sides):
        video = torch.zeros(1, 2, 3, *(scale * side for side in sides))
        return CallInputs(latent, torch.zeros(1), {name: video}, SimpleNamespace(), patch)
    rule(call((6, 10)))
    for sides in ((6, 12), (8, 10), (4, 10)):
        with pytest.raises(ConfigError, match=f"^Use one node that makes the {title} and the latent with the same w"):
            rule(call(sides))


@pytest.mark.parametrize("patch, frames", [(None, 3), (Patch(2, 1, 3), 1), (Patch(3, 2, 6), 3)],
                         ids=["whole", "a frame of it", "rows of it"])
def test_a_cameras_way_is_as_long_as_the_latent(patch, frames):
    latent = torch.zeros(1, 16, frames, 6 if patch is None or patch.dim == 2 else 4, 10)
    rule = next(iter(FAMILIES["Wan Camera"].inputs.arguments.values()))

    def call(frames):
        return CallInputs(latent, torch.zeros(1), {"camera_conditions": torch.zeros(1, 24, frames, 48, 80)},
                          SimpleNamespace(), patch)
    rule(call(3))
    for frames in (1, 2, 5):
        with pytest.raises(ConfigError, match="^Use one node that makes the camera path and the latent with the same "
                                              f"length: .* has {frames} latent frames, and this latent needs 3"):
            rule(call(frames))


@pytest.mark.parametrize("patch, frames", [(None, 2), (Patch(2, 0, 2), 1), (Patch(3, 2, 6), 2)],
                         ids=["whole", "a frame of it", "rows of it"])
def test_a_model_of_images_refuses_a_video_by_its_piece_too(patch, frames):
    """Stages get pieces alone where no step is whole, and a frame of a video looks like an image."""
    rule = next(iter(FAMILIES["Krea 2"].inputs.arguments.values()))

    def call(frames, patch):
        return CallInputs(torch.zeros(1, 16, frames, 4, 10), torch.zeros(1), {}, SimpleNamespace(), patch)
    rule(call(1, None))
    with pytest.raises(ConfigError, match="^Use an empty image latent, .* has 2 frames"):
        rule(call(frames, patch))
