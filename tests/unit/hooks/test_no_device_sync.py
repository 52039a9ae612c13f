"""A forward asks its device for nothing and waits for no copy to it:
what it needs of the host is on the device before."""

import pytest
import torch

from tests.support.fake_cuda import CUDA, fake_cuda_device, move
from tests.support.model_zoo import CONFIGS, example
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.hooks.transformer import Hooks
from xdit_backend.models import FAMILIES
from xdit_backend.parallel.stale_kv_cache import KeyValues

# Whose forwards in diffusers read numbers of the device, for shapes that depend on them: experts, text without what is
# masked, tables; of SeedVR2 in ComfyUI, its windows.
READING = ("HiDream-I1", "Hunyuan3D 2.1", "HunyuanImage", "HunyuanImage distilled", "HunyuanVideo 1.5",
           "HunyuanVideo 1.5 distilled", "Lumina 2", "Latte", "Mochi", "SeedVR2")
# of diffusers' Qwen-Image, where text is masked; of ComfyUI's Wan, which counts the frequencies of a time on the host
ALLOWED = "compute_text_seq_len_from_mask", "sinusoidal_embedding_1d", "model_wandancer.py"
CASES = [(name, masked) for name in CONFIGS if name not in READING for masked in (False, True)
         if not masked or "attention_mask" in FAMILIES[name].inputs.conditioning]


@pytest.mark.parametrize("name, masked", CASES)
def test_a_second_forward_does_not_wait_for_the_device(monkeypatch, name, masked):
    """With keys and values kept, so that every attention goes by a method. The first may bring tables to the device."""
    one = example(name, torch.float32, masked=masked)
    loaded, kept = one.loaded(Hooks(one.model, one.family.plan)), KeyValues()
    with fake_cuda_device(monkeypatch) as work_of:
        move(one.model)
        latent = torch.empty(one.latent.shape, device=CUDA)
        conditioning = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
                        for key, tensor in one.conditioning.items()}

        def forward():
            context = loaded.context(SINGLE, Traffic(), latent, one.timestep, conditioning, key_values=kept)
            loaded.hooks.run(context)
        second = [work_of(forward), work_of(forward)][1]
    waits = [wait for wait in second.waits if not any(function in wait for function in ALLOWED)]
    assert second.kernels > 100 and waits == []
    assert len(second.waits) == ("comfy.ldm.wan" in FAMILIES[name].transformer) + (
        name in ("WanDancer", "Wan Animate 2")) + (
        masked and name == "Qwen-Image")
