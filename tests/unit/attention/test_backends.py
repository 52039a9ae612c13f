"""Which kernel attends: packages of others, as stand-ins of their signatures, beside torch's own attention."""

import sys
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from tests.support import kernel_packages
from tests.support.model_zoo import example
from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from xdit_backend.attention import backends
from xdit_backend.attention.backends import BACKENDS, BackendUse, attend, attend_with_lse, repeat_heads
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE, build_mesh
from xdit_backend.hooks.install import install_hooks
from xdit_backend.host.calls import refuse_unusable
from xdit_backend.parallel import sequence_parallel
from xdit_backend.parallel.sequence_parallel import Attention, usp_attention
from xdit_backend.parallel.stale_kv_cache import KeyValues
from xdit_backend.protocol.errors import UnsupportedError
from xdit_backend.protocol.specs import BackendChoice, ForwardOptions, Layout

FP64, BF16 = torch.float64, torch.bfloat16
NAMES = sorted(name for name, backend in BACKENDS.items() if backend.module)
WITHOUT_LSE = ["comfy_kitchen_int8"]
MASKED = ["xformers", "comfy_kitchen_int8"]


@contextmanager
def packages(folder, exact=True, **others):
    """Under this, the stand-ins are this process's packages."""
    path, capability_of, known = list(sys.path), backends.capability_of, dict(BACKENDS)
    kernel_packages.use(kernel_packages.write(folder, **others), exact)
    try:
        yield
    finally:
        sys.path[:] = path
        kernel_packages.forget()
        backends.capability_of = capability_of
        BACKENDS.update(known)


@pytest.fixture
def installed(tmp_path):
    with packages(tmp_path):
        yield


def tensors(batch, heads, key_heads, tokens, keys, size, dtype=FP64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, tokens_, heads_, size, generator=draw, dtype=FP64).to(dtype).transpose(1, 2)
            for heads_, tokens_ in ((heads, tokens), (key_heads, keys), (key_heads, keys))]


def reference(q, k, v, scale=None, mask=None):
    return F.scaled_dot_product_attention(q, *repeat_heads(q, k, v), attn_mask=mask, scale=scale)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads, key_heads, tokens, keys, size, scale", [
    (2, 2, 33, 33, 64, None), (4, 2, 7, 40, 40, 0.3), (3, 1, 21, 5, 128, None), (2, 2, 1, 9, 96, 0.02)])
def test_each_kernel_attends_as_torch_does(installed, name, heads, key_heads, tokens, keys, size, scale):
    q, k, v = tensors(2, heads, key_heads, tokens, keys, size)
    use = BackendUse(name, True)
    out, wanted = attend(q, k, v, use, scale=scale), reference(q, k, v, scale)
    within((out - wanted).abs().max(), 1e-10)
    assert out.shape == wanted.shape and use.counts == {name: 1}
    if name in WITHOUT_LSE:
        with pytest.raises(UnsupportedError, match=f"^Set attention to sdpa .* selects {name}: .* gives no "
                                                   "log-sum-exp, which ring_degree needs; with ulysses_degree instead"):
            attend_with_lse(q, k, v, use, scale=scale)
        return
    (merged, lse), (_, wanted_lse) = (attend_with_lse(q, k, v, of, scale=scale) for of in (use, BackendUse()))
    within((merged - wanted).abs().max(), 1e-10)
    within((lse - wanted_lse).abs().max(), 1e-10)
    assert lse.shape == wanted_lse.shape and use.counts == {name: 2}


