"""A VAE of ComfyUI's becomes diffusers' AutoencoderKL with the same pictures, offline, with or without encoder."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL

from tests.support.comfyui_server import comfyui_folder
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import MINIMAX_DECODER
from tests.support.tolerances import close
from xdit_backend.autoencoders import FAMILIES
from xdit_backend.autoencoders.hunyuan_video import FrameCache
from xdit_backend.autoencoders.kl import kl_config
from xdit_backend.autoencoders.vae_family import replaced
from xdit_backend.checkpoints.build_vae import load_autoencoder
from xdit_backend.parallel.vae_rows import decode_rows, encode_rows
from xdit_backend.protocol.errors import CheckpointError

# Runs in a process of its own: ComfyUI's modules have names that are in the way of ours.
MADE_BY_COMFYUI = """
import sys, torch, tiny_checkpoints
tiny_checkpoints.import_comfyui(sys.argv[1])
import comfy.ldm.hunyuan_video.vae, comfy.ldm.hunyuan_video.vae_refiner
import comfy.ldm.models.autoencoder, comfy.ldm.modules.temporal_ae
import comfy.ldm.genmo.vae.model, comfy.ldm.minimax.vae
import comfy.ldm.wan.vae, comfy.ldm.wan.vae2_2, comfy.ldm.cogvideo.vae
import comfy.ldm.lightricks.vae.causal_video_autoencoder, comfy.taesd.taesd, comfy.taesd.taehv

AutoencoderKL = comfy.ldm.models.autoencoder.AutoencoderKL
config = dict(double_z=True, z_channels=4, resolution=256, in_channels=3, out_ch=3, ch=128, ch_mult=[1, 2, 4, 4],
              num_res_blocks=2, attn_resolutions=[], dropout=0.0)

def engine(config):
    return comfy.ldm.models.autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": config},
        decoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Decoder", "params": config})

def ltx(kind):
    vae = tiny_checkpoints.autoencoder(kind)
    vae.decode_noise_scale = 0                                 # the host's part
    return vae

def hunyuan():
    widths = {"ch": 32, "ch_mult": [1, 1, 2, 2], "num_res_blocks": 1, "z_channels": 16, "conv3d": True,
              "time_compress": 4}
    return AutoencoderKL(ddconfig={**config, **widths}, embed_dim=16)

def cogvideox():
    return comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX(block_out_channels=(32, 64, 64, 64), layers_per_block=1)

small = {**config, "ch": 32, "ch_mult": [1, 2, 3], "num_res_blocks": 1}
wan = dict(dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True],
           dropout=0.0)
