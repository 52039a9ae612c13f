"""Entmax gives the weights that its definition says: a projection of the logits with a Tsallis entropy."""

import pytest
import torch

from tests.support.tolerances import close
from xdit_backend.attention.entmax import entmax_weights, sparse_attention
from xdit_backend.protocol.specs import Entmax

LOGITS = 2 * torch.randn(3, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def objective(weights, logits, alpha):
    """Maximised by entmax (Peters, Niculae and Martins 2019, equation 7)."""
    return (weights * logits).sum(-1) + (weights - weights ** alpha).sum(-1) / (alpha * (alpha - 1))


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_entmax_is_the_best_distribution(alpha, shift):
    weights = entmax_weights(LOGITS + shift, alpha)

    close(weights.sum(-1), torch.ones(3, 5, dtype=torch.float64), 1e-10)
    assert weights.min() == 0 and (weights == 0).any(-1).all()
    best = objective(weights, LOGITS, alpha)
    for seed in range(20):
        other = torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for step in (1e-3, 0.1, 1.0):
            near = (1 - step) * weights + step * other / other.sum(-1, keepdim=True)
            assert (objective(near, LOGITS, alpha) < best).all()


def test_the_two_kinds_differ_and_equal_logits_share_the_weight():
    assert not torch.allclose(entmax_weights(LOGITS, 1.5), entmax_weights(LOGITS, 2.0))
    for alpha in (1.5, 2.0):
        close(entmax_weights(torch.zeros(1, 4, dtype=torch.float64), alpha), torch.full((1, 4), 0.25).double(), 1e-10)


def test_attention_extrapolates_between_dense_and_sparse_weights():
    query, key, value = torch.randn(3, 2, 3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value)

    found = {scale: sparse_attention(query, key, value, Entmax(scale, 1.5)) for scale in (0.0, 1.0, 2.5)}

    close(found[0.0], dense, 1e-10)
    close(found[1.0], entmax_weights(query @ key.transpose(2, 3) / 2, 1.5) @ value, 1e-10)
    close(found[2.5], 2.5 * found[1.0] - 1.5 * dense, 1e-10)
