"""Where a step goes to, as ComfyUI's options say it."""

import pytest
import torch

from tests.support.model_zoo import example
from xdit_backend.models.common.inputs import sigma_after
from xdit_backend.protocol.errors import ConfigError

SCHEDULE = torch.tensor([1.0, 0.9, 0.6, 0.0])


@pytest.mark.parametrize("sigma, after", [(1.0, 0.9), (0.6, 0.0), (0.75, None), (0.0, None)], ids=str)
def test_a_step_goes_to_the_next_noise_level_of_its_schedule(sigma, after):
    """Between those, and at the last, none is known."""
    found = sigma_after(torch.tensor([500.0, 500.0]), {"sample_sigmas": SCHEDULE, "sigmas": torch.tensor([sigma])})

    assert found == {} if after is None else torch.equal(found["sigma_after"], torch.tensor([after, after]))


@pytest.mark.parametrize("options", [{}, {"sigmas": SCHEDULE[:1]}, {"sample_sigmas": SCHEDULE}], ids=str)
def test_outside_of_a_sampler_nothing_is_known(options):
    assert sigma_after(torch.tensor([500.0]), options) == {}


@pytest.mark.parametrize("name", ["HunyuanVideo 1.5 distilled", "HunyuanImage distilled", "AnyFlow"])
def test_models_heed_where_a_step_goes_to(name):
    one = example(name)
    with torch.inference_mode():
        before = one.run()
        one.conditioning["sigma_after"] = one.conditioning["sigma_after"] + 0.3
        after = one.run()
        one.conditioning.pop("sigma_after")
        alone = one.run()

    assert (before - after).abs().max() > 1e-6 and (before - alone).abs().max() > 1e-6


def test_wan_fun_control_refuses_frames_at_times_of_their_own():
    one = example("Wan Fun-Control")
    one.timestep = one.timestep[:, None].expand(-1, one.latent.shape[2])

    with pytest.raises(ConfigError, match="^Remove the noise mask"):
        one.run()


def test_cogvideox_i2v_refuses_more_tokens_than_its_table_has():
    one = example("CogVideoX-I2V", rows=60, columns=90, frames=14)

    with pytest.raises(ConfigError, match="has positions for 17550 tokens, and this latent has 18900"):
        one.run()
