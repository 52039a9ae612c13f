"""Attention as ComfyUI's models call it, also those of newer versions."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.mutations import mutate
from xdit_backend.attention.backends import BackendUse
from xdit_backend.comfyui.install_location import find_comfyui
from xdit_backend.comfyui.native_models import class_at
from xdit_backend.hooks.attention_dispatch import AttentionFunctions
from xdit_backend.models import FAMILIES
from xdit_backend.worker.self_check import check_split


class Container:
    """ComfyUI 0.32's AttentionTensorContainer: an attention takes its tensor once."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        return tensor


def functions(backend=None):
    context = SimpleNamespace(attention=None, guided_attention=None, backend=backend)
    return AttentionFunctions(lambda: context if backend else None, False)


def test_tensors_in_containers_attend_as_tensors():
    q, k, v = torch.randn(3, 2, 5, 8)
    attend = functions().optimized_attention

    assert torch.equal(attend(Container(q), Container(k), Container(v), 2), attend(q, k, v, 2))


@pytest.mark.parametrize("options, is_exact", [({}, False), ({"low_precision_attention": True}, False),
                                               ({"low_precision_attention": False}, True)])
def test_an_attention_that_comfyui_wants_exact_is_not_sages(options, is_exact):
    use = BackendUse("sage", modules={"sage": "is not installed"})
    q, k, v = torch.randn(3, 1, 5, 64)

    functions(use).optimized_attention(q, k, v, 1, **options)

    assert (list(use.counts) == ["sdpa"]) == is_exact          # else why SageAttention does not take it is counted


@pytest.mark.skipif(find_comfyui() is None, reason="no ComfyUI: name one in XDIT_COMFYUI")
def test_a_wan_of_newer_comfyui_computes_in_pieces_what_it_computes_whole(monkeypatch):
    """Its self-attention passes its tensors in containers."""
    class_at(FAMILIES["Wan Camera"].transformer)
    from comfy.ldm.wan import model
    monkeypatch.setattr(model, "Container", Container, raising=False)
    native = model.optimized_attention
    monkeypatch.setattr(model, "optimized_attention", lambda q, k, v, *args, **options: native(
        *(each.take() if isinstance(each, Container) else each for each in (q, k, v)), *args, **options))
    mutate(monkeypatch, model.WanSelfAttention, "forward", "self.v(x).view(b, s, n * d),",
           "Container(self.v(x).view(b, s, n * d)),")

    check_split(FAMILIES["Wan Camera"])
