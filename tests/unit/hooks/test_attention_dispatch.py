"""Attention as ComfyUI's models call it, also those of newer versions."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.mutations import mutate
from xdit_backend.attention.backends import BackendUse
from xdit_backend.comfyui.install_location import find_comfyui
from xdit_backend.comfyui.native_models import class_at
from xdit_backend.hooks import attention_dispatch
from xdit_backend.hooks.attention_dispatch import AttentionFunctions
from xdit_backend.hooks.forward_context import HookState, ModelPatches
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
    context = SimpleNamespace(state=HookState(), backend=backend) if backend else None
    return AttentionFunctions(lambda: context, False)


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


@pytest.mark.parametrize("name, expected", [("sage", "sdpa"), ("comfy_kitchen_int8", "sdpa"), ("flash", "flash")])
def test_a_bias_in_queries_and_keys_is_not_rounded_to_8_bits(name, expected, monkeypatch):
    """LTX-Video's guides add numbers of up to 100 to a head, next to which the others would be rounded to zero."""
    backends, q = [], torch.randn(1, 2, 5, 64)
    monkeypatch.setattr(attention_dispatch, "attend", lambda query, key, value, context, layer, backend, scale:
                        backends.append(backend.name) or value)
    for biases in ({}, {"attn1": None}):
        state = HookState(cuts={("bias", "attn1"): torch.zeros(1, 5, 2)},
                          attention=SimpleNamespace(name="attn1", is_exact=False))
        context = SimpleNamespace(backend=BackendUse(name), patches=ModelPatches(biases=biases), state=state)
        functions()._biased(q, q, q, context, None)

    assert backends == [name, expected]


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
