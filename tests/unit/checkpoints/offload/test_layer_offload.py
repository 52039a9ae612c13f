"""Autoencoders whose weights come from host memory layer by layer: they give the bits that they give with all weights
on the device, in the memory of two layers, and each weight is copied once for each time that its layer runs."""

from collections import Counter

import pytest
import torch

from tests.support.vae_zoo import KINDS, image, latent, minimax, tiny_vae
from xdit_backend.autoencoders import family_of
from xdit_backend.checkpoints.offload.block_offload import OffloadedBlocks
from xdit_backend.checkpoints.offload.layer_offload import StreamedLayers
from xdit_backend.comfyui.install_location import find_comfyui
from xdit_backend.memory.copy_thread import CopyThread
from xdit_backend.memory.staging import StagingBuffers

CPU = torch.device("cpu")
ALL = [*KINDS, *(["minimax"] if find_comfyui() is not None else [])]


class Copies(CopyThread):
    """Also counts the bytes of each tensor in host memory that it copies."""

    def __init__(self):
        super().__init__(CPU, StagingBuffers(CPU))
        self.copied = Counter()

    def start(self, pairs):
        self.copied.update(source.data_ptr() for source, _ in pairs)
        return super().start(pairs)


def vae_of(kind):
    return minimax() if kind == "minimax" else tiny_vae(kind, torch.float32)


def given(kind, way, size):
    if kind == "minimax":
        shape = (1, 24, 7, *size) if way == "decode" else (1, 3, 18, 16 * size[0], 16 * size[1])
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (latent if way == "decode" else image)(kind, 1, *size, torch.float32)


def transformed(vae, way, tensor):
    with torch.inference_mode():
        return getattr(family_of(vae), way)(vae, tensor)


@pytest.mark.parametrize("way", ["decode", "encode"])
@pytest.mark.parametrize("kind", ALL)
def test_weights_that_come_give_the_same_bits(kind, way):
    """Twice, of other sizes, and once more after a failure."""
    vae, whole, copies = vae_of(kind), vae_of(kind), Copies()
    layers = StreamedLayers(vae, CPU, copies)

    for size in ((4, 6), (6, 4)):
        with layers.running():
            found = transformed(vae, way, given(kind, way, size))
        assert torch.equal(found, transformed(whole, way, given(kind, way, size)))
    with pytest.raises(RuntimeError), layers.running():
        transformed(vae, way, given(kind, way, (4, 6))[:, :2])
    with layers.running():
        assert torch.equal(transformed(vae, way, given(kind, way, (4, 6))), transformed(whole, way, given(
            kind, way, (4, 6))))


@pytest.mark.parametrize("kind", ["sd", "hunyuan", *(["minimax"] if find_comfyui() is not None else [])])
def test_no_weight_comes_more_often_than_its_layer_runs(kind):
    vae, copies, runs = vae_of(kind), Copies(), Counter()
    layers = StreamedLayers(vae, CPU, copies)
    with layers.running():
        transformed(vae, "decode", given(kind, "decode", (4, 6)))      # in the order in which they are
    sources = {id(layer): [host.data_ptr() for host in layers.offloaded._blocks[index].host_copies]
               for index, layer in enumerate(layers._layers)}
    counted = [layer.register_forward_hook(lambda module, *_: runs.update([id(module)])) for layer in layers._layers]
    copies.copied.clear()

    with layers.running():
        transformed(vae, "decode", given(kind, "decode", (4, 6)))
    for hook in counted:
        hook.remove()

    # the first ones come for the next run as this one ends
    assert {key for key, count in runs.items() if max(copies.copied[source] for source in sources[key]) > count} <= {
        id(layer) for layer in layers._layers[:2]}
    assert layers.offloaded.device_bytes == layers.offloaded.buffer_bytes < sum(
        tensor.nbytes for tensor in vae.parameters()) / 2


def test_it_notices_a_layer_that_does_not_wait(monkeypatch):
    monkeypatch.setattr(OffloadedBlocks, "enter", lambda self, index: None)
    vae, whole = vae_of("sd"), vae_of("sd")
    layers = StreamedLayers(vae, CPU, Copies())

    with layers.running():
        found = transformed(vae, "decode", given("sd", "decode", (4, 6)))

    assert not torch.equal(found, transformed(whole, "decode", given("sd", "decode", (4, 6))))
