"""IP-Adapter of the pack ComfyUI_IPAdapter_plus on U-Nets: our MODEL draws what the native MODEL draws with it, where
what it is given is known; the rest is refused by name."""

import sys

import pytest
import torch

from tests.integration.sampling.test_displaced import OracleForward
from tests.integration.sampling.test_operations import shrunk
from tests.support import ip_adapter
from tests.support.ip_adapter import adapter_of, import_pack, show_images
from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
ACTS = 1e-3
LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "data2": ("cpu,cpu", {"data": 2}),
           "displaced2": ("cpu,cpu", {"displaced": 2, "displaced_mode": "full_sync"})}
SIZE = 21, 15                              # odd at every level


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return import_pack(tmp_path_factory.mktemp("pack"))


class Applied:
    """Puts the same adapters into MODELs of a kind."""

    def __init__(self, comfyui, pack, kind):
        self.comfyui, self.pack, self.kind = comfyui, pack, kind
        self.net = comfyui.native(kind).model.diffusion_model

    def adapter(self, **made):
        return adapter_of(self.net, is_xl=self.kind.startswith("sdxl"), **made)

    def apply(self, model, *adapters):
        """adapters: (what adapter() gives, settings)."""
        for given, settings in adapters:
            model = ip_adapter.apply(self.pack, model, self.net, given, **settings)
        return model

    def compare(self, layout, *adapters, change=lambda model: model, **sampled):
        devices, degrees = LAYOUTS[layout]
        comfyui, kind = self.comfyui, self.kind
        sampled = {"steps": 2, "latent": comfyui.latent(kind, 2 if layout == "data2" else 1, SIZE), **sampled}
        ours, native = (change(model) for model in (comfyui.ours(kind, comfyui.config(devices, **degrees)),
                                                    comfyui.native(kind)))

        result, reference = (comfyui.sample(self.apply(model, *adapters), kind, **sampled) for model in (ours, native))

        close(result, reference, TOLERANCE, [settings for _, settings in adapters])
        plain = comfyui.sample(native, kind, **sampled)
        assert relative_error(reference, plain) > ACTS, "an adapter that changes nothing"


def test_keys_and_values_are_made_once_for_each_set_of_adapters_that_acts(comfyui, pack, monkeypatch):
    """Of which there are two in this run: the first adapter is for its first half, the second one for the rest."""
    applied, made = Applied(comfyui, pack, "sd15"), []
    module = sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.sampling.image_adapters"]
    weights, sampling = module._weights, comfyui.native("sd15").get_model_object("model_sampling")
    monkeypatch.setattr(module, "_weights", lambda *given: made.append(given[0][0].adapters) or weights(*given))
    start, middle, end = map(sampling.percent_to_sigma, (0.0, 0.5, 1.0))

    applied.compare("one", (applied.adapter(), {"sigma_start": start, "sigma_end": middle}),
                    (applied.adapter(seed=2), {"sigma_start": middle - 1e-6, "sigma_end": end}), steps=6)

    assert [len(adapters) for adapters in made] == [1, 1]


def wrapped(model):
    """A MODEL whose calls a node wraps: ComfyUI puts both prompts into one."""
    changed = model.clone()
    changed.set_model_unet_function_wrapper(lambda apply, given: apply(given["input"], given["timestep"], **given["c"]))
    return changed


def masks(*shape, seed=4):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind, layout", [
    ("sd15", "cfg2"), ("sdxl", "displaced2"), ("ssd-1b", "displaced2"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("sd15", "one"), ("sd15", "data2"), ("sd15", "displaced2"), ("sdxl", "one"),
        ("sdxl", "cfg2"), ("sdxl", "data2"), ("sdxl-blocks", "one"), ("sd15-blocks", "displaced2"),
        ("sdxl-blocks", "cfg2"), ("koala-700m", "cfg2"), ("sd2", "data2"),
        ("sd-x4-upscaler", "cfg2")))])
