"""The demo model as a person uses it: pictures of what the prompt names, through ComfyUI's nodes."""

import pytest
import torch

from tests.support.tolerances import close, within
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.protocol.specs import MODES
from xdit_backend.tools.bench.quality import (
    DEMO,
    compare,
    draw_all,
    frechet_distance,
    load_recogniser,
    moments,
    settings,
)

NAMES = ("xdit_demo.safetensors", "xdit_demo_vae.safetensors")


class Demo:
    """Prompts to latents and pictures through the nodes."""

    def __init__(self, comfyui):
        self.comfyui = comfyui
        self.prompt = comfyui.nodes.NODE_CLASS_MAPPINGS["XDiTDemoPrompt"]
        self.vae = comfyui.nodes.VAELoader().load_vae(NAMES[1])[0]

    def conditioning(self, text):
        return self.prompt.execute(text).args[0]

    def latent(self, model, text, steps=20, **arguments):
        return self.comfyui.sample(model, "sd3", steps=steps, cfg=3.0, positive=self.conditioning(text),
                                   negative=self.conditioning(""), latent={"samples": torch.zeros(1, 16, 16, 16)},
                                   **arguments)

    def ours(self, devices="cpu,cpu", **degrees):
        return self.comfyui.load_model.execute(NAMES[0], "default", self.comfyui.config(devices, **degrees)).args[0]


@pytest.fixture(scope="module")
def demo(comfyui):
    return Demo(comfyui)


@pytest.fixture(scope="module")
def recogniser():
    return load_recogniser()


@pytest.mark.slow
def test_a_image_is_the_native_nodes_image(demo):
    model = demo.comfyui.nodes.UNETLoader().load_unet(NAMES[0], "default")[0]
    text = "red apple on a yellow background"

    native, ours = demo.latent(model, text), demo.latent(demo.ours(), text)

    close(ours, native, 2e-5)
    decoded = demo.comfyui.vae_decode.execute({"samples": ours}, demo.vae, demo.comfyui.config("cpu,cpu")).args[0]
    assert (decoded - demo.vae.decode(native)).abs().max() < 1 / 255


@pytest.mark.slow
def test_images_are_of_what_the_prompts_name(demo, recogniser):
    """As far as the small model goes: three quarters of them have their name among the recogniser's first five."""
    network, labels, prompts, _ = recogniser
    model = demo.ours()

    latents = torch.cat([demo.latent(model, prompt, seed=seed) for seed, prompt in enumerate(prompts[:16])])
    images = demo.vae.decode(latents).movedim(-1, 1) * 2 - 1

    with torch.no_grad():
        best = network(images)[1].topk(5).indices            # of some 1,900 names

    def num_named(wanted):
        return (best == wanted[:, None]).any(1).sum()

    assert num_named(labels[:16]) >= 10
    assert num_named(labels[:16].roll(1)) <= 2


@pytest.mark.slow
def test_previews_show_the_image(demo):
    """ComfyUI computes previews of SD3 latents by fixed factors;
    the demo's autoencoder is trained to agree with them."""
    import latent_preview
    from comfy.latent_formats import SD3
    latent = demo.latent(demo.ours(), "red heart on a white background")
    previewer = latent_preview.Latent2RGBPreviewer(SD3().latent_rgb_factors, SD3().latent_rgb_factors_bias)

    _, preview, _ = previewer.decode_latent_to_preview_image("JPEG", SD3().process_in(latent))

    shown = torch.tensor([[preview.getpixel((x, y)) for x in range(16)] for y in range(16)]) / 255
    image = torch.nn.functional.avg_pool2d(demo.vae.decode(latent).movedim(-1, 1), 8)[0].movedim(0, -1)
    within((shown - image).abs().mean(), 0.08)
    assert (shown.flip(0) - image).abs().mean() > 0.12       # upside down it is another picture


def test_a_long_prompt_is_refused(demo):
    with pytest.raises(ValueError, match="^Shorten the prompt: it has 30 words, and the demo model reads at most 24"):
        demo.conditioning("word " * 30)


@pytest.fixture(scope="module")
def drawn(recogniser):
    """Images of 4 prompts under four settings, by the bench's own functions."""
    class Options:
        steps, sampler, guidance, batch, patches, warmup_steps = 20, "euler", 3.0, 8, (4,), (1,)
        displaced, displaced_modes, extrapolation, exchange = (2,), tuple(MODES)[:1], (0.0,), ()
        device, model = "cpu", DEMO
    return draw_all(settings(Options), recogniser[2][:4], open_checkpoint(str(DEMO)).family, Options)


@pytest.mark.slow
def test_patches_that_never_meet_leave_seams_and_stale_ones_do_not(drawn, recogniser):
    network, labels, _, _ = recogniser

    def measured(name):
        return compare(drawn[name], drawn["one device"], 4, network, labels[:4])

    assert measured("naive patches, M=4")["seam"] > 1.5
    assert measured("M=4, W=1")["seam"] < 1.1 and measured("displaced, N=2, W=1")["seam"] < 1.1
    assert measured("M=4, W=1")["psnr"] > measured("naive patches, M=4")["psnr"] + 6
    one = moments(drawn["one device"], network)
    assert (frechet_distance(moments(drawn["M=4, W=1"], network), one)
            < 0.5 * frechet_distance(moments(drawn["naive patches, M=4"], network), one))
