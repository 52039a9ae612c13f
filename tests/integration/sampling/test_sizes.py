"""One evaluation of a model at many sizes equals ComfyUI's own module, whatever the file says of sizes."""

import pytest
import torch

from tests.support.model_zoo import takes
from tests.support.tiny_checkpoints import VARIANTS, families
from tests.support.tolerances import close
from xdit_backend.models.common.example_inputs import as_comfyui, conditioning_of, options_of

TOLERANCE = 2e-5                           # relative, float32; seen: up to 2e-6


# kind of checkpoint -> rows of the tables of positions that files are made with; None: as the class makes it
POSITIONS = {kind: {"sd3": (None, 96, 192), "pixart": (64, 32, 128, None)}.get(kind, (None,))
             for kind, family in families().items()
             if not family.plan.is_unet and (kind not in VARIANTS or kind in ("sd35", "chroma-radiance-x0"))}
LAYOUTS = {"one": ("cpu", {}), "ulysses2": ("cpu,cpu", {"ulysses": 2}), "ring2": ("cpu,cpu", {"ring": 2}),
           "pipefusion2": ("cpu,cpu", {"pipefusion": 2})}
ON_TWO = ("ulysses2", "ring2", "pipefusion2")  # workers; of every kind but one, one of these
SIDES = {"pixart": (34, 40, 48, 66, 98), "sd3": (3, 16, 25, 33, 48), "sd35": (3, 16, 25, 33, 48),
        "chroma-radiance": (12, 23, 61, 96, 150), "chroma-radiance-x0": (16, 32, 48, 64, 160),
        "z-image-pixel": (24, 46, 61, 96, 150), "pixeldit": (12, 23, 61, 96, 150), "pid": (12, 23, 61, 96, 150),
        "hidream-o1": (32, 64, 96, 160, 256),
        "wan": (2, 7, 12, 13, 16), "hunyuanvideo": (4, 8, 12, 16, 20), "ltx": (1, 3, 5, 8, 11)}
# ComfyUI's modules take no odd sides
EVEN = ("pixart", "pixart-alpha", "hunyuanvideo", "hunyuanvideo-i2v", "hunyuanvideo-skyreels", "wan-vace",
        "kandinsky-5", "kandinsky-5-image", "mochi", "cosmos-predict1", "wan-camera", "wan-humo", "wan-animate",
        "wan-s2v", "wan-fun-control", "seedvr2")
