"""Weights held in a smaller type than a model computes in give what ComfyUI's own loader gives, and are held so,
all of them."""

import inspect
import math

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_map

from tests.support.model_zoo import example
from tests.support.tiers import FEW_FAMILIES
from tests.support.tiny_checkpoints import VARIANTS, families
from tests.support.tolerances import close, relative_error, within
from xdit_backend.checkpoints.build_transformer import build
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.checkpoints.weight_table import weight_table
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.mesh import SINGLE
from xdit_backend.hooks.install import install_hooks
from xdit_backend.models import FAMILIES
from xdit_backend.models.common.example_inputs import as_comfyui, conditioning_of, options_of
from xdit_backend.protocol.specs import ModelSpec
from xdit_backend.worker.models import Loaded

CPU = torch.device("cpu")
# whose classes in ComfyUI compute in the type of their weights, whatever ComfyUI asks for, and fail with plain fp8
AS_WEIGHTS_ARE = "hunyuan3d-2.1", "z-image-pixel", "triposplat"
AUDIO_LENGTH = 5                                                     # of a latent of two parts


def requested(family, config):
    generator = torch.Generator().manual_seed(3)
    sides = (8, 9) if family.inputs.latent.patch[-1] == 1 else (48, 32) if config.get("_x0") else (34, 36)
    if family.name == "WanDancer":                             # of whose frames ComfyUI's module makes eight parts
        sides = 32, 36
    if family.name == "HiDream-O1":                            # which takes whole tokens
        sides = 64, 96
    size = (family.testing.frames, *sides)[-len(family.inputs.latent.patch):]
    size = size if family.testing.rows is None else (family.testing.rows, sides[1])
    latent = torch.randn(1, family.taken_channels(config), *size, generator=generator)
    conditioning = conditioning_of(family, config, generator, {"context": 12}, size=size)
    if "face_pixel_values" in conditioning:                    # one image, of the size that its network is made for
        conditioning["face_pixel_values"] = torch.randn(1, 3, 1, 512, 512, generator=generator)
    return latent, torch.tensor([0.613 * family.inputs.time_scale]), conditioning


def rounded(conditioning, dtype):
    return tree_map(lambda value: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value,
                    conditioning)


def rounded_file(path, folder):
    """The file's weights in float32, rounded to bfloat16."""
    save_file(rounded(rounded(load_file(path), torch.bfloat16), torch.float32), folder / path.name)
    return folder / path.name


def ours(path, family, storage, compute="float32", quantisation=""):
    """One prediction of our model, as a worker computes it; its weights must take the bytes that are planned."""
    spec, dtype = open_checkpoint(path).spec(storage, compute, quantisation=quantisation), getattr(torch, compute)
    transformer = load_transformer(spec, CPU)
    model, config = transformer.model, transformer.config
    assert sum(t.numel() * t.element_size()
               for t in (*model.parameters(), *model.buffers())) == weight_table(model, family, spec).resident_bytes
    loaded = Loaded(transformer, install_hooks(model, family.plan), dtype, range(0))
    latent, timestep, conditioning = requested(family, config)
    conditioning = rounded(conditioning, dtype)
    if family.inputs.components.names:
        latents = [family.inputs.components.first(latent), audio(family, config, latent).to(dtype)]
        conditioning |= family.inputs.components.split(latents, timestep, config, {})[2]
    output, _ = loaded.hooks.run(loaded.context(SINGLE, Traffic(), latent.to(dtype), timestep, conditioning))
    return family.inputs.components.first(family.prediction(output, latent)).float()


def audio(family, config, latent):
    """The second part of a latent."""
    shape = family.inputs.components.shapes(config, latent.shape, AUDIO_LENGTH)[family.inputs.components.names[0]]
    return torch.linspace(-1, 1, math.prod(shape)).view(shape)


def native(path, family, storage, compute="float32"):
    """The same of ComfyUI's own loader, which computes in float32 on a CPU unless told otherwise."""
    return native_prediction(native_model(path, storage, compute), path, family, compute)


def native_model(path, storage, compute="float32"):
    """ComfyUI's model of a file. storage: None for a quantised file's."""
    import comfy.model_management
    import comfy.sd
    dtype = getattr(torch, compute)
    with pytest.MonkeyPatch.context() as patch:
        if compute == storage:
            patch.setattr(comfy.model_management, "unet_manual_cast", lambda *args, **options: None)
        options = {} if storage is None else {"dtype": getattr(torch, storage)}            # None: a quantised file's
        model = comfy.sd.load_diffusion_model(str(path), model_options=options).model
    assert (model.manual_cast_dtype or model.get_dtype()) == dtype
    if "MiniMax" in type(model).__name__:                      # whose kernel fails with norms in 8 bits
        for name, parameter in model.diffusion_model.named_parameters():
            parameter.data = parameter.data.to(dtype) if name.endswith("_norm.weight") else parameter.data
    return model


