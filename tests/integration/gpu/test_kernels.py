"""Which kernels run on this GPU, that they are right, and that nothing in a step or a norm makes the process wait for
the device."""

import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from tests.conftest import ROOT
from tests.support.model_zoo import CONFIGS, example
from tests.support.tolerances import within
from tests.unit.tools.dry_run.rows import ALLOWED_WAITS
from xdit_backend.attention.backends import BACKENDS, attention_with_lse, run_backend, torch_backend
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.group_norm import group_norm_rows
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.distributed.spatial_ops import RowSplit
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.host.torchrun import environment_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
# heads, head size, tokens: at 1024 px, and 81 frames of 480 x 832
PUBLISHED = {"Flux.1 dev": (24, 128, 4608), "SD3.5 large": (38, 64, 4429), "Wan 2.1 14B": (40, 128, 32760)}
CHOICES = {"torch_cudnn": SDPBackend.CUDNN_ATTENTION, "torch_flash": SDPBackend.FLASH_ATTENTION,
           "torch_efficient": SDPBackend.EFFICIENT_ATTENTION}


@contextmanager
def nothing_waits():
    """Whatever makes the process wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


def kernels(dtype, head_size):
    """Every kernel that this device has for a dtype and head size."""
    capability = torch.cuda.get_device_capability(CUDA)
    chosen = {torch_backend(dtype, head_size, 100, capability, has_cudnn) for has_cudnn in (True, False)}
    return sorted(chosen | {"torch_efficient"})


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-4)],
                         ids=str)
@pytest.mark.parametrize("head_size", [12, 64, 72, 128, 160, 264])
def test_every_kernel_gives_attention_and_its_log_sum_exp(dtype, tolerance, head_size):
    q, k, v = random(2, 4, 50, head_size, dtype=dtype), *random(2, 2, 4, 300, head_size, dtype=dtype, seed=1)
    scores = q.double() @ k.double().transpose(-1, -2) * head_size ** -0.5

    for backend in kernels(dtype, head_size):
        out, lse = run_backend(BACKENDS[backend], None, q, k, v, None, None, True)

        assert lse.shape == (2, 4, 50, 1) and out.dtype == dtype
        within((out.double() - scores.softmax(-1) @ v.double()).abs().max(), tolerance, backend)
        within((lse.double() - scores.logsumexp(-1, keepdim=True)).abs().max(), tolerance, backend)


@pytest.mark.parametrize("name", PUBLISHED)
def test_ring_takes_the_kernel_that_torchs_own_attention_takes(name):
    heads, head_size, num_tokens = PUBLISHED[name]
    q, k, v = random(3, 1, heads, num_tokens, head_size, dtype=torch.bfloat16)
    capability = torch.cuda.get_device_capability(CUDA)

    backend = torch_backend(q.dtype, head_size, num_tokens, capability, torch.backends.cudnn.is_available())

    assert SDPBackend(torch._fused_sdp_choice(q, k, v)) == CHOICES[backend]
    within((attention_with_lse(q, k, v)[0] - F.scaled_dot_product_attention(q, k, v)).abs().max(), 2e-2)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 8 * 2 ** -11), (torch.float32, 1e-5)], ids=str)
def test_norms_of_constant_and_of_far_channels(dtype, tolerance):
    """CUDA gives inverse deviations, which a channel that is the same everywhere has none of."""
    x = random(1, 32, 40, 24, dtype=dtype)
    x[:, 3], x[:, 8:12] = 5, 0
    x[:, 16:] += 100

    out = group_norm_rows(x, 8, None, None, 1e-6, RowSplit((0, 40), None, Traffic()))

    within((out.double() - F.group_norm(x.double(), 8, eps=1e-6)).abs().max(),
           max(tolerance, 1e-3 * (dtype == torch.float32)))


def test_a_norm_does_not_wait_for_the_device():
    x, split = random(2, 32, 40, 24, dtype=torch.bfloat16), RowSplit((0, 40), None, Traffic())
    group_norm_rows(x, 8, None, None, 1e-6, split)             # the first of a decode copies the ranks' shares

    with nothing_waits():
        group_norm_rows(x, 8, None, None, 1e-6, split)


@contextmanager
def waits():
    """The names, as ALLOWED_WAITS has them but for the operation, of functions in which the process waits for the
    device: a set that is filled meanwhile."""
    found = set()

    def note(message, category, filename, line, file=None, text=None):
        if "called a synchronizing CUDA operation" not in str(message):
            return
        frame = sys._getframe()
        while (frame.f_code.co_filename, frame.f_lineno) != (filename, line):
            frame = frame.f_back
        found.add(f"{Path(filename).name} {frame.f_code.co_name}")
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_forward_does_not_wait_for_the_device(name):
    one = example(name, torch.float32)
    hooks = Hooks(one.model.to(CUDA), one.family.plan)
    loaded = one.loaded(hooks)
    conditioning = {key: tensor.to(CUDA) for key, tensor in one.conditioning.items()}
    context = loaded.context(SINGLE, Traffic(), one.latent.to(CUDA), one.timestep, conditioning)
    with torch.inference_mode():
        hooks.run(context)                                     # tables that are made once

        with waits() as found:
            hooks.run(context)

    assert found <= {place.partition(" at ")[2] for place in ALLOWED_WAITS}


def test_workers_have_torchs_own_allocator_with_segments_that_grow(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    code = ("import torch; x = torch.ones(1000, device='cuda:0')\n"
            "print(torch.cuda.get_allocator_backend(), torch.cuda.memory_snapshot()[0]['is_expandable'])")

    said = subprocess.run([sys.executable, "-c", code], env=environment_of(("cuda:0",)), cwd=ROOT, capture_output=True,
                          text=True)

    assert said.stdout.split() == ["native", "True"], said.stderr


# What a receive that is posted ahead does: a kernel on a stream of its own, which holds a tensor and waits for another
# rank.
POSTED_RECEIVE = """
import torch
side, buffer = torch.cuda.Stream(), torch.empty(2 ** 22, device="cuda")
torch.empty(2 ** 22, device="cuda").fill_(1) + 1      # to load a kernel, when it is first asked for, CUDA waits
with torch.cuda.stream(side):
    torch.cuda._sleep(10 ** 10)
    posted = torch.cuda.Event()
    posted.record()
buffer.record_stream(side)
del buffer
done = torch.cuda.Event()
for _ in range(20):
    x = torch.empty(2 ** 22, device="cuda").fill_(1) + 1
    del x
done.record()
done.synchronize()
print(posted.query())
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("allocator, waits", [("backend:native", False), ("expandable_segments:True", False),
                                              ("backend:cudaMallocAsync", None)])
def test_allocations_do_not_wait_for_a_receive_that_is_posted_ahead(allocator, waits):
    """With cudaMallocAsync, which ComfyUI sets for itself, they may: that is reported only."""
    said = subprocess.run([sys.executable, "-c", POSTED_RECEIVE], capture_output=True, text=True,
                          env=environment_of(("cuda:0",)) | {"PYTORCH_CUDA_ALLOC_CONF": allocator})

    print(f"{allocator}: {'waits' if said.stdout.strip() == 'True' else 'does not wait'}")
    assert said.stdout.strip() in (("True", "False") if waits is None else (str(waits),)), said.stderr