# kind -> VAE, shape of a latent, shape of a picture
tiny = {
    "sd": (AutoencoderKL(ddconfig=small, embed_dim=4), (2, 4, 6, 5), (2, 3, 24, 20)),
    "flux": (engine({**small, "z_channels": 16}), (2, 16, 6, 5), (2, 3, 24, 20)),
    "wan": (comfy.ldm.wan.vae.WanVAE(dim=8, z_dim=16, **wan), (1, 16, 4, 3, 5), (1, 3, 9, 24, 40)),
    "wan, one frame": (comfy.ldm.wan.vae.WanVAE(dim=8, z_dim=16, **wan), (2, 16, 1, 3, 5), (2, 3, 1, 24, 40)),
    "wan with alpha": (comfy.ldm.wan.vae.WanVAE(dim=8, z_dim=16, image_channels=4, conv_out_channels=4, **wan),
                       (1, 16, 1, 3, 5), (1, 4, 1, 24, 40)),
    "wan 2.2": (comfy.ldm.wan.vae2_2.WanVAE(dim=8, dec_dim=16, z_dim=48, **wan), (1, 48, 3, 2, 3), (1, 3, 9, 32, 48)),
    "ltx": (ltx("vae-ltx"), (2, 128, 3, 2, 3), (2, 3, 17, 64, 96)),
    "ltx 0.9.5": (ltx("vae-ltx095"), (1, 128, 3, 2, 3), (1, 3, 17, 64, 96)),
    "ltx 2": (ltx("vae-ltx2"), (1, 128, 3, 2, 3), (1, 3, 17, 64, 96)),
    # In pieces of 1 + 8 frames (encoder) and of 2 latent frames (decoder), the last of which are not full
    "hunyuan": (hunyuan(), (1, 16, 5, 2, 3), (1, 3, 15, 16, 24)),
    "hunyuan, one frame": (hunyuan(), (2, 16, 1, 2, 3), (2, 3, 3, 16, 24)),
    "hunyuan image": (tiny_checkpoints.autoencoder("vae-hunyuanimage"), (2, 64, 3, 5), (2, 3, 64, 96)),
    # In pieces of 1 + 8 frames and of 2 latent frames too, the last of which are not full
    "hunyuan 1.5": (tiny_checkpoints.autoencoder("vae-hunyuan15"), (1, 32, 5, 2, 3), (1, 3, 15, 32, 48)),
    "hunyuan 1.5, one frame": (tiny_checkpoints.autoencoder("vae-hunyuan15"), (2, 32, 1, 3, 2), (2, 3, 4, 48, 32)),
    "mochi": (tiny_checkpoints.autoencoder("vae-mochi"), (1, 12, 3, 2, 3), (1, 3, 15, 16, 24)),
    "mochi, one frame": (tiny_checkpoints.autoencoder("vae-mochi"), (2, 12, 1, 3, 2), (2, 3, 1, 24, 16)),
    "cogvideox": (cogvideox(), (2, 16, 3, 2, 3), (1, 3, 13, 16, 24)),
    "cogvideox, even": (cogvideox(), (1, 16, 4, 2, 3), (1, 3, 8, 16, 24)),
    "cogvideox, one frame more": (cogvideox(), (1, 16, 2, 3, 2), (1, 3, 17, 16, 24)),
    "cogvideox, one frame": (cogvideox(), (1, 16, 1, 2, 3), (1, 3, 1, 16, 24)),
    "cosmos": (tiny_checkpoints.autoencoder("vae-cosmos"), (1, 16, 3, 2, 3), (1, 3, 17, 24, 16)),
    "cosmos, other frames": (tiny_checkpoints.autoencoder("vae-cosmos"), (2, 16, 2, 3, 1), (1, 3, 14, 16, 24)),
    "cosmos, one frame": (tiny_checkpoints.autoencoder("vae-cosmos"), (1, 16, 1, 2, 3), (2, 3, 1, 16, 24)),
    "svd": (tiny_checkpoints.autoencoder("vae-svd"), (3, 4, 3, 2), (2, 3, 24, 16)),
    "taesd": (comfy.taesd.taesd.TAESD(latent_channels=16), (2, 16, 3, 5), (2, 3, 24, 40)),
    "taef2": (comfy.taesd.taesd.TAESD(latent_channels=128), (2, 128, 3, 2), (2, 3, 48, 32)),
    "taehv": (comfy.taesd.taehv.TAEHV(latent_channels=16), (1, 16, 3, 2, 3), (1, 3, 7, 16, 24)),
    "minimax": (tiny_checkpoints.autoencoder("vae-minimax"), (1, 24, 7, 5, 4), (1, 3, 18, 32, 80)),
    "minimax, one frame": (tiny_checkpoints.autoencoder("vae-minimax"), (2, 24, 1, 7, 6), (2, 3, 1, 96, 48)),
    "taehv, of LTX-2": (comfy.taesd.taehv.TAEHV(latent_channels=128), (1, 128, 2, 2, 1), (1, 3, 9, 64, 32)),
}
for kind, (vae, latent_shape, picture_shape) in tiny.items():
    with torch.no_grad():
        if kind.startswith("minimax"):                         # which has tables that are in no file
            vae.eval().load_state_dict(tiny_checkpoints.state_dict("vae-minimax"))
        else:
            tiny_checkpoints.fill(vae.eval(), torch.Generator().manual_seed(0))
        if kind in ("taesd", "taef2"):                         # the host's part
            vae.vae_scale.fill_(1), vae.vae_shift.zero_()
        if kind.startswith("ltx"):
            vae.per_channel_statistics.get_buffer("std-of-means").fill_(1)
            vae.per_channel_statistics.get_buffer("mean-of-means").zero_()
        if kind.startswith("cosmos"):
            vae.latent_mean.zero_(), vae.latent_std.fill_(1)
            vae.sigma_data = 1
        latent = torch.randn(latent_shape, generator=torch.Generator().manual_seed(1))
        picture = torch.randn(picture_shape, generator=torch.Generator().manual_seed(2))
        tiny[kind] = vae.state_dict(), latent, vae.decode(latent), picture, vae.encode(picture)

