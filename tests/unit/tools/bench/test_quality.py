"""The measures of `bench quality`."""

import argparse

import pytest
import torch

from tests.support.model_zoo import example, save_transformer
from tests.support.tolerances import within
from xdit_backend.host.calls import Call
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.tools.bench.quality import add_arguments, frechet_distance, naive, settings


def test_the_frechet_distance_of_normal_distributions_is_the_closed_form():
    """Of commuting covariances: |m - n|^2 + sum (sqrt a - sqrt b)^2."""
    mean_a, mean_b = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])
    covariance_a, covariance_b = torch.diag(torch.tensor([4.0, 9.0])), torch.diag(torch.tensor([1.0, 16.0]))

    distance = frechet_distance((mean_a, covariance_a), (mean_b, covariance_b))

    assert distance == pytest.approx(1 + 4 + 1 + 1)


def test_a_distribution_has_no_distance_to_itself():
    torch.manual_seed(0)
    features = torch.randn(50, 8)
    own = features.mean(0), features.T.cov()

    assert frechet_distance(own, own) == pytest.approx(0, abs=1e-4)


def test_naive_patches_are_runs_of_their_own():
    """What another patch begins with changes nothing in one;
    so they are not one device's picture, which a single patch is."""
    one = example("SD3", rows=8, columns=6)
    other = one.latent.clone()
    other[:, :, :4] += 1

    @torch.no_grad()
    def run(client, call, sigmas):
        x = call.latent
        for sigma, following in zip(sigmas, sigmas[1:]):
            x = x + (following - sigma) * one.family.prediction(one.model(**one.family.forward_arguments(
                x, torch.full((len(x),), 1000 * sigma, dtype=x.dtype), call.conditioning,
                one.config), return_dict=False)[0], x)
        return x

    def drawn(latent, num_patches):
        return naive(run, num_patches)(None, Call(latent, torch.zeros(1), one.conditioning), [1.0, 0.6, 0.2])

    whole = run(None, Call(one.latent, torch.zeros(1), one.conditioning), [1.0, 0.6, 0.2])
    apart = drawn(one.latent, 2)
    within((drawn(one.latent, 1) - whole).abs().max(), 1e-12)
    assert (torch.equal(apart[:, :, 4:], drawn(other, 2)[:, :, 4:])
            and not torch.equal(apart[:, :, :4], drawn(other, 2)[:, :, :4]))
    assert (apart - whole).abs().max() > 1e-3


def test_heads_that_two_devices_cannot_share_are_refused_before_anything_runs(tmp_path):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    path = save_transformer(example("Flux.1", more={"num_attention_heads": 3}).model, tmp_path)

    def settings_of(*exchange):
        return settings(parser.parse_args(["--model", str(path), "--displaced", "2", *exchange]))
    assert len(settings_of()) > 1
    with pytest.raises(ConfigError, match="^Leave out --exchange, or .* cannot split the 3 attention heads"):
        settings_of("--exchange", "keys and values in fp8")
