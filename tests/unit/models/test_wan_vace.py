"""Wan VACE, whose two states travel side by side, computes what diffusers' own model does."""

import diffusers
import torch

from tests.support.model_zoo import example


def test_the_prediction_is_that_of_diffusers_own_forward():
    one = example("Wan VACE", batch=2)
    plain = diffusers.WanVACETransformer3DModel(**one.config).eval().double()
    plain.load_state_dict(one.model.state_dict())
    given = one.conditioning

    with torch.no_grad():
        want = plain(one.latent, one.timestep, given["context"], control_hidden_states=given["vace_context"][:, 0],
                     control_hidden_states_scale=given["vace_strength.0"].expand(len(one.config["vace_layers"]))).sample
        result = one.run()

    assert (result - want).abs().max() < 1e-6                  # diffusers rounds sines of the time to float32