others = {
    "Flux.2": lambda: AutoencoderKL(ddconfig={**config, "z_channels": 32, "batch_norm_latent": True}, embed_dim=32),
    "HunyuanImage's refiner": lambda: torch.nn.ModuleDict({"decoder": comfy.ldm.hunyuan_video.vae_refiner.Decoder(
        z_channels=32, out_channels=3, block_out_channels=[128, 256, 512, 1024, 1024], num_res_blocks=2,
        ffactor_spatial=16, ffactor_temporal=4, refiner_vae=False)}),
    "LTX 0.9.1": lambda: comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE(version=1),
}
refiner = {"block_out_channels": [128, 256, 512, 1024, 1024], "in_channels": 3, "out_channels": 3, "num_res_blocks": 2,
           "ffactor_spatial": 16, "ffactor_temporal": 4, "z_channels": 32}
published = {
    "Stable Video Diffusion": lambda: comfy.ldm.models.autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": config},
        decoder_config={"target": "comfy.ldm.modules.temporal_ae.VideoDecoder",
                        "params": {**config, "video_kernel_size": [3, 1, 1], "alpha": 0.0}}),
    "HunyuanVideo 1.5": lambda: torch.nn.ModuleDict({half.__name__.lower(): half(**refiner) for half in (
        comfy.ldm.hunyuan_video.vae_refiner.Encoder, comfy.ldm.hunyuan_video.vae_refiner.Decoder)}),
    "Mochi": lambda: comfy.ldm.genmo.vae.model.VideoVAE(),
    "MiniMax H3": lambda: comfy.ldm.minimax.vae.MiniMaxH3VideoVAE(),
    "LTX-2": lambda: comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE(config={
        **tiny_checkpoints.LTX, "encoder_base_channels": 128, "decoder_base_channels": 128,
        "encoder_blocks": [
            ["res_x", {"num_layers": 4}], ["compress_space_res", {"multiplier": 2}], ["res_x", {"num_layers": 6}],
            ["compress_time_res", {"multiplier": 2}], ["res_x", {"num_layers": 6}],
            ["compress_all_res", {"multiplier": 2}], ["res_x", {"num_layers": 2}],
            ["compress_all_res", {"multiplier": 2}], ["res_x", {"num_layers": 2}]],
        "decoder_blocks": [["res_x", {"num_layers": 5}], *[["compress_all", {"residual": True, "multiplier": 2}],
                                                           ["res_x", {"num_layers": 5}]] * 3]}),
}
shapes_of = lambda vae: {name: tuple(tensor.shape) for name, tensor in vae.state_dict().items()}
with torch.device("meta"):
    full_size = shapes_of(AutoencoderKL(ddconfig=config, embed_dim=4))
    others, published = ({name: shapes_of(make()) for name, make in each.items()} for each in (others, published))