def test_two_adapters_equal_native_ksampler(comfyui, pack, kind, layout):
    """One of two pictures, with a mask; one that acts for a part of the steps, with other kinds of weights."""
    applied = Applied(comfyui, pack, kind)
    sampling = comfyui.native(kind).get_model_object("model_sampling")
    range_ = {"sigma_start": sampling.percent_to_sigma(0.2), "sigma_end": sampling.percent_to_sigma(1.0)}

    applied.compare(layout, (applied.adapter(images=2), {"weight": 0.8, "mask": masks(2, 50, 40)}),
                    (applied.adapter(seed=2, tokens=3), {"weight_type": "ease in", "embeds_scaling": "K+V", **range_}))


def test_every_kind_of_weight_equals_native_ksampler(comfyui, pack):
    """On a U-Net in which layers are numbered through as in the adapters' own."""
    applied = Applied(comfyui, pack, "sd15")
    given = applied.adapter()
    for kind in ("ease in", "ease out", "ease in-out", "reverse in-out", "weak input", "weak middle", "weak output",
                 "strong middle"):
        applied.compare("one", (given, {"weight_type": kind, "weight": 1.3}), steps=1)
    for scaling in ("K+V", "K+V w/ C penalty", "K+mean(V) w/ C penalty"):
        applied.compare("one", (applied.adapter(images=2, loud=3.0), {"embeds_scaling": scaling, "weight": 1.7}),
                        steps=1)


@pytest.mark.parametrize("kind", ["sd15", pytest.param("sdxl", marks=pytest.mark.slow),
                                  pytest.param("sdxl-blocks", marks=pytest.mark.slow)])
def test_weights_of_layers_equal_native_ksampler(comfyui, pack, kind):
    """Style and composition: each layer has a weight of its own or none, and some another picture."""
    applied = Applied(comfyui, pack, kind)
    given, other = applied.adapter(), applied.adapter(seed=5)
    weights = {0: 0.7, 1: 1.2, 3: 0.9, 4: 0.0, 5: 1.1}
    for name, alternative in (("linear", None), ("style transfer precise", None), ("composition precise", None),
                              ("style and composition", {3: other["cond"], 1: other["cond"]})):
        applied.compare("cfg2", (given, {"weight": weights, "weight_type": name, "cond_alt": alternative}), steps=1)


@pytest.mark.parametrize("layout", ["data2", *(pytest.param(layout, marks=pytest.mark.slow)
                                               for layout in ("one", "cfg2", "displaced2"))])
def test_a_image_for_each_image_equals_native_ksampler(comfyui, pack, layout):
    """More images than pictures, weights and masks; the last of each is the others' too."""
    applied = Applied(comfyui, pack, "sd15")
    weights = torch.tensor([0.0, 1.4]).view(-1, 1, 1)

    for scaling in ("V only", "K+mean(V) w/ C penalty"):
        applied.compare(layout, (applied.adapter(images=2), {
            "weight": weights, "unfold_batch": True, "mask": masks(2, 9, 30), "embeds_scaling": scaling}),
            latent=comfyui.latent("sd15", 3, SIZE), steps=1)


@pytest.mark.parametrize("size", [(9, 40), (33, 9), (16, 18)], ids=str)
def test_masks_at_odd_sides_equal_native_ksampler(comfyui, pack, size):
    """There rows and columns that the pack takes for a mask are not those of the layer."""
    applied = Applied(comfyui, pack, "sd15")

    applied.compare("displaced2", (applied.adapter(), {"mask": masks(1, 64, 48)}), steps=1,
                    latent=comfyui.latent("sd15", size=size))


def test_areas_and_calls_of_one_and_two_prompts_equal_native_ksampler(comfyui, pack):
    """Two parts of a batch for the positive prompt, of other sizes; no negative prompt; and a call of both prompts,
    which go to two devices."""
    applied, area = Applied(comfyui, pack, "sd15"), comfyui.conditioning("sd15", 3, tokens=20)
    area[0][1]["area"] = (9, 10, 0, 5)

    applied.compare("cfg2", (applied.adapter(), {"mask": masks(1, 20, 20)}),
                    positive=comfyui.conditioning("sd15", 1) + area)
    applied.compare("one", (applied.adapter(), {}), cfg=1.0)
    applied.compare("cfg2", (applied.adapter(), {}), change=wrapped, steps=1)