def native_prediction(model, path, family, compute="float32", changed=lambda latent: latent):
    """One prediction of ComfyUI's model of a file. changed(latent): what it is given instead."""
    dtype = getattr(torch, compute)
    config = family.detection.config(open_checkpoint(path).shapes)
    latent, timestep, conditioning = requested(family, config)
    latent = changed(latent)
    lengths = {"num_tokens": 12} if "num_tokens" in (*family.inputs.ignored, *family.inputs.conditioning) else {}
    if family.name in ("LTX-Video", "LTX-2", "Mochi"):         # whose models cannot do without
        lengths["attention_mask"] = torch.ones(1, 12, dtype=torch.long) if family.name == "Mochi" else None
    given = as_comfyui(rounded(conditioning, dtype), family)
    given |= {name: given[name].shape[0] for name in family.inputs.counts if name in given} | lengths
    if "frame_lasts" in given:                                 # which is how ComfyUI says it
        given["fps"] = 30 / given.pop("frame_lasts")
    given["transformer_options"] = options_of(family, given)
    if family.inputs.components.names:
        latents = [family.inputs.components.first(latent).to(dtype), audio(family, config, latent).to(dtype)]
        times = timestep if family.name in ("MiniMax H3", "TripoSplat") else (timestep, timestep)
        return model.diffusion_model(latents, times, **given)[0].float()
    return model.diffusion_model(latent.to(dtype), timestep, **given).float()


@pytest.mark.parametrize("kind, storage", [
    *((kind, "bfloat16") for kind in families() if kind in FEW_FAMILIES or kind in AS_WEIGHTS_ARE),
    # of the others in bfloat16: the test below
    *((kind, "float8_e4m3fn") if kind in FEW_FAMILIES else pytest.param(kind, "float8_e4m3fn", marks=pytest.mark.slow)
      # of the last ComfyUI itself makes no model in 8 bits, since torch draws no embedding in them
      for kind in families() if kind not in (*AS_WEIGHTS_ARE, "sd-x4-upscaler"))])
def test_weights_cast_at_use_equal_comfyuis(file_of, kind, storage):
    """Arithmetic in float32 on both sides, so nothing but the weights is rounded."""
    family = families()[kind]
    with torch.inference_mode():
        result, want = ours(file_of(kind), family, storage), native(file_of(kind), family, storage)
        exact = ours(file_of(kind), family, "float32")

    close(result, want, 1e-4)
    assert relative_error(want, exact) > 1e-3


@pytest.mark.parametrize("kind", [kind if kind in ("sd3", "wan") else pytest.param(kind, marks=pytest.mark.slow)
                                  for kind in families()
                                  if kind not in VARIANTS])
def test_arithmetic_in_half_precision_is_as_exact_as_comfyuis(file_of, tmp_path, kind):
    """Of weights rounded alike, not much farther from float32 than ComfyUI's own model: half precision of CPUs
    differs by machine, and what it computes in float32 is not rounded here."""
    family, path = families()[kind], file_of(kind)
    with torch.inference_mode():
        result, want = ours(path, family, "bfloat16", "bfloat16"), native(path, family, "bfloat16", "bfloat16")
        exact = (native(path, family, "bfloat16") if kind not in AS_WEIGHTS_ARE
                 else native(rounded_file(path, tmp_path), family, "float32"))

    assert relative_error(want, exact) > 1e-3
    within(relative_error(result, exact) / relative_error(want, exact), 1.5)


@pytest.mark.parametrize("name", ["DiT", "Latte"])
def test_positions_that_no_file_holds_are_not_rounded_as_weights(tmp_path, name):
    """Of a latent of the size that they were made for: there the table is added as it is held.
    Beside weights that were rounded before."""
    one = example(name, torch.float32, rows=8, columns=8)
    tables = {key for key, _ in one.model.named_buffers()}
    for parameter in one.model.parameters():
        parameter.copy_(parameter.to(torch.float8_e4m3fn))
    one.model.save_pretrained(tmp_path / "transformer")
    header = open_checkpoint(tmp_path)
    spec = header.spec("float8_e4m3fn", "float32")

    loaded = load_transformer(spec, CPU)
    held = dict(loaded.model.named_parameters())
    with torch.inference_mode():
        want, one.model = one.run(), loaded.model
        within((one.run() - want).abs().max(), 1e-5)

    assert {tensor.dtype for tensor in held.values()} == {torch.float8_e4m3fn} and len(tables) > 0
    assert {tensor.dtype for key, tensor in loaded.model.named_buffers() if key in tables} == {torch.float32}


@pytest.mark.parametrize("name, config, tables", [
    ("Flux.1", {"guidance_embeds": True}, 0),
    ("SD3", {"num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
             "qk_norm": "rms_norm"}, 192 * 192 * 2432),
    ("Wan", {}, 1024 * 128 * 4 * 2 + 5120 * (16 * 4 + 1))], ids=["flux-dev", "sd3.5-large", "wan-14b"])
def test_a_published_model_in_float8_takes_a_byte_a_parameter(name, config, tables):
    """Beside: SD3's table of positions; Wan's rotary tables in float32, and its patch embedding,
    which ComfyUI does not round."""
    family = FAMILIES[name]
    with torch.device("meta"):
        model = build(family, {**defaults(family), **config})
    spec = ModelSpec("model", name, "file", "float8_e4m3fn", "bfloat16")
    blocks = [block for list_ in family.blocks for block in model.get_submodule(list_.name)]

    table = weight_table(model, family, spec)
    assert table.resident_bytes == sum(parameter.numel() for parameter in model.parameters()) + tables
    assert table.block_bytes == tuple(sum(parameter.numel() for parameter in block.parameters()) for block in blocks)


def defaults(family):
    parameters = inspect.signature(getattr(diffusers, family.transformer).__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name != "self"}