torch.save((tiny, full_size, others, published), sys.argv[2])
"""


@pytest.fixture(scope="module")
def made_by_comfyui(tmp_path_factory):
    if comfyui_folder() is None:
        pytest.skip("there is no ComfyUI; set XDIT_COMFYUI to its folder")
    path = tmp_path_factory.mktemp("vae") / "made.pt"
    tests = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", MADE_BY_COMFYUI, comfyui_folder(), path], cwd=tests / "support", check=True)
    return torch.load(path)


@pytest.fixture
def tensors(made_by_comfyui):
    return {name: tensor.clone() for name, tensor in made_by_comfyui[0]["sd"][0].items()}


DECODED_WITH = tuple({prefix for family in FAMILIES.values() for prefix in family.decoder})
ENCODED_WITH = tuple({prefix for family in FAMILIES.values() for prefix in family.encoder})
KINDS = ["sd", "flux", "wan", "wan, one frame", "wan with alpha", "wan 2.2", "ltx", "ltx 0.9.5", "ltx 2", "taesd",
         "taef2", "taehv", "taehv, of LTX-2", "minimax", "minimax, one frame",
         "svd",
         "hunyuan", "hunyuan, one frame", "hunyuan image", "hunyuan 1.5", "hunyuan 1.5, one frame", "mochi",
         "mochi, one frame", "cosmos", "cosmos, other frames", "cosmos, one frame",
         "cogvideox", "cogvideox, even", "cogvideox, one frame more", "cogvideox, one frame"]
TOLERANCE = 1e-4
# what the tensors do not tell
SETTINGS = {"minimax": {"tile_size": "64", "tile_overlap_min": "16",
                        **{name: str(value) for name, value in MINIMAX_DECODER.items()}}}


def loaded(kind, tensors):
    return load_autoencoder(tensors, torch.float32, "cpu", SETTINGS.get(kind.partition(",")[0], {}))


def half(tensors, prefixes):
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}


def whole(tensors):
    return half(tensors, DECODED_WITH + ENCODED_WITH)


@pytest.mark.parametrize("prefixes", [DECODED_WITH + ENCODED_WITH, DECODED_WITH], ids=["whole", "decoder only"])
@pytest.mark.parametrize("kind", by_default(("sd", "wan", "hunyuan"), KINDS))
def test_decodes_as_comfyui_does(made_by_comfyui, kind, prefixes):
    tensors, latent, pixels, _, _ = made_by_comfyui[0][kind]

    vae = loaded(kind, half(tensors, prefixes))

    if kind == "svd":                                          # the batch is a video
        latent, pixels = latent.movedim(0, 1)[None], pixels.movedim(0, 1)[None]
    result = decode_rows(vae, latent).tensor
    if kind.startswith("wan"):                                 # diffusers clamps here, ComfyUI later
        pixels = pixels.clamp(-1, 1)
    assert result.shape == pixels.shape and pixels.std() > 0.05
    close(result, pixels, TOLERANCE)
    assert all(not tensor.is_meta for tensor in [*vae.parameters(), *vae.buffers()])


@pytest.mark.parametrize("prefixes", [DECODED_WITH + ENCODED_WITH, ENCODED_WITH], ids=["whole", "encoder only"])
@pytest.mark.parametrize("kind", KINDS)
def test_encodes_as_comfyui_does(made_by_comfyui, kind, prefixes):
    tensors, _, _, pixels, latent = made_by_comfyui[0][kind]

    vae = loaded(kind, half(tensors, prefixes))

    result = encode_rows(vae, pixels, pixels.shape[-1] // latent.shape[-1]).tensor
    assert result.shape == latent.shape and latent.std() > 0.05
    close(result, latent, TOLERANCE)


def test_the_comparison_notices_one_wrong_tensor(made_by_comfyui):
    tensors, latent_BCHW, image, _, _ = made_by_comfyui[0]["sd"]
    query, key = "decoder.mid.attn_1.q.weight", "decoder.mid.attn_1.k.weight"

    vae = load_autoencoder({**tensors, query: tensors[key], key: tensors[query].flip(0)}, torch.float32, "cpu")

    with torch.no_grad():
        assert (vae.decode(latent_BCHW).sample - image).abs().max() > 1e-3 * image.abs().max()


def masked(owner, replaced=replaced, **functions):
    """With diffusers' mask, by which a frame sees those before it alone."""
    return nullcontext() if "prepare_causal_attention_mask" in functions else replaced(owner, **functions)


def everything_kept(module, args, kwargs, output):
    return output


@pytest.mark.parametrize("kind, way, name, mutant", [
    ("hunyuan", "decode", "hunyuan_video.LATENT_FRAMES", 4),
    ("hunyuan", "decode", "hunyuan_video.FrameCache.next_chunk", FrameCache.forget),
    ("hunyuan", "decode", "hunyuan_video.replaced", masked),
    ("hunyuan", "encode", "hunyuan_video.FRAMES", 4),
    ("hunyuan", "encode", "hunyuan_video.replaced", masked),
    ("hunyuan 1.5", "decode", "hunyuan_video.FrameCache.next_chunk", FrameCache.forget),
    ("hunyuan 1.5", "decode", "hunyuan_video15.replaced", masked),
    ("cogvideox", "decode", "cogvideox.LATE_FRAMES", 8),
    ("cogvideox, one frame more", "encode", "cogvideox.FRAMES", 16),
    ("cogvideox, one frame more", "encode", "cogvideox._drop_cache_of_one_frame", everything_kept),
])
def test_the_comparison_notices_other_pieces_of_frames(made_by_comfyui, monkeypatch, kind, way, name, mutant):
    tensors, latent, pixels, image, encoded = made_by_comfyui[0][kind]
    vae = load_autoencoder(whole(tensors), torch.float32, "cpu")
    monkeypatch.setattr(f"xdit_backend.autoencoders.{name}", mutant)

    result, want = ((decode_rows(vae, latent).tensor, pixels) if way == "decode"
                    else (encode_rows(vae, image, 8).tensor, encoded))

    assert result.shape != want.shape or (result - want).norm() > 10 * TOLERANCE * want.norm()


def test_weights_are_copied_in_the_wanted_dtype(tensors):
    """The host takes back the memory that they came in."""
    same_dtype = load_autoencoder(tensors, torch.float32, "cpu")
    tensors["decoder.conv_in.weight"].zero_()

    assert same_dtype.decoder.conv_in.weight.abs().min() > 0
    assert load_autoencoder(tensors, torch.bfloat16, "cpu").dtype == torch.bfloat16


