"""Stable Cascade as MODELs: the latents of ComfyUI's own KSampler for both stages, one after the other and alone, with
ControlNets and pictures as prompts; what is refused."""

import pytest
import torch

from tests.support.tolerances import close, relative_error

TOLERANCE = 2e-5                           # relative, float32 on both sides
KINDS = "stable-cascade-c", "stable-cascade-b"
LAYOUTS = {"one": ("cpu", {}), "cfg2": ("cpu,cpu", {"cfg": 2}), "data2": ("cpu,cpu", {"data": 2}),
           "auto": ("cpu,cpu", {})}
# sampler, scheduler, size of each stage's latent, images
RUNS = [("euler_ancestral", "simple", {"stable-cascade-c": (16, 17), "stable-cascade-b": (24, 34)}, 1),
        ("dpmpp_2m", "karras", {"stable-cascade-c": (7, 11), "stable-cascade-b": (22, 26)}, 3)]


@pytest.mark.parametrize("kind, layout", [(kind, layout) for kind in KINDS for layout in LAYOUTS])
def test_latents_equal_native_ksampler(comfyui, kind, layout):
    devices, degrees = LAYOUTS[layout]
    model = comfyui.ours(kind, comfyui.config(devices, **degrees))
    for sampler, scheduler, sizes, batch in RUNS:
        arguments = {"sampler": sampler, "scheduler": scheduler, "steps": 2,
                     "latent": comfyui.latent(kind, batch, sizes[kind])}

        result = comfyui.sample(model, kind, **arguments)

        close(result, comfyui.sample(comfyui.native(kind), kind, **arguments), TOLERANCE, (sampler, sizes[kind]))


def test_a_file_as_it_is_published_has_comfyuis_tensors(comfyui):
    """With one matrix for queries, keys and values."""
    from comfy.supported_models import Stable_Cascade_C

    from xdit_backend.models import FAMILIES
    generator, place = torch.Generator().manual_seed(3), "down_blocks.0.2.attention.attn"
    tensors = {f"{place}.in_proj_weight": torch.randn(12, 4, generator=generator),
               f"{place}.out_proj.weight": torch.eye(4), f"{place}.in_proj_bias": torch.randn(12, generator=generator)}

    found = FAMILIES["Stable Cascade C"].detection.convert(dict(tensors), {})

    wanted = Stable_Cascade_C({}).process_unet_state_dict(dict(tensors))
    assert found.keys() == wanted.keys() and len(found) == 7
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def draw(comfyui, models, shift):
    """Both stages, by ComfyUI's nodes for them. Returns the latents."""
    from comfy_extras.nodes_model_advanced import ModelSamplingStableCascade
    from comfy_extras.nodes_stable_cascade import StableCascade_EmptyLatentImage, StableCascade_StageB_Conditioning
    empty = dict(zip(KINDS, StableCascade_EmptyLatentImage.execute(248, 184, 24, 2).args, strict=True))
    prior = {"samples": comfyui.sample(ModelSamplingStableCascade().patch(models[0], shift)[0], KINDS[0],
                                       latent=empty[KINDS[0]])}
    prompts = {}
    for seed, name in ((1, "positive"), (2, "negative")):
        prompts[name] = StableCascade_StageB_Conditioning.execute(comfyui.conditioning(KINDS[1], seed), prior).args[0]
    return prior["samples"], comfyui.sample(models[1], KINDS[1], latent=empty[KINDS[1]], **prompts)


def test_both_stages_one_after_the_other_equal_comfyuis(comfyui):
    """A shift of a node, a prior of two pictures."""
    config = comfyui.config("cpu,cpu", cfg=2)
    native = list(map(comfyui.native, KINDS))

    result = draw(comfyui, [comfyui.ours(kind, config) for kind in KINDS], 3.0)

    for ours, theirs, other in zip(result, draw(comfyui, native, 3.0), draw(comfyui, native, 2.0), strict=True):
        close(ours, theirs, TOLERANCE)
        assert relative_error(other, theirs) > 100 * TOLERANCE


def test_stage_b_without_a_prior_equals_native_ksampler(comfyui):
    prompts = {name: comfyui.conditioning(KINDS[1], seed) for seed, name in ((1, "positive"), (2, "negative"))}
    for prompt in prompts.values():
        del prompt[0][1]["stable_cascade_prior"]

    result = comfyui.sample(comfyui.ours(KINDS[1], comfyui.config("cpu,cpu")), KINDS[1], **prompts)

    close(result, comfyui.sample(comfyui.native(KINDS[1]), KINDS[1], **prompts), TOLERANCE)


class Control(torch.nn.Module):
    """In the place of a ControlNet of stage C: what it gives is of another size than the latent, and for some residual
    blocks alone."""

    xl, unshuffle_amount, input_channels = False, 8, 3

    def __init__(self, widths):
        super().__init__()
        self.widths = widths

    def forward(self, x):
        generator = torch.Generator().manual_seed(4)
        given = [None if number % 3 == 1 else torch.randn(len(x), width, 5, 4, generator=generator).to(x)
                 for number, width in enumerate(self.widths)]
        return {"input": given[::-1]}