class OracleWithImages(OracleForward):
    """An oracle for each prompt, made in the first call in the order of its images."""

    def __init__(self, comfyui, kind, net, given, weight):
        super().__init__(comfyui, kind, 2, 1)
        load = self.load

        def with_images():
            loaded = load()
            prompt, linears = next(self.prompts), given["ipadapter"].ip_layers.to_kvs
            layers = {f"{side}.{block}.{index}": [linears[f"{2 * number + 1}_to_{kind}_ip"].weight for kind in "kv"]
                      for number, ((side, block), index, _) in enumerate(ip_adapter.attentions(net))}
            show_images(loaded.model, layers, (given["cond"], given["uncond"])[prompt], weight)
            return loaded
        self.load = with_images

    def __call__(self, x, timestep=None, context=None, control=None, transformer_options={}, **extra):
        self.prompts = iter(transformer_options["cond_or_uncond"])
        return super().__call__(x, timestep, context, control, transformer_options, **extra)


@pytest.mark.parametrize("kind", ["sdxl", pytest.param("sd15-blocks", marks=pytest.mark.slow)])
def test_stale_patches_equal_the_oracles(comfyui, pack, kind):
    """After the first step each rank has old rows of the other; the oracle has its pictures from diffusers."""
    applied = Applied(comfyui, pack, kind)
    given, sampled = applied.adapter(), {"steps": 3, "latent": comfyui.latent(kind, size=(23, 10))}
    config = comfyui.config("cpu,cpu", displaced=2, warmup_steps=1, displaced_mode="corrected_async_gn")
    native, oracle = comfyui.native(kind), OracleWithImages(comfyui, kind, applied.net, given, 0.9)
    forward = applied.net.forward

    result, whole = (comfyui.sample(applied.apply(model, (given, {"weight": 0.9})), kind, **sampled)
                     for model in (comfyui.ours(kind, config), native))
    applied.net.forward = oracle
    try:
        reference = comfyui.sample(native, kind, **sampled)
    finally:
        applied.net.forward = forward

    close(result, reference, 1e-4)                             # as in test_displaced.py
    assert oracle.num_stale > 0 and relative_error(result, whole) > ACTS


def test_in_smaller_images_it_equals_native_ksampler_without_a_mask(comfyui, pack):
    """With Kohya's Deep Shrink, which changes how many tokens a mask is for."""
    applied = Applied(comfyui, pack, "sd15")

    applied.compare("cfg2", (applied.adapter(), {}), change=lambda model: shrunk(comfyui, model, block_number=1))
    with pytest.raises(comfyui.errors.UnsupportedError, match="^Remove PatchModelAddDownscale or the attn_mask of IP"):
        applied.compare("one", (applied.adapter(), {"mask": masks(1, 8, 8)}), change=lambda model: shrunk(
            comfyui, model, block_number=1))


def test_places_that_comfyuis_model_has_not_are_passed_over(comfyui, pack):
    """The pack names the middle of a U-Net ("middle", 1), and ComfyUI 0.30.0 ("middle", 0)."""
    applied = Applied(comfyui, pack, "sd15")
    models = [applied.apply(model, (applied.adapter(), {}))
              for model in (comfyui.ours("sd15", comfyui.config()), comfyui.native("sd15"))]
    for model in models:
        replaced = model.model_options["transformer_options"]["patches_replace"]["attn2"]
        replaced["middle", 1] = replaced.pop(("middle", 0))

    result, reference = (comfyui.sample(model, "sd15", steps=1) for model in models)

    close(result, reference, TOLERANCE)
    whole = applied.apply(comfyui.native("sd15"), (applied.adapter(), {}))
    assert relative_error(reference, comfyui.sample(whole, "sd15", steps=1)) > ACTS