def test_the_encoder_comes_along_where_there_is_one(tensors):
    vae = load_autoencoder(tensors, torch.float32, "cpu")

    assert vae.encode(torch.zeros(1, 3, 16, 16)).latent_dist.mean.shape == (1, 4, 4, 4)


def test_config_of_stable_diffusions_vae(made_by_comfyui):
    config = kl_config(made_by_comfyui[1])

    assert config["block_out_channels"] == (128, 256, 512, 512)
    assert config["layers_per_block"] == 2 and config["latent_channels"] == 4
    assert config["use_quant_conv"] and config["use_post_quant_conv"] and config["mid_block_add_attention"]
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in AutoencoderKL(**config).parameters())
    assert num_parameters == 83_653_863  # as published


PUBLISHED = {
    "Stable Video Diffusion": {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4},
    "HunyuanVideo 1.5": {"block_out_channels": (128, 256, 512, 1024, 1024), "layers_per_block": 2,
                         "latent_channels": 32, "spatial_compression_ratio": 16, "temporal_compression_ratio": 4},
    "Mochi": {"encoder_block_out_channels": (64, 128, 256, 384), "decoder_block_out_channels": (128, 256, 512, 768),
              "in_channels": 15,
              "latent_channels": 12, "layers_per_block": (3, 3, 4, 6, 3), "temporal_expansions": (1, 2, 3),
              "add_attention_block": (False, True, True, True, True)},
    "LTX-2": {"block_out_channels": (128, 256, 512, 1024, 2048), "layers_per_block": (4, 6, 6, 2, 2),
              "decoder_layers_per_block": (5, 5, 5, 5), "upsample_factor": (2, 2, 2),
              "decoder_block_out_channels": (256, 512, 1024), "timestep_conditioning": False},
    "MiniMax H3": {}}                                          # ComfyUI's own class


@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("prefixes",
                         by_default([DECODED_WITH + ENCODED_WITH],
                                    [DECODED_WITH + ENCODED_WITH, DECODED_WITH, ENCODED_WITH]),
                         ids=["whole", "decoder", "encoder"])
def test_vaes_of_the_published_sizes_fit(made_by_comfyui, kind, prefixes):
    """Without bytes; what is said of a half alone is as of the whole."""
    tensors = {name: torch.empty(shape, device="meta")
               for name, shape in half(made_by_comfyui[3][kind], prefixes).items()}

    vae = load_autoencoder(tensors, torch.float32, "meta")

    assert (prefixes != DECODED_WITH + ENCODED_WITH
            or {key: vae.config[key] for key in PUBLISHED[kind]} == PUBLISHED[kind])


@pytest.mark.parametrize("kind, named", [
    ("Flux.2", "Flux.2"), ("HunyuanImage's refiner", "HunyuanImage's refiner"),
    ("LTX 0.9.1", "adds random noise"),
])
def test_rejects_the_other_vaes_of_comfyui(made_by_comfyui, kind, named):
    tensors = {name: torch.empty(shape, device="meta") for name, shape in made_by_comfyui[2][kind].items()}

    with pytest.raises(CheckpointError, match="Decode and Encode work with the VAEs of SD, SDXL, SD3, Flux, "
                                              "Flux.2,") as caught:
        load_autoencoder(tensors, torch.float32, "cpu")

    assert named in str(caught.value)


@pytest.mark.parametrize("name", ["decoder.stages.0.op_list.0.main.conv.weight", "decoder.up_blocks.0.0.conv1.weight"])
def test_rejects_sanas_deep_compression_autoencoder(name):
    with pytest.raises(CheckpointError, match="Sana|no tensor decoder.conv_in.weight; its 1 tensors begin with "
                                              "decoder.up_blocks"):
        load_autoencoder({name: torch.ones(64, 32, 3, 3)}, torch.float32, "cpu")


@pytest.mark.parametrize("change, message", [
    ({"decoder.up.1.block.0.norm1.bias": None}, "up_blocks.1.resnets.0.norm1.bias: shape none is given"),
    ({"decoder.norm_out.weight": torch.ones(7)}, r"conv_norm_out.weight: shape \(7,\) is given"),
    ({"decoder.up.0.attn.0.q.weight": torch.ones(7)}, "decoder.up.0.attn.0.q.weight: .* none is needed"),
    ({"decoder.gate.weight": torch.ones(7)}, "elements of its tensors, 7 are of unknown ones"),
], ids=["missing", "wrong shape", "more attention", "unknown"])
def test_rejects_tensors_that_do_not_fit(tensors, change, message):
    changed = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}

    with pytest.raises(CheckpointError, match=message):
        load_autoencoder(changed, torch.float32, "cpu")
