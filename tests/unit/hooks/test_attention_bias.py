"""A bias between tokens as numbers of queries and keys equals the same as a mask."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.tolerances import relative_error
from xdit_backend.hooks.attention_dispatch import with_bias


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("size", [64, 128])
def test_attention_has_the_bias_that_a_mask_would_add(dtype, tolerance, size):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 11, size, generator=generator).to(dtype) for _ in range(3))
    a = torch.tensor([1.0] * 7 + [0.0] * 4)
    b = torch.tensor([0.0] * 7 + [-0.9, -100.0, 0.6, 0.0])
    mask = (a[:, None] * b + b[:, None] * a).to(dtype)
    widened = with_bias(query, key, value, torch.stack([a, b], 1)[None], size ** -0.5)

    result = F.scaled_dot_product_attention(*widened, scale=size ** -0.5)[..., :size]

    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), mask.double())
    assert relative_error(result.double(), exact) < tolerance
    plain = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    assert relative_error(plain, exact) > 5 * tolerance
    assert widened[0].shape[3] % 8 == 0
