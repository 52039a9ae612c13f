"""PuLID and InstantID of the packs PuLID_ComfyUI and ComfyUI_InstantID on U-Nets: our MODEL draws what the native MODEL
draws with them."""

import pytest
import torch

from tests import ip_adapter
from tests.ip_adapter import import_pack
from tests.nodes.test_ip_adapter import Applied, masks

METHODS = {"fidelity": {"ortho_v2": True}, "style": {"ortho": True}, "neutral": {}}
ZEROS = {"fidelity": 8, "style": 16, "neutral": 0}             # tokens of nothing beside the picture's


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return {name: import_pack(tmp_path_factory.mktemp(name), getattr(ip_adapter, name.upper()))
            for name in ("pack", "instantid", "pulid")}


def face(applied, method, **made):
    """An adapter, and what its node gives besides."""
    given = applied.adapter(tokens=6, **made)
    for prompt in ("cond", "uncond"):
        given[prompt] = torch.nn.functional.pad(given[prompt], (0, 0, 0, ZEROS[method]))
    return given, METHODS[method]


@pytest.mark.parametrize("kind, layout", [
    ("sdxl", "displaced2"), ("sdxl", "cfg2"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sdxl", "one"), ("sdxl", "data2"), ("sdxl-blocks", "displaced2"), ("sdxl-blocks", "one"),
        ("ssd-1b", "displaced2"), ("sd15", "displaced2")))])
def test_faces_equal_native_ksampler(comfyui, packs, kind, layout):
    """By every method of the node, one of them masked, and one for a part of the steps."""
    applied, sampling = Applied(comfyui, packs["pulid"], kind), comfyui.native(kind).get_model_object("model_sampling")
    range_ = {"sigma_start": sampling.percent_to_sigma(0.2), "sigma_end": sampling.percent_to_sigma(1.0)}
    for method, more in (("fidelity", {"mask": masks(1, 50, 40), "weight": 0.8}), ("style", range_), ("neutral", {})):
        given, settings = face(applied, method)

        applied.compare(layout, (given, {**settings, **more}))


@pytest.mark.parametrize("layout", ["displaced2", pytest.param("cfg2", marks=pytest.mark.slow)])
def test_a_face_after_pictures_equals_native_ksampler(comfyui, packs, layout):
    """Of several packs in one object, one after the other: PuLID takes out what goes along all that came before."""
    class InTurn(Applied):
        def apply(self, model, *adapters):
            for pack, adapter in zip(packs.values(), adapters):
                model = Applied(comfyui, pack, self.kind).apply(model, adapter)
            return model
    applied = InTurn(comfyui, None, "sdxl")

    applied.compare(layout, (applied.adapter(), {"weight_type": "ease in"}),
                    (applied.adapter(seed=3, tokens=16), {"weight": 0.8}), face(applied, "style", seed=2))


@pytest.mark.parametrize("layout", ["cfg2", *(pytest.param(each, marks=pytest.mark.slow) for each in (
    "one", "data2", "displaced2"))])
def test_instantid_equals_native_ksampler(comfyui, packs, layout):
    applied = Applied(comfyui, packs["instantid"], "sdxl")

    applied.compare(layout, (applied.adapter(tokens=16), {"weight": 0.8, "mask": masks(1, 50, 40)}))


def test_what_is_not_known_is_refused_by_name(comfyui, packs, tmp_path):
    applied = Applied(comfyui, packs["pulid"], "sdxl")
    ours = comfyui.ours("sdxl", comfyui.config())

    def refused(words, model, error=comfyui.errors.UnsupportedError):
        with pytest.raises(error, match=words):
            comfyui.sample(model, "sdxl", steps=1)

    refused("what PuLID is given here .unfold_batch.", applied.apply(ours, (applied.adapter(), {"unfold_batch": True})))
    refused("PuLID without ipadapter", applied.apply(ours, (applied.adapter(), {"pulid": None})))
    narrow = Applied(comfyui, packs["pulid"], "sd15").adapter()
    refused("^Use an adapter that was made for this model for PuLID", applied.apply(ours, (narrow, {})),
            comfyui.errors.ConfigError)
    for number, (known, other) in enumerate(((":5]", ":4]"), ("(1 - faithful)", "faithful"),
                                             ("direction * found).sum(0)", "direction * found).mean(0)"))):
        text = ip_adapter.PULID.replace(known, other)
        assert text != ip_adapter.PULID
        mutant = Applied(comfyui, import_pack(tmp_path / str(number), text), "sdxl")
        refused("^Use another version of PuLID_ComfyUI, or Load Diffusion Model: this one's PuLID computes",
                mutant.apply(ours, face(mutant, "fidelity")))
    old = Applied(comfyui, import_pack(tmp_path / "old", ip_adapter.INSTANTID, ip_adapter.OLD_INSTANTID), "sdxl")
    changed = old.apply(ours, (old.adapter(), {}))
    replaced = changed.model_options["transformer_options"]["patches_replace"]["attn2"]
    replaced[next(iter(replaced))] = old.pack.CrossAttentionPatchIID()
    refused("an InstantID of an old ComfyUI_InstantID", changed)