def controlled(comfyui, widths, strength=0.8):
    import comfy.controlnet
    net = comfy.controlnet.T2IAdapter(Control(widths), 3, 1, "nearest-exact", device=torch.device("cpu"))
    return comfyui.nodes.ControlNetApplyAdvanced().apply_controlnet(
        comfyui.conditioning(KINDS[0], 1), comfyui.conditioning(KINDS[0], 2), net, torch.rand(1, 40, 32, 3), strength,
        0.0, 1.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_controlnet_equals_native_ksampler(comfyui, layout):
    kind, (devices, degrees) = KINDS[0], LAYOUTS[layout]
    positive, negative = controlled(comfyui, [128, 192, 192, 192, 192, 128])
    arguments = {"positive": positive, "negative": negative, "latent": comfyui.latent(kind, 2, (9, 12))}

    result = comfyui.sample(comfyui.ours(kind, comfyui.config(devices, **degrees)), kind, **arguments)

    wanted = comfyui.sample(comfyui.native(kind), kind, **arguments)
    close(result, wanted, TOLERANCE)
    assert relative_error(comfyui.sample(comfyui.native(kind), kind, latent=arguments["latent"]), wanted) > 0.01


def test_a_controlnet_of_another_width_is_refused(comfyui):
    positive, negative = controlled(comfyui, [192, 128, 192, 192, 192, 128])

    with pytest.raises(comfyui.errors.ConfigError, match="^Use a ControlNet that was made for Stable Cascade C"):
        comfyui.sample(comfyui.ours(KINDS[0], comfyui.config()), KINDS[0], positive=positive, negative=negative)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degrees", [{}, {"cfg": 2}], ids=str)
def test_weights_that_come_from_host_memory_equal_native_ksampler(comfyui, kind, degrees):
    """Blocks of stage B run several times in a step."""
    arguments = {"latent": comfyui.latent(kind, 2, (24, 22)), "steps": 2}
    model = comfyui.ours(kind, comfyui.config("cpu,cpu" if degrees else "cpu", mode="manual", weights_memory="0.007",
                                              **degrees))

    result = comfyui.sample(model, kind, **arguments)

    close(result, comfyui.sample(comfyui.native(kind), kind, **arguments), TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degree", ["ulysses", "ring", "pipefusion", "displaced", "tensor"])
def test_methods_that_share_out_a_image_are_refused_by_name(comfyui, kind, degree):
    with pytest.raises(comfyui.errors.ConfigError, match=rf"^Set {degree}_degree to 1, and use cfg_degree or data_degr"
                                                         r"ee: .* \(global response norm\)"):
        comfyui.ours(kind, comfyui.config("cpu,cpu", **{degree: 2}))


@pytest.mark.parametrize("node, given", [("PerturbedAttentionGuidance", {"scale": 2.0}),
                                         ("SelfAttentionGuidance", {"scale": 0.5, "blur_sigma": 2.0}),
                                         ("HyperTile", {"tile_size": 64}), ("NAGuidance", {})])
def test_what_comfyuis_model_does_not_heed_is_refused(comfyui, node, given):
    from tests.programs.model_nodes import inputs_of, model_nodes, run_node
    nodes = model_nodes(comfyui)
    defaults = {name: option[1]["default"] for name, option in inputs_of(nodes[node]).items()
                if len(option) > 1 and "default" in option[1]}
    model = run_node(nodes[node], {**defaults, "model": comfyui.ours(KINDS[0], comfyui.config()), **given})[0]

    with pytest.raises(comfyui.errors.UnsupportedError, match="Cascade C does not support"):
        comfyui.sample(model, KINDS[0], latent=comfyui.latent(KINDS[0], 1, (8, 8)))


def test_what_stage_b_cannot_draw_is_refused_with_what_to_do(comfyui):
    model, prompt = comfyui.ours(KINDS[1], comfyui.config()), comfyui.conditioning(KINDS[1], 1)
    for size in ((23, 24), (14, 24)):
        with pytest.raises(comfyui.errors.ConfigError, match="Use a width and a height that are multiples of 8 pixels"):
            comfyui.sample(model, KINDS[1], latent=comfyui.latent(KINDS[1], 1, size))
    prompt[0][1]["stable_cascade_prior"] = torch.zeros(1, 4, 6, 6)
    with pytest.raises(comfyui.errors.ConfigError, match="^Connect the latent that stage C generated"):
        comfyui.sample(model, KINDS[1], positive=prompt)
    net = controlled(comfyui, [32] * 9)[0][0][1]["control"]
    prompt = comfyui.conditioning(KINDS[1], 1)
    prompt[0][1]["control"], prompt[0][1]["control_apply_to_uncond"] = net, False
    with pytest.raises(comfyui.errors.UnsupportedError, match="^Remove Apply ControlNet: ComfyUI's Stable Cascade B"):
        comfyui.sample(model, KINDS[1], positive=prompt)
    prompt = comfyui.conditioning(KINDS[1], 1)
    prompt[0][1]["pooled_output"] = None
    with pytest.raises(comfyui.errors.ConfigError, match="^Encode the prompt with the CLIP of Stable Cascade"):
        comfyui.sample(model, KINDS[1], positive=prompt)
