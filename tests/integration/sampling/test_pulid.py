"""PuLID and InstantID of the packs PuLID_ComfyUI and ComfyUI_InstantID on U-Nets: our MODEL draws what the native MODEL
draws with them; PuLID for Flux is refused by name."""

import pytest
import torch

from tests.integration.sampling.test_ip_adapter import Applied, masks
from tests.support import ip_adapter
from tests.support.ip_adapter import import_pack

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
def test_a_face_after_images_equals_native_ksampler(comfyui, packs, layout):
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

    refused("PuLID with unknown arguments .unfold_batch.",
            applied.apply(ours, (applied.adapter(), {"unfold_batch": True})))
    refused("PuLID without ipadapter", applied.apply(ours, (applied.adapter(), {"pulid": None})))
    narrow = Applied(comfyui, packs["pulid"], "sd15").adapter()
    refused("^Use an adapter that was made for this model for PuLID", applied.apply(ours, (narrow, {})),
            comfyui.errors.ConfigError)
    for number, (known, other) in enumerate(((":5]", ":4]"), ("(1 - faithful)", "faithful"),
                                             ("direction * found).sum(0)", "direction * found).mean(0)"))):
        text = ip_adapter.PULID.replace(known, other)
        assert text != ip_adapter.PULID
        mutant = Applied(comfyui, import_pack(tmp_path / str(number), text), "sdxl")
        refused("^Use another version of PuLID_ComfyUI, or Load Diffusion Model: PuLID of the installed one computes",
                mutant.apply(ours, face(mutant, "fidelity")))
    old = Applied(comfyui, import_pack(tmp_path / "old", ip_adapter.INSTANTID, ip_adapter.OLD_INSTANTID), "sdxl")
    changed = old.apply(ours, (old.adapter(), {}))
    replaced = changed.model_options["transformer_options"]["patches_replace"]["attn2"]
    replaced[next(iter(replaced))] = old.pack.CrossAttentionPatchIID()
    refused("an InstantID of an old ComfyUI_InstantID", changed)


FLUX = '''
import types


def forward_orig(self, img, img_ids, txt, txt_ids, timesteps, y, guidance=None, control=None, transformer_options={}):
    raise AssertionError("computes with layers that the workers hold")


def apply(net, faces, unique_id):
    if not hasattr(net, "pulid_ca"):
        net.pulid_ca, net.pulid_double_interval, net.pulid_single_interval, net.pulid_data = faces, 2, 4, {}
        net.forward_orig = types.MethodType(forward_orig, net)
    net.pulid_data[unique_id] = {"weight": 1.0}
'''
BLOCKS = '''
class DitDoubleBlockReplace:
    def __call__(self, given, extra_options):
        return extra_options["original_block"](given)
'''


def imported(path, text):
    path.write_text(text, encoding="utf-8")
    found = {}
    exec(compile(text, str(path), "exec"), found)
    return found


def test_pulid_for_flux_is_refused_by_name_as_long_as_its_node_is_there(comfyui, tmp_path):
    """It writes to the diffusion model itself, and its node takes back what it has added when it goes."""
    ours, pack = comfyui.ours("flux", comfyui.config()), imported(tmp_path / "pulidflux.py", FLUX)
    plain, net = comfyui.sample(ours, "flux", steps=1), ours.model.diffusion_model
    words = r"^Remove the node that adds it, .* does not support PuLID for Flux \(Apply PuLID Flux\) on this MODEL"

    pack["apply"](net, torch.nn.ModuleList([torch.nn.Linear(2, 2)]), "7")
    with pytest.raises(comfyui.errors.UnsupportedError, match=words):
        comfyui.sample(ours, "flux", steps=1)
    del net.pulid_data["7"]
    assert torch.equal(comfyui.sample(ours, "flux", steps=1), plain)
    net.double_blocks[0].forward = lambda *args, **kwargs: None
    with pytest.raises(comfyui.errors.UnsupportedError, match="a changed diffusion_model.double_blocks.0.forward on"):
        comfyui.sample(ours, "flux", steps=1)

    blocks = comfyui.ours("flux", comfyui.config())
    block = imported(tmp_path / "PulidFluxHook.py", BLOCKS)["DitDoubleBlockReplace"]()
    blocks.set_model_patch_replace(block, "dit", "double_block", 0)
    with pytest.raises(comfyui.errors.UnsupportedError, match=words):
        comfyui.sample(blocks, "flux", steps=1)
