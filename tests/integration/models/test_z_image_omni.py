"""Z-Image-Omni with reference images, as ComfyUI's node TextEncodeZImageOmni gives them: latents, what SigLIP
sees, and texts between; of each some, none or more. Equal ComfyUI's own, under every method."""

from types import SimpleNamespace

import pytest
import torch

from tests.integration.sampling.test_pipefusion import EXACT, STALE, sample_oracle, staged
from tests.integration.sampling.test_rope_scaling import scaled
from tests.support.tiny_checkpoints import families
from tests.support.tolerances import close, relative_error
from xdit_backend.models.common.example_inputs import conditioning_of

KIND = "z-image-omni"
# rows and columns of the references, patches of what is seen (None: not seen), tokens of the texts
CASES = {
    "one": ([(6, 4)], [(2, 3)], [5, 9]),
    "two, one of them seen": ([(8, 12), (2, 6)], [(3, 2)], [40, 3, 7]),
    "three with texts alone": ([(4, 4), (10, 6), (2, 2)], [], [4, 33, 32, 6]),
    "without texts": ([(4, 6), (6, 6)], [(1, 4), (5, 7)], []),
    "more texts than references": ([(6, 10)], [(4, 4)], [3, 8, 40, 2]),
    "texts and sights without references": ([], [(2, 2)], [6])}
METHODS = [{"ulysses": 2}, {"cfg": 2}, *(pytest.param(each, marks=pytest.mark.slow) for each in (
    {"ring": 2}, {"tensor": 2}, {"data": 2}, {"displaced": 2, "displaced_mode": "full_sync"},
    {"ulysses": 2, "compile": "blocks"})), {"pipefusion": 2, "num_patches": 3, "warmup_steps": 9}]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference_inputs(comfyui, case, batch=1):
    """(latents, what is seen, texts) of a case."""
    config, (sizes, seen, texts) = comfyui.transformer_config(KIND), CASES[case]
    return ([drawn(batch, 16, *size, seed=seed) for seed, size in enumerate(sizes)],
            [drawn(batch, *size, config["siglip_feat_dim"], seed=seed + 10) for seed, size in enumerate(seen)],
            [drawn(batch, count, config["cap_feat_dim"], seed=seed + 20) for seed, count in enumerate(texts)])


def with_references(prompt, latents, seen, texts):
    """A prompt, as ComfyUI's node gives it with these."""
    more = ({"reference_latents": latents} if latents else {}) | (
        {"reference_latents_text_embeds": texts} if texts else {}) | ({"clip_vision_outputs": [
            SimpleNamespace(image_sizes=[(3, 16 * each.shape[1], 16 * each.shape[2])],
                            last_hidden_state=each.flatten(1, 2)) for each in seen]} if seen else {})
    return [[text, given | more] for text, given in prompt]


def requested(comfyui, case, seed=1, tokens=20):
    return with_references(comfyui.conditioning(KIND, seed, tokens), *reference_inputs(comfyui, case))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch", [1, 2])
def test_references_equal_comfyuis_own_module(comfyui, case, batch):
    """At odd sizes, of one image and two."""
    family, config = families()[KIND], comfyui.transformer_config(KIND)
    ours, native = comfyui.ours(KIND, comfyui.config("cpu")), comfyui.module(KIND)
    given = conditioning_of(family, config, torch.Generator().manual_seed(5), {"context": 9}, batch)
    given |= dict(zip(("ref_latents", "siglip_feats", "ref_contexts"), reference_inputs(comfyui, case, batch)))
    for size in ((12, 10), (7, 9), (3, 16)):
        x, t = drawn(batch, 16, *size), torch.linspace(0.4, 0.7, batch)
        with torch.inference_mode():
            result = ours.model.diffusion_model.forward(x, t, **given)
            # one after the other: ComfyUI fails of two, where there are more texts than references
            want, without = (torch.cat([native(x[i:i + 1], t[i:i + 1], num_tokens=9, **of(each, i))
                                        for i in range(batch)]) for each in (given, given | {"ref_latents": []}))

        close(result, want, EXACT, size)
        assert not CASES[case][0] or relative_error(want, without) > 100 * EXACT


def of(given, image):
    """What a call is given for one image."""
    own = slice(image, image + 1)
    return {name: value[own] if torch.is_tensor(value) else [each[own] for each in value]
            for name, value in given.items()}


@pytest.mark.parametrize("degrees", METHODS, ids=str)
def test_references_equal_native_ksampler(comfyui, degrees):
    """The negative prompt has others; and in a second run none."""
    ours, native = comfyui.ours(KIND, comfyui.config("cpu,cpu", **degrees)), comfyui.native(KIND)
    for negative, size in (("one", (13, 18)), (None, (6, 10))):
        arguments = {"positive": requested(comfyui, "two, one of them seen"), "latent": comfyui.latent(KIND, size=size),
                     "negative": requested(comfyui, negative, 2, 27) if negative else comfyui.conditioning(KIND, 2)}

        result = comfyui.sample(ours, KIND, **arguments)

        close(result, comfyui.sample(native, KIND, **arguments), EXACT, size)


def test_references_move_with_scale_rope(comfyui):
    """As the one that is drawn; what is seen of them does not."""
    arguments = {"positive": requested(comfyui, "one"), "latent": comfyui.latent(KIND, size=(9, 14)), "steps": 2}
    config = comfyui.config("cpu,cpu", pipefusion=2, num_patches=3, warmup_steps=9)

    result = comfyui.sample(scaled(comfyui.ours(KIND, config)), KIND, **arguments)

    want = comfyui.sample(scaled(comfyui.native(KIND)), KIND, **arguments)
    close(result, want, EXACT)
    assert relative_error(comfyui.sample(comfyui.native(KIND), KIND, **arguments), want) > 100 * EXACT


def test_stale_patches_with_references_equal_the_oracle(comfyui):
    arguments = {"positive": requested(comfyui, "one"), "negative": requested(comfyui, "without texts", 2)}

    result = comfyui.sample(staged(comfyui, KIND), KIND, **arguments)

    close(result, sample_oracle(comfyui, KIND, 4, 1, **arguments), STALE)


@pytest.mark.parametrize("change, words", [
    ({"reference_latents": [drawn(1, 16, 7, 6)]}, "takes references with even sides, and this latent has 7 x 6"),
    ({"clip_vision_outputs": [SimpleNamespace(image_sizes=[(3, 32, 32)], last_hidden_state=drawn(1, 4, 9))]},
     "has 9 features per patch of an image, and this Z-Image-Omni takes 40")], ids=["odd", "vision"])
def test_references_that_comfyui_fails_at_are_refused_with_their_size(comfyui, change, words):
    positive = requested(comfyui, "one")
    positive[0][1] |= change

    with pytest.raises(comfyui.errors.ConfigError, match=words):
        comfyui.sample(comfyui.ours(KIND, comfyui.config("cpu")), KIND, positive=positive, cfg=1.0)
