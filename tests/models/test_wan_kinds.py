"""Videos beside Wan's latent are of its size, or refused in words; of a piece of the latent too."""

from types import SimpleNamespace

import pytest
import torch

from xdit_backend.models import FAMILIES
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.protocol.specs import Patch
from xdit_backend.vocabulary.family import CallInputs


@pytest.mark.parametrize("family, name, scale, title", [("Wan Camera", "camera_conditions", 8, "camera's way"),
                                                        ("Wan Animate", "pose_latents", 1, "pose")])
@pytest.mark.parametrize("patch, rows", [(None, 6), (Patch(3, 2, 6), 4)], ids=["whole", "a patch"])
def test_a_video_beside_the_latent_is_of_its_size(family, name, scale, title, patch, rows):
    latent = torch.zeros(1, 16, 3, rows, 10)
    rule = next(iter(FAMILIES[family].arguments.values()))          # of the latent

    def call(sides):
        video = torch.zeros(1, 2, 3, *(scale * side for side in sides))
        return CallInputs(latent, torch.zeros(1), {name: video}, SimpleNamespace(), patch)
    rule(call((6, 10)))
    for sides in ((6, 12), (8, 10), (4, 10)):
        with pytest.raises(ConfigError, match=f"^Make the {title} and the latent of one width and height"):
            rule(call(sides))