@pytest.mark.parametrize("name", NAMES)
def test_masks_are_torchs_own_or_the_packages(installed, name):
    q, k, v = tensors(2, 2, 2, 9, 13, 64)
    mask = torch.rand(2, 1, 1, 13, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[:, :, :, 0] = True
    use = BackendUse(name, True)

    for given in (mask, torch.zeros_like(mask, dtype=FP64).masked_fill_(~mask, -1e4)):
        within((attend(q, k, v, use, given) - reference(q, k, v, mask=mask)).abs().max(), 1e-10)
    assert use.counts == ({name: 2} if name in MASKED else {"sdpa (masks)": 2})


@pytest.mark.parametrize("name, size, dtype, reason, brief", [
    ("flash", 264, BF16, "FlashAttention 2 takes a head size of at most 256.* has 264 and 264", "heads of 264"),
    ("sage", 160, BF16, "SageAttention takes a head size of at most 128.* has 160 and 160", "heads of 160"),
    ("flash3", 64, torch.float32, "takes float16, bfloat16, and this model computes in float32", "float32"),
    ("comfy_kitchen_int8", 264, BF16, "int8 attention takes a head size of at most 256", "heads of 264"),
    ("xformers", 64, FP64, "takes float16, bfloat16, float32, and this model computes in float64", "float64")])
def test_what_does_not_fit_is_refused_by_name_or_torchs_own(tmp_path, name, size, dtype, reason, brief):
    q, k, v = tensors(1, 2, 2, 5, 5, size, dtype)
    with packages(tmp_path, exact=False):
        with pytest.raises(UnsupportedError, match=f"^Set attention to sdpa .* node that selects {name}: .*{reason}"):
            attend(q, k, v, BackendUse(name, True))
        use = BackendUse(name)

        assert torch.equal(attend(q, k, v, use), reference(q, k, v)) and use.counts == {f"sdpa ({brief})": 1}


def test_a_package_that_is_missing_or_broken_or_too_old_is_named(tmp_path, monkeypatch):
    q, k, v = tensors(1, 2, 2, 5, 5, 64)
    broken = {"flash_attn/__init__.py": "raise ImportError('undefined symbol')",
              "sageattention/__init__.py": kernel_packages.SAGE1,
              f"{kernel_packages.DOUBLE}.py": kernel_packages.COMFY_KITCHEN.replace("int8_attention", "fp8_attention")}
    with packages(tmp_path, **broken):
        with pytest.raises(UnsupportedError, match="FlashAttention 2 cannot be imported .*undefined symbol.*reinstall"):
            attend(q, k, v, BackendUse("flash", True))
        attend(q, k, v, BackendUse("sage", True))                # whose first version is enough without Ring
        with pytest.raises(UnsupportedError, match="gives no log-sum-exp .* with sageattention 2"):
            attend_with_lse(q, k, v, BackendUse("sage", True))
        with pytest.raises(UnsupportedError, match="int8 attention needs comfy-kitchen 0.2.31 or newer"):
            attend(q, k, v, BackendUse("comfy_kitchen_int8", True))
        sys.modules["sageattention"].DTYPES = ()
        with pytest.raises(UnsupportedError, match=r"SageAttention rejects queries of shape \(1, 2, 5, 64\) and type"):
            attend(q, k, v, BackendUse("sage"))
        monkeypatch.setattr(backends, "capability_of", lambda device: (8, 9))
        unusable = backends.unusable(torch.device("cuda:0"))
    assert unusable["sage"] == "" and "compute capability 9.x, and cuda:0 has 8.9" in unusable["flash3"]
    here = backends.unusable(torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"select one: sage on cpu is not installed \(package sage"):
        refuse_unusable(BackendChoice("sage", True), {0: {"sage": ""}, 1: here}, ("cuda:0", "cpu"))
    refuse_unusable(BackendChoice("sage"), {0: here}, ("cpu",))
    refuse_unusable(BackendChoice("sdpa", True), {0: here}, ("cpu",))


@pytest.mark.parametrize("name, backend", [(name, "") for name in ("SD3", "Wan", "Flux.1", "SDXL")] + [
    ("Wan", "eager"), ("SDXL", "eager"), pytest.param("SD3", "eager", marks=pytest.mark.slow),
    pytest.param("Flux.1", "eager", marks=pytest.mark.slow)])
def test_blocks_attend_by_the_kernel_compiled_or_not(installed, name, backend):
    """Whole, and with keys and values that are kept for patches."""
    one = example(name)
    wanted = one.run()
    hooks = install_hooks(one.model, one.family.plan)
    kept = {"key_values": KeyValues(), "first_image": 0, "num_images": 1}
    torch._dynamo.reset()
    for keeping in [{}] if one.family.plan.is_unet else [{}, kept]:
        use = BackendUse("flash", True)
        context = one.loaded(hooks).context(SINGLE, Traffic(), one.latent, one.timestep, one.conditioning, backend=use,
                                            options=ForwardOptions(compile_backend=backend), **keeping)
        out = one.family.prediction(hooks.run(context)[0], one.latent)

        within((out - wanted).abs().max(), 1e-10)
        assert use.counts.pop("flash") > 1 and set(use.counts) <= {"sdpa (masks)"}
    torch._dynamo.reset()


def parallel(rank, world_size, folder, name, ring, ulysses, mutant):
    kernel_packages.use(folder)
    q, k, v = tensors(2, 4, 2, 23, 23, 64, seed=3)
    whole = reference(q, k, v)
    sizes = [6, 6, 6, 5] if world_size == 4 else [12, 11]
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    if mutant:                                                  # as if the package's were of base 2
        plain = sequence_parallel.attend_with_lse
        sequence_parallel.attend_with_lse = lambda *args: (lambda out, lse: (out, lse / 0.6931))(*plain(*args))
    use = BackendUse(fastest=FASTEST) if name == "auto" else BackendUse(name, True)
    out = usp_attention(q[:, :, mine], k[:, :, mine], v[:, :, mine], Attention(sizes, backend=use),
                        build_mesh(Layout(ring_degree=ring, ulysses_degree=ulysses), world_size), Traffic())
    return (out - whole[:, :, mine]).abs().max().item(), dict(use.counts)


@pytest.mark.parametrize("name, ring, ulysses", [("flash", 1, 2), ("sage", 2, 1), ("xformers", 2, 2), ("flash3", 4, 1),
                                                ("comfy_kitchen_int8", 1, 2), ("auto", 1, 2), ("auto", 2, 1)])
def test_methods_attend_by_the_kernel(tmp_path, name, ring, ulysses):
    kernel_packages.write(tmp_path)
    for error, counts in run_ranks(parallel, ring * ulysses, tmp_path, name, ring, ulysses, False):
        within(error, 1e-10)
        expected = name if name != "auto" else FASTEST["64 1024 lse" if ring > 1 else "64 1024"]
        assert counts == {expected: ring}


def test_a_wrong_log_sum_exp_would_show(tmp_path):
    kernel_packages.write(tmp_path)

    assert max(error for error, _ in run_ranks(parallel, 2, tmp_path, "sage", 2, 1, True)) > 1e-3


FASTEST = {"64 1024": "flash", "64 1024 lse": "flash3", "128 1024": "sdpa", "128 1024 lse": "xformers"}


def test_auto_runs_the_operator_that_was_chosen_for_the_size_and_the_need(installed):
    """In float64 to 1e-10, as each operator alone."""
    use = BackendUse(fastest=FASTEST)
    for size, expected in ((64, "flash"), (128, "sdpa"), (40, "sdpa")):
        q, k, v = tensors(2, 4, 2, 9, 11, size)
        use.counts.clear()
        within((attend(q, k, v, use) - reference(q, k, v)).abs().max(), 1e-10, expected)
        assert dict(use.counts) == {expected: 1}
    for size, expected in ((64, "flash3"), (128, "xformers"), (40, "sdpa")):
        q, k, v = tensors(2, 4, 4, 9, 11, size)
        use.counts.clear()
        if expected == "sdpa":                                 # torch's own operators have no CUDA here
            assert backends._by_fastest(q, k, v, use, None, True) is None
            continue
        out, lse = attend_with_lse(q, k, v, use)
        scores = q @ k.transpose(2, 3) * size ** -0.5
        within((out - reference(q, k, v)).abs().max(), 1e-10, expected)
        within((lse[..., 0] - scores.logsumexp(-1)).abs().max(), 1e-10, expected)
        assert dict(use.counts) == {expected: 1}


def test_auto_leaves_masked_and_causal_calls_to_torch(installed):
    use, (q, k, v) = BackendUse(fastest=FASTEST), tensors(1, 2, 2, 8, 8, 64)
    mask = torch.arange(8) < 5

    masked, causal = attend(q, k, v, use, mask[None, None, None]), attend(q, k, v, use, is_causal=True)

    within((masked - reference(q, k, v, mask=mask[None, None, None])).abs().max(), 1e-10)
    within((causal - F.scaled_dot_product_attention(q, k, v, is_causal=True)).abs().max(), 1e-10)
    assert dict(use.counts) == {"sdpa": 2}


def test_an_operator_that_fails_is_replaced_by_torch_and_not_tried_again(installed, caplog, monkeypatch):
    calls = []

    def fails(*arguments):
        calls.append(arguments)
        raise RuntimeError("no execution plan")
    monkeypatch.setitem(BACKENDS, "flash", backends.replace(BACKENDS["flash"], call=fails))
    use, (q, k, v) = BackendUse(fastest=FASTEST), tensors(1, 2, 2, 8, 8, 64)

    for _ in range(2):
        within((attend(q, k, v, use) - reference(q, k, v)).abs().max(), 1e-10)
    assert len(calls) == 1 and dict(use.counts) == {"sdpa": 2} and "no execution plan" in caplog.text


def test_auto_does_not_hide_a_lack_of_memory(installed, monkeypatch):
    def fails(*arguments):
        raise torch.OutOfMemoryError("out of memory")
    monkeypatch.setitem(BACKENDS, "flash", backends.replace(BACKENDS["flash"], call=fails))

    with pytest.raises(torch.OutOfMemoryError):
        attend(*tensors(1, 2, 2, 8, 8, 64), BackendUse(fastest=FASTEST))


@pytest.mark.parametrize("fastest", [{"64 1024": "sage"}, {"64 1024": "comfy_kitchen_int8"}, {"64 1024": 1}], ids=str)
def test_a_message_cannot_name_an_operator_that_rounds(fastest):
    with pytest.raises(ValueError, match="fastest"):
        BackendChoice(fastest=fastest)
