"""Which of torch's operators gives a log-sum-exp on which device, and that padded heads change nothing."""

import dataclasses

import pytest
import torch

from tests.support.tolerances import within
from xdit_backend.attention.backends import BACKENDS, attention_with_lse, run_backend, torch_backend
from xdit_backend.protocol.errors import UnsupportedError

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL, GEFORCE_50 = (7, 0), (7, 5), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)


@pytest.mark.parametrize("dtype, head_size, capability, has_cudnn, backend", [
    (FP64, 12, None, False, "torch_cpu"), (BF16, 64, None, False, "torch_cpu"),
    *((dtype, size, capability, True, "torch_flash")
      for dtype in (BF16, FP16) for size in (12, 64, 128, 256) for capability in (AMPERE, ADA, GEFORCE_50)),
    *((dtype, size, capability, True, "torch_cudnn")
      for dtype in (BF16, FP16) for size in (12, 64, 128) for capability in (HOPPER, BLACKWELL)),
    (BF16, 136, HOPPER, True, "torch_flash"), (BF16, 128, HOPPER, False, "torch_flash"),
    (BF16, 512, HOPPER, True, "torch_efficient"), (FP16, 260, ADA, True, "torch_efficient"),
    *((FP16, size, capability, True, "torch_efficient_fp16") for size in (12, 64, 512)
      for capability in (VOLTA, TURING)),
    *((BF16, size, capability, True, "torch_efficient_fp32") for size in (12, 64, 512)
      for capability in (VOLTA, TURING)),
    *((FP32, size, capability, True, "torch_efficient_fp32") for size in (10, 64)
      for capability in (VOLTA, ADA, HOPPER)),
], ids=str)
def test_the_kernel_is_one_that_the_device_has(dtype, head_size, capability, has_cudnn, backend):
    assert torch_backend(dtype, head_size, 100, capability, has_cudnn) == backend


@pytest.mark.parametrize("dtype, capability, backend", [
    (BF16, HOPPER, "torch_efficient"), (FP16, ADA, "torch_efficient"),
    (FP16, TURING, "torch_efficient_fp16"),
    (BF16, TURING, "torch_efficient_fp32"), (FP32, HOPPER, "torch_efficient_fp32"),
    (FP64, None, "torch_cpu")])
def test_masks_are_for_kernels_that_take_them(dtype, capability, backend):
    assert torch_backend(dtype, 64, 100, capability, True, masked=True) == backend


def test_cudnn_is_not_asked_for_a_single_key():
    assert torch_backend(BF16, 64, 1, HOPPER, True) == "torch_flash"


def test_double_precision_on_cuda_is_refused():
    with pytest.raises(UnsupportedError, match="^Use ulysses_degree instead .*float64"):
        torch_backend(FP64, 64, 100, ADA, True)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("multiple", [1, 8, 16])
def test_padded_heads_give_the_same_attention(multiple, scale, masked):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, num_tokens, 12, generator=generator, dtype=FP64) for num_tokens in (5, 9, 9))
    scores = q @ k.transpose(-1, -2) * (12 ** -0.5 if scale is None else scale)
    mask = torch.arange(9)[None, None, None] < torch.tensor([6, 9])[:, None, None, None] if masked else None
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)

    backend = dataclasses.replace(BACKENDS["torch_cpu"], head_sizes=range(multiple, 65, multiple))
    out, lse = run_backend(backend, None, q, k, v, mask, scale, True)

    assert out.shape == q.shape and lse.shape == (2, 3, 5, 1)
    within((out - scores.softmax(-1) @ v).abs().max(), 1e-12)
    within((lse - scores.logsumexp(-1, keepdim=True)).abs().max(), 1e-12)


def test_a_kernel_of_another_precision_gives_back_the_tensors_own():
    q, k, v = (torch.randn(1, 2, 5, 12, dtype=BF16) for _ in range(3))

    backend = dataclasses.replace(BACKENDS["torch_cpu"], head_sizes=range(4, 65, 4), computes_in=FP32)
    out, lse = run_backend(backend, None, q, k, v, None, None, True)

    assert out.dtype == BF16 and lse.dtype == FP32
    within((out - attention_with_lse(q.float(), k.float(), v.float())[0]).abs().max(), 2e-2)
