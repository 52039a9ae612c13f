"""The measures of `bench quality`."""

import pytest
import torch

from xdit_backend.bench.quality import frechet_distance


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