MULTIPLES = dict.fromkeys(EVEN, 2) | {"chroma-radiance-x0": 16, "hidream-o1": 32}
SHAPES = {"square": 1.0, "wide": 1.5, "tall": 0.6}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [None, 1, 2, 4])
def test_positions_of_pixart_are_comfyuis_to_the_bit(comfyui, scale, dtype):
    """Whole and by patches, at its own size and at others. The file's table says the scale, or it has none."""
    from comfy.ldm.pixart.pixartms import get_2d_sincos_pos_embed_torch

    from xdit_backend.models.pixart import _positions
    from xdit_backend.protocol.specs import Patch
    config = {"num_attention_heads": 16, "attention_head_dim": 72, "interpolation_scale": scale}
    for height, width in [(34, 36), (64, 64), (128, 128), (96, 160), (160, 96), (100, 32), (192, 192)]:
        latent = torch.zeros(1, 4, height, width, dtype=dtype)
        side = round((height + width) // 2 / 64)
        want = get_2d_sincos_pos_embed_torch(1152, h=height // 2, w=width // 2, pe_interpolation=scale or float(side),
                                             base_size=side * 64 // 2, dtype=dtype)

        assert torch.equal(_positions(latent, None, config)[0], want)
        assert torch.equal(_positions(latent[:, :, 8:20], Patch(2, 8, height), config)[0],
                           want[4 * (width // 2):10 * (width // 2)])


def cases(kind):
    """Latent sizes: five sides in three shapes; of a video each with another number of frames."""
    is_video = len(families()[kind].inputs.latent.patch) == 3 and families()[kind].testing.frames > 1
    for number, side in enumerate(SIDES.get(kind, SIDES.get(kind.partition("-")[0], (2, 7, 12, 16, 21)))):
        for shape in SHAPES.values():
            height, width = round(side / shape ** 0.5), round(side * shape ** 0.5)
            of = MULTIPLES.get(kind, 1)
            height, width = max(of, height // of * of), max(of, width // of * of)
            if kind == "wandancer":                            # whose frames ComfyUI's module parts in eight
                height, width = -(-height // 8) * 8 - 1, -(-width // 4) * 4 - 1
            if kind.startswith("pixart"):                      # nor smaller ones
                width = max(width, 66 - height)
            if len(families()[kind].inputs.latent.patch) == 1:
                yield height * width * (1 + number),
                continue
            if families()[kind].testing.rows is not None:
                yield families()[kind].testing.rows, height * width * (1 + number)
                continue
            first = kind == "wan-animate-2"                    # a reference image, before the video
            frames = (1 + number + first,) if is_video else (1,) * (len(families()[kind].inputs.latent.patch) - 2)
            yield *frames, height, width


def inputs(comfyui, kind, size, batch):
    family = families()[kind]
    channels = family.taken_channels(comfyui.transformer_config(kind))
    x = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(5))
    given = conditioning_of(family, comfyui.transformer_config(kind), torch.Generator().manual_seed(6), {"context": 20},
                            batch, size)
    given = as_comfyui(given, family) | ({"attention_mask": None} if family.name.startswith("LTX") else {})
    given.pop("face_pixel_values", None)                       # of 512 x 512 pixels, where nothing is thin
    given["transformer_options"] = options_of(family, given)
    if "num_tokens" in (*family.inputs.ignored, *family.inputs.conditioning):
        given["num_tokens"] = 20
    # as ComfyUI hands them over; workers get them as shapes
    given |= {name: len(given[name]) for name in family.inputs.counts if torch.is_tensor(given.get(name))}
    if "lyrics_strength" in given:                             # as ComfyUI hands it over
        given["lyrics_strength"] = 0.7
    if "frame_lasts" in given:
        given["fps"] = 30 / given.pop("frame_lasts")
    if family.name == "Mochi":                                 # whose module asks for it
        given["attention_mask"] = torch.ones(batch, 20, dtype=torch.long)
    times = torch.tensor([0.9, 0.3])[:batch] * family.inputs.time_scale
    if family.inputs.components.names:                                    # without sound, and with some of every length
        length = 3 * size[0] - 3 if kind.startswith("ltx") else size[0]
        shapes = family.inputs.components.shapes(comfyui.transformer_config(kind), x.shape, length)
        shape = shapes.get(*family.inputs.components.names)
        length = length or shape is not None and "audio" not in family.inputs.components.names
        beside = [torch.randn(shape, generator=torch.Generator().manual_seed(8))] if length else []
        x = [family.inputs.components.first(x), *beside]
        times = (times, 0.8 * times) if kind.startswith("ltx") else times
    return x, times, given


def check(comfyui, kind, layout, positions, sizes):
    options = {} if positions is None else {"positions": positions}
    devices, degrees = LAYOUTS[layout]
    model = comfyui.ours(kind, comfyui.config(devices, **degrees), **options).model
    ours, native = model.diffusion_model, comfyui.module(kind, **options)
    for number, size in enumerate(sizes):
        # one alone is what MiniMax H3's module takes; Hunyuan3D 2.1's takes two for one's branches of guidance
        alone = kind in ("minimax-h3", "hunyuan3d-2.1")
        x, t, given = inputs(comfyui, kind, size, batch=2 if number == 0 and not alone else 1)
        with torch.inference_mode():
            result, want = ours.forward(x, t, **given), native(x, t, **given)
        model.remote.end_run()                                 # of a schedule that was handed on

        close(result, want, TOLERANCE, size)


HEADERS = [pytest.param(kind, positions, id=f"{kind}-{positions}")
           for kind, tables in POSITIONS.items() for positions in tables]


@pytest.mark.slow
@pytest.mark.parametrize("kind, positions", HEADERS)
def test_every_size_equals_comfyuis_own_module(comfyui, kind, positions):
    sizes = list(cases(kind))
    every = positions == POSITIONS[kind][0] and kind != "pixart-alpha"         # which has Sigma's positions
    # each side and each shape is among them
    check(comfyui, kind, "one", positions, sizes[::2] if every else sizes[::3])


@pytest.mark.slow
@pytest.mark.parametrize("kind, layout", [
    (kind, layout) for number, kind in enumerate(POSITIONS) for layout in ON_TWO
    if layout == (allowed := [each for each in ON_TWO if takes(families()[kind], LAYOUTS[each][1])])[
        number % len(ON_TWO) % len(allowed)] or kind == "sd3"])
def test_sizes_equal_comfyuis_own_module_on_two_workers(comfyui, kind, layout):
    check(comfyui, kind, layout, POSITIONS[kind][0], list(cases(kind))[3:6])


@pytest.mark.parametrize("kind, size, words", [
    ("sd3", (130, 16), "^Use a smaller latent: .* has positions for 1024 x 1024 pixels, and the latent has 128 x 1040"),
    ("cosmos-predict1", (2, 4, 242),
     "has positions for 1017 frames of 1920 x 1920 pixels, and the latent has 9 frames of 1936 x 32 pixels")])
def test_a_latent_larger_than_the_table_of_positions_is_refused(comfyui, kind, size, words):
    ours = comfyui.ours(kind, comfyui.config("cpu")).model.diffusion_model
    given = conditioning_of(families()[kind], comfyui.transformer_config(kind), torch.Generator(), {"context": 20})

    with pytest.raises(comfyui.errors.ConfigError, match=words):
        ours.forward(torch.zeros(1, 16, *size), torch.tensor([500.0]), **given)


def test_parallel_sampler_rejects_such_a_latent_before_it_shows_or_starts_anything(comfyui, said):
    """The node showed the speed to expect, and then failed in the workers."""
    model, devices = comfyui.ours("sd3", comfyui.config("cpu,cpu,cpu")), ("cpu",) * 3
    text = comfyui.conditioning("sd3", 1)
    before = comfyui.groups.client_if(devices)                 # of an earlier test

    with pytest.raises(comfyui.errors.ConfigError, match="^Use a smaller latent: .* the latent has 128 x 1040"):
        comfyui.parallel_sampler.execute(
            model=model, seed=1, steps=2, cfg=4.0, sampler_name="euler", scheduler="simple", positive=text,
            negative=text, latent_image={"samples": torch.zeros(1, 16, 130, 16)}, denoise=1.0)

    assert said == [] and comfyui.groups.client_if(devices) is before


@pytest.mark.parametrize("given", [{"guidance": None}, {"y": torch.linspace(-1, 1, 50)[None]}, {"y": None}],
                         ids=["guidance", "wide", "y"])
def test_flux_without_guidance_or_with_other_pooled_text_equals_comfyuis_own_module(comfyui, given):
    family, config = families()["flux"], comfyui.transformer_config("flux")
    given = conditioning_of(family, config, torch.Generator().manual_seed(5), {"context": 20}) | given
    x, t = torch.randn(1, 16, 12, 10, generator=torch.Generator().manual_seed(6)), torch.tensor([0.6])

    with torch.inference_mode():
        result = comfyui.ours("flux", comfyui.config("cpu")).model.diffusion_model.forward(x, t, **given)
        want = comfyui.module("flux")(x, t, **given)

    close(result, want, TOLERANCE)


@pytest.mark.parametrize("kind, size", [
    ("chroma-radiance-x0", (40, 64)), ("hunyuanvideo", (1, 6, 7)), ("pixart", (35, 40)), ("pixart", (30, 34)),
    ("cosmos-predict1", (2, 6, 7))])
def test_sizes_that_comfyuis_module_fails_at_are_refused(comfyui, kind, size):
    family, config = families()[kind], comfyui.transformer_config(kind)
    given = conditioning_of(family, config, torch.Generator(), {"context": 20})

    with pytest.raises(comfyui.errors.ConfigError, match="multiples of 16"):
        comfyui.ours(kind, comfyui.config("cpu")).model.diffusion_model.forward(
            torch.zeros(1, family.num_channels(config), *size), torch.tensor([500.0]), **given)
    with pytest.raises((RuntimeError, ZeroDivisionError, AssertionError)):
        comfyui.module(kind)(torch.zeros(1, family.num_channels(config), *size), torch.tensor([500.0]), **given)


def test_sizes_that_comfyuis_module_answers_with_others_are_refused(comfyui):
    """Kandinsky 5's pads to whole patches and does not cut what it padded, so that a sampler fails."""
    kind, family = "kandinsky-5-image", families()["kandinsky-5-image"]
    given, t = conditioning_of(family, comfyui.transformer_config(kind), torch.Generator(),
                               {"context": 20}), torch.tensor([500.0])
    odd = torch.zeros(1, 16, 6, 7)

    with pytest.raises(comfyui.errors.ConfigError, match="multiples of 16"):
        comfyui.ours(kind, comfyui.config("cpu")).model.diffusion_model.forward(odd, t, **given)
    assert comfyui.module(kind)(odd, t, **given).shape == (1, 16, 6, 8)