def test_what_is_not_known_is_refused_by_name(comfyui, pack, tmp_path):
    applied = Applied(comfyui, pack, "sd15")
    given = applied.adapter()

    def refused(words, model, kind="sd15", error=comfyui.errors.UnsupportedError):
        with pytest.raises(error, match=words):
            comfyui.sample(model, kind, steps=1)

    ours = comfyui.ours("sd15", comfyui.config())
    for settings, words in (({"noise": 3}, "IP-Adapter with unknown arguments .noise."),
                            ({"weight_type": "louder"}, "weight_type louder of IP-Adapter"),
                            ({"embeds_scaling": "K"}, "embeds_scaling K of IP-Adapter"),
                            ({"weight": {1: 1.0}, "weight_type": "ease in"}, "together with a weight for each layer"),
                            ({"uncond": None}, "IP-Adapter without uncond"),
                            ({"uncond": given["uncond"][:, :2]}, "^Use as many negative images as images"),
                            ({"mask": masks(1, 4, 4), "cond": torch.cat([given["cond"]] * 2)}, "as many negative")):
        refused(words, applied.apply(ours, (given, settings)))
    windows = applied.apply(ours, (given, {"unfold_batch": True}))
    windows.model_options["transformer_options"]["ad_params"] = {"sub_idxs": [0], "full_length": 2}
    refused("ad_params in its transformer_options", windows)
    others = Applied(comfyui, import_pack(tmp_path / "others", old=ip_adapter.OLD), "sd15")
    changed = others.apply(ours, (given, {}))
    replaced = changed.model_options["transformer_options"]["patches_replace"]["attn2"]
    replaced["input", 1] = others.pack.CrossAttentionPatch()
    refused("an IP-Adapter of an old ComfyUI_IPAdapter_plus", changed)
    replaced["input", 1] = lambda q, k, v, extra_options: q
    refused("a replaced text cross-attention .*lambda", changed)
    replaced["input", 1] = pack.Attn2Replace(pack.attention)
    refused("a replaced text cross-attention .attention.", changed)


def test_an_adapter_that_computes_otherwise_or_is_for_other_models_is_refused_by_name(comfyui, pack, tmp_path):
    ours = comfyui.ours("sd15", comfyui.config())
    for number, (known, other) in enumerate((("0.05 + 0.95 * share", "share"), ("index == 3 if", "index == 2 if"),
                                             ("(cond, uncond)[branches", "(uncond, cond)[branches"),
                                             ("found = found + called", "found = 2 * found + called"),
                                             ("found * covered", "found + covered"),
                                             ("strength * query", "query.missing * query"))):
        text = ip_adapter.PACK.replace(known, other)
        assert text != ip_adapter.PACK
        mutant = Applied(comfyui, import_pack(tmp_path / str(number), text), "sd15")
        given = mutant.adapter() | ({} if number != 1 else adapter_of(mutant.net, is_xl=True))
        settings = {"weight_type": "ease out", "mask": masks(1, 8, 8), "embeds_scaling": "K+V w/ C penalty"}
        if number == 1:
            settings = {"weight": {2: 1.0, 3: 1.0}, "weight_type": "style transfer precise"}

        with pytest.raises(comfyui.errors.UnsupportedError, match="^Use another version of ComfyUI_IPAdapter_plus"):
            comfyui.sample(mutant.apply(ours, (given, settings)), "sd15", steps=1)

    applied = Applied(comfyui, pack, "sd15")
    for kind, error, words in (("sdxl", comfyui.errors.ConfigError, "^Use an adapter that was made for this model"),
                               ("svd", comfyui.errors.UnsupportedError, "^Remove IP-Adapter: Stable Video"),
                               ("pixart", comfyui.errors.UnsupportedError, "does not support the patches .*attn2")):
        model = comfyui.ours(kind, comfyui.config())
        changed = applied.apply(model, (applied.adapter(), {}))
        replaced = changed.model_options["transformer_options"]["patches_replace"]["attn2"]
        replaced["middle", 0, 0] = replaced["input", 1] if ("input", 1) in replaced else next(iter(replaced.values()))
        with pytest.raises(error, match=words):
            comfyui.sample(changed, kind, steps=1)
