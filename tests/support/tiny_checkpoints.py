"""Small random checkpoints in ComfyUI's own single-file formats, made from ComfyUI's own model classes.

Used by the tests and by the demo: python -m tests.support.tiny_checkpoints KIND PATH [--size demo]. ComfyUI's folder
comes from XDIT_COMFYUI.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

SEED = 1234
SHORT = {"Flux.1": "flux", "Flux.2": "flux2", "PixArt-Sigma": "pixart", "SD 1.5": "sd15", "SD 2": "sd2",
         "Stable Video Diffusion": "svd"}
REFINER = {"num_res_blocks": [1, 1, 1, 1], "channel_mult": [1, 2, 2, 2], "transformer_depth": [0, 2, 2, 0],
           "transformer_depth_middle": 2,
           "transformer_depth_output": [0, 0, 2, 2, 2, 2, 0, 0], "context_dim": 1280, "adm_in_channels": 2560}
# What ComfyUI's loader makes Cosmos-Predict1's VAE with, but for the channels.
COSMOS_VAE = {"z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 1024, "in_channels": 3,
              "out_channels": 3,
              "channels": 16, "channels_mult": [1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [32], "dropout": 0.0,
              "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8}

VARIANTS = {"chroma-radiance-x0": ("chroma-radiance", {
                "use_x0": True, "use_sequential_txt_ids": True, "nerf_final_head_type": "linear"}),
            "sd35": ("sd3", {"qk_norm": "rms", "x_block_self_attn_layers": [0, 1]}),
            "sd35-large": ("sd3", {"qk_norm": "rms", "adm_in_channels": 2048}),
            "sd35-text": ("sd3", {"context_processor_layers": 2}), "flux-schnell": ("flux", {"guidance_embed": False}),
            "flux-fill": ("flux", {"in_channels": 96}), "flux-canny": ("flux", {"in_channels": 32}),
            "flux2-klein": ("flux2", {"guidance_embed": False}),
            "qwen-image-2511": ("qwen-image", {"default_ref_method": "index_timestep_zero"}),
            "qwen-image-layered": ("qwen-image", {"default_ref_method": "negative_index",
                                                  "use_additional_t_cond": True}),
            "hunyuanvideo-i2v": ("hunyuanvideo", {"in_channels": 33}),
            "hunyuanvideo-skyreels": ("hunyuanvideo", {"in_channels": 32}),
            "cogvideox-1.5-i2v": ("cogvideox-1.5", {"in_channels": 32, "ofs_embed_dim": 64}),
            "cogvideox-1.5-inpaint": ("cogvideox-1.5", {"in_channels": 48}),
            "cosmos-predict1-video": ("cosmos-predict1", {"in_channels": 17}),
            "cosmos-predict2-video": ("cosmos-predict2", {
                "in_channels": 17, "rope_t_extrapolation_ratio": 5 / 6, **dict.fromkeys(
                    ("rope_h_extrapolation_ratio", "rope_w_extrapolation_ratio"), 2.0)}),
            "ltx-video-causal": ("ltx-video", {"causal_temporal_positioning": True}),
            "ltx-2.3": ("ltx-2", {"apply_gated_attention": True, "cross_attention_adaln": True,
                                  "caption_proj_before_connector": True,
                                  "caption_projection_first_linear": False, "connector_attention_head_dim": 8,
                                  "connector_num_attention_heads": 32, "audio_connector_attention_head_dim": 4,
                                  "audio_connector_num_attention_heads": 32}),
            "ltx-2-plain": ("ltx-2", {"rope_type": "interleaved", "frequencies_precision": "float32",
                                      "use_middle_indices_grid": False,
                                      "causal_temporal_positioning": False, "av_ca_timestep_scale_multiplier": 1.0}),
            "minimax-h3-curve": ("minimax-h3", {"adaln_curve_grid": 9, "time_embed_dim": 5}),
            "wan-i2v": ("wan", {"model_type": "i2v", "in_dim": 36}), "wan22-i2v": ("wan", {"in_dim": 36}),
            "wan-flf": ("wan", {"model_type": "i2v", "in_dim": 36, "flf_pos_embed_token_number": 8}),
            "wan-control": ("wan", {"model_type": "i2v", "in_dim": 48}),
            "wan22-ti2v": ("wan", {"in_dim": 48, "out_dim": 48}), "wan-causal": ("wan", {"causal_ar": True}),
            # as many blocks as published ones
            "sd15-blocks": ("sd15", {"num_res_blocks": [2, 2, 2, 2], "channel_mult": [1, 2, 4, 4],
                                     "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
                                     "transformer_depth_output": [1] * 9 + [0] * 3}),
            "sdxl-blocks": ("sdxl", {"num_res_blocks": [2, 2, 2], "transformer_depth": [0, 0, 1, 1, 2, 2],
                                     "transformer_depth_output": [0, 0, 0, 1, 1, 1, 2, 2, 2]}),
            "sd15-inpaint": ("sd15", {"in_channels": 9}), "sd15-ip2p": ("sd15", {"in_channels": 8}),
            "stable-zero123": ("sd15", {"in_channels": 8}),
            "sv3d-u": ("svd", {"adm_in_channels": 256}), "sv3d-p": ("svd", {"adm_in_channels": 1280}),
            "sdxl-inpaint": ("sdxl", {"in_channels": 9}), "sdxl-refiner": ("sdxl", REFINER),
            # whose layers on the way up are not those of the way down, and without attention in the middle
            "ssd-1b": ("sdxl", {"num_res_blocks": [2, 2, 2], "transformer_depth": [0, 0, 1, 1, 2, 2],
                                "transformer_depth_output": [0, 0, 0, 1, 1, 2, 3, 2, 2],
                                "transformer_depth_middle": -1}),
            # with a vector beside the text: of a picture, or of a task
            "sd2-unclip": ("sd2", {"num_classes": "sequential", "adm_in_channels": 1536}),
            "lotus": ("sd2", {"num_classes": "sequential", "adm_in_channels": 4}),
            # with nothing there
            "koala-700m": ("sdxl", {"transformer_depth": [0, 2, 2], "transformer_depth_output": [0, 0, 2, 2, 2, 2],
                                    "transformer_depth_middle": -2})}
# where another class of comfy.supported_models detects a variant
DETECTED = {"sdxl-refiner": "SDXLRefiner", "ssd-1b": "SSD1B", "koala-700m": "KOALA_700M",
            "sd2-unclip": "SD21UnclipL", "lotus": "LotusD", "sd15-ip2p": "SD15_instructpix2pix",
            "stable-zero123": "Stable_Zero123", "sv3d-u": "SV3D_u", "sv3d-p": "SV3D_p",
            "cosmos-predict1-video": "CosmosI2V", "cosmos-predict2-video": "CosmosI2VPredict2"}
# Families that ComfyUI's detection tells by a width of the published ones: here by one that no other tiny file has.
TOLD = {"z-image-pixel": {"image_model": "lumina2", "dim": 512},
        "z-image-omni": {"image_model": "lumina2", "dim": 384, "n_layers": 3},
        "newbie-image": {"image_model": "lumina2", "dim": 768}}
# what these are, the file says in its metadata
SAID = ("ltx-video-causal", "ltx-2", "ltx-2-plain", "ltx-2.3", "wan-causal", "wan-animate-2")
DEMO = {"sd3": {"depth": 8, "context_embedder_config": {
    "target": "torch.nn.Linear", "params": {"in_features": 96, "out_features": 512}}}}
AUTOENCODERS = ("vae-sd", "vae-sd3", "vae-flux", "vae-flux2", "vae-wan", "vae-wan22", "vae-hunyuan", "vae-cogvideox",
                "vae-ltx",
                "vae-ltx095", "vae-cosmos", "vae-taesd", "vae-hunyuanimage", "vae-hunyuan15", "vae-mochi", "vae-ltx2",
                "vae-minimax", "vae-svd")

AUTOENCODER = {
    "double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32, "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}                                                              # decoder only: ComfyUI takes any `ch` there


# What is in ComfyUI's classes: Anima's network for text, and the width of SD3's layers for text
TEXT_WIDTH, ADAPTER = 96, {"source_dim": 64, "target_dim": 64, "model_dim": 96, "num_layers": 2}


def fill(module, generator):
    """Random weights that keep activations near 1: norms near 1, matrices by fan-in, biases and tables small."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        # or one in the place of a tensor
        if not tensor.is_floating_point() or 0 in tensor.stride() or name.endswith(".wavelets"):
            continue
        leaf = name.rpartition(".")[2]
        if tensor.ndim >= 2 and leaf == "weight":
            fan_in = tensor[0].numel()
            value = torch.randn(tensor.shape, generator=generator) * fan_in ** -0.5
        elif leaf in ("weight", "scale", "std-of-means"):
            value = 1 + 0.1 * torch.randn(tensor.shape, generator=generator)
        else:
            value = 0.1 * torch.randn(tensor.shape, generator=generator)
        tensor.data.copy_(value)


def families():
    """{kind of checkpoint: family}, one kind for each family and those that are said to differ from it."""
    from xdit_backend.models import FAMILIES
    kinds = {SHORT.get(name, name.lower().replace(" ", "-")): family for name, family in FAMILIES.items()
             if not family.sampled}
    assert kinds.keys().isdisjoint(VARIANTS), "a variant would take a family's place"
    return kinds | {kind: kinds[base] for kind, (base, _) in VARIANTS.items()}


def transformer(kind, size="test"):
    """ComfyUI's model class of a family, small and random."""
    import comfy.ops
    thin_parts()
    tiny = families()[kind].testing
    base, changed = VARIANTS.get(kind, (kind, {}))
    arguments = tiny.arguments | changed | (DEMO.get(base, {}) if size == "demo" else {})
    arguments.pop("causal_ar", None)                           # another class of the same tensors
    module, _, name = tiny.native.partition(":")
    place = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}
    return getattr(importlib.import_module(module), name)(**arguments, **place)


def thin_parts():
    """Have ComfyUI's classes make the parts thin whose widths they fix."""
    import comfy.ldm.ace.model as ace
    import comfy.ldm.anima.model as anima
    import comfy.ldm.genmo.joint_model.asymm_models_joint as mochi
    import comfy.ldm.modules.diffusionmodules.mmdit as mmdit
    import comfy.ldm.triposplat.model as triposplat
    adapter, processor, feed_forward = anima.LLMAdapter, mmdit.ContextProcessor, mochi.FeedForward
    if isinstance(adapter, type):                              # not done yet
        ace.LyricEncoder = functools.partial(ace.LyricEncoder, output_size=64, attention_heads=4, linear_units=96,
                                             num_blocks=1)
        splats = triposplat.LatentSeqMMFlowModel
        splats._forward = _of_fewer_tokens(splats._forward)
        anima.LLMAdapter = functools.partial(adapter, **ADAPTER)
        # Of Mochi's blocks the width is asserted.
        mochi.FeedForward = lambda in_features, hidden_size, **place: feed_forward(
            in_features, 4 * in_features, **place)
        mmdit.ContextProcessor = lambda width, *arguments, **place: processor(TEXT_WIDTH, *arguments, **place)
        if importlib.util.find_spec("comfy.ldm.minimax_music"):
            music = importlib.import_module("comfy.ldm.minimax_music.dit").MiniMaxMusic3DiT
            music.__init__ = _thinned(music.__init__, families()["minimax-music-3"].testing.thin)


def _thinned(create, thin):
    """A constructor of sizes that its class fixes, whose memory is not touched before the parts are thin."""
    @functools.wraps(create)
    def thinned(self, *args, **kwargs):
        create(self, *args, **kwargs)
        thin(self)
    return thinned


def _of_fewer_tokens(forward):
    """TripoSplat's with the first of its places, for fewer tokens than it has."""
    @functools.wraps(forward)
    def of_fewer(self, x, *args, **kwargs):
        places = self.pos_emb
        self.pos_emb = places[:, :x[0].shape[1]] if torch.is_tensor(places) else places
        try:
            return forward(self, x, *args, **kwargs)
        finally:
            self.pos_emb = places
    return of_fewer


def _of_fewer_blocks(detect):
    """SeedVR2's files are told by their last block's number."""
    @functools.wraps(detect)
    def of_fewer(state_dict, key_prefix, *args, **kwargs):
        is_tiny = not any(f"{key_prefix}blocks.31.attn.norm_q.{own}.weight" in state_dict for own in ("vid", "all"))
        if f"{key_prefix}negative_conditioning" in state_dict and is_tiny:
            return {"image_model": "seedvr2"}
        return detect(state_dict, key_prefix, *args, **kwargs)
    return of_fewer


def detect_thin():
    """ComfyUI's detection takes widths of the published models for granted; make it take those of the tiny ones."""
    import comfy.model_detection
    import comfy.supported_models
    import comfy.utils
    thin_parts()
    names = comfy.utils.pixart_to_diffusers
    thin = {"hidden_size": families()["pixart"].testing.arguments["hidden_size"]}
    comfy.utils.pixart_to_diffusers = lambda config, *more, **named: names(thin | config, *more, **named)
    models = comfy.supported_models.models
    comfy.model_detection.detect_unet_config = _of_fewer_blocks(comfy.model_detection.detect_unet_config)
    for kind, family in families().items():
        detected = getattr(comfy.supported_models, DETECTED.get(kind, family.testing.detected) or "", None)
        arguments = family.testing.arguments | VARIANTS.get(kind, (kind, {}))[1]
        if family.plan.hooks == "unet":                            # a class of its own for what is compared
            thin = {key: arguments[key] for key in detected.unet_config if key in arguments}
            place = 0 if kind in DETECTED else len(models)     # what says more comes first, as in ComfyUI's own list
            models.insert(place, type(f"Thin{detected.__name__}", (detected,),
                                      {"unet_config": detected.unet_config | thin}))
        elif kind in TOLD:
            models.insert(0, type(f"Thin{detected.__name__}", (detected,), {
                "unet_config": TOLD[kind], "unet_extra_config": arguments}))
        elif detected is not None:
            said = {key for base, changed in VARIANTS.values() if families()[base] is family for key in changed}
            detected.unet_extra_config = arguments if kind in DETECTED else {      # but for what a variant's file says
                key: value for key, value in family.testing.arguments.items() if key not in said}
            detected.unet_config = {key: arguments.get(key, value) for key, value in detected.unet_config.items()}


# LTX-Video's with fewer layers and channels, as the file of a VAE says it.
LTX = {"dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "norm_layer": "pixel_norm",
       "patch_size": 4, "latent_log_var": "uniform", "encoder_base_channels": 8, "decoder_base_channels": 8}
VAE_CONFIGS = {
    "vae-ltx": {**LTX, "blocks": [["res_x", 2], ["compress_all", 1], ["res_x_y", 1], ["res_x", 1], ["compress_all", 1],
                                  ["res_x_y", 1], ["res_x", 1], ["compress_all", 1], ["res_x", 1], ["res_x", 2]]},
    "vae-ltx095": {
        **LTX, "timestep_conditioning": True,
        "encoder_blocks": [["res_x", {"num_layers": 1}], ["compress_space_res", {"multiplier": 2}],
                           ["res_x", {"num_layers": 2}],
                           ["compress_time_res", {"multiplier": 2}], ["res_x", {"num_layers": 1}],
                           ["compress_all_res", {"multiplier": 2}], ["res_x", {"num_layers": 1}],
                           ["compress_all_res", {"multiplier": 2}], ["res_x", {"num_layers": 1}]],
        "decoder_blocks": [["res_x", {"num_layers": 1}], ["compress_all", {"residual": True, "multiplier": 2}],
                           ["res_x", {"num_layers": 2}], ["compress_all", {"residual": True, "multiplier": 2}],
                           ["res_x", {"num_layers": 1}], ["compress_all", {"residual": True, "multiplier": 2}],
                           ["res_x", {"num_layers": 1}]]},
}


VAE_CONFIGS["vae-ltx2"] = {**VAE_CONFIGS["vae-ltx095"], "timestep_conditioning": False, "causal_decoder": False}


OF_SVD = {**AUTOENCODER, "z_channels": 4}
# The widths of some are in ComfyUI's loader, and not found from the file: its module, the class, and a thin one's
# arguments.
THIN = {
    "vae-wan22": ("comfy.ldm.wan.vae2_2", "WanVAE", {
        "dim": 16, "dec_dim": 16, "z_dim": 48, "temperal_downsample": [False, True, True]}),
    "vae-hunyuan": ("comfy.sd", "AutoencoderKL", {"embed_dim": 16, "ddconfig": {
        **AUTOENCODER, "ch_mult": [1, 1, 2, 2], "num_res_blocks": 1, "z_channels": 16, "conv3d": True,
        "time_compress": 4}}),
    "vae-hunyuanimage": ("comfy.sd", "AutoencodingEngine", {
        "regularizer_config": {"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"}, **{
            f"{half.lower()}_config": {"target": f"comfy.ldm.hunyuan_video.vae.{half}", "params": {
                "block_out_channels": [32, 32, 64, 64, 64, 128], "in_channels": 3, "out_channels": 3,
                "num_res_blocks": 1, "ffactor_spatial": 32, "z_channels": 64}} for half in ("Encoder", "Decoder")}}),
    "vae-hunyuan15": ("comfy.sd", "AutoencodingEngine", {
        "regularizer_config": {"target": "comfy.ldm.models.autoencoder.EmptyRegularizer"}, **{
            f"{half.lower()}_config": {"target": f"comfy.ldm.hunyuan_video.vae_refiner.{half}", "params": {
                "block_out_channels": [8, 16, 32, 64, 64], "in_channels": 3, "out_channels": 3, "num_res_blocks": 1,
                "ffactor_spatial": 16, "ffactor_temporal": 4, "z_channels": 32}} for half in ("Encoder", "Decoder")}}),
    "vae-svd": ("comfy.sd", "AutoencodingEngine", {
        "regularizer_config": {"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        "encoder_config": {"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": OF_SVD},
        "decoder_config": {"target": "comfy.ldm.modules.temporal_ae.VideoDecoder",
                           "params": {**OF_SVD, "video_kernel_size": [3, 1, 1], "alpha": 0.0}}}),
    "vae-mochi": ("comfy.ldm.genmo.vae.model", "VideoVAE", {}),
    "vae-cogvideox": ("comfy.ldm.cogvideo.vae", "AutoencoderKLCogVideoX", {
        "block_out_channels": (32, 64, 64, 64), "layers_per_block": 1}),
    "vae-cosmos": ("comfy.ldm.cosmos.vae", "CausalContinuousVideoTokenizer", COSMOS_VAE),
    "vae-minimax": ("comfy.ldm.minimax.vae", "MiniMaxH3VideoVAE", {
        "ch": 32, "ch_mult": (1, 1, 1, 1, 1, 2), "num_res_blocks": 1, "tile_size": 64, "tile_overlap_min": 16}),
}
MINIMAX_DECODER = {"num_layers": 2, "heads": 1, "dim_head": 64}


def thin(kind, made):
    """A VAE of ComfyUI's class `made`, as THIN says. Mochi's has no arguments, MiniMax H3's none of its decoder."""
    import comfy.ldm.genmo.vae.model as mochi
    import comfy.ldm.minimax.vae as minimax
    if kind == "vae-minimax":
        with mock.patch.object(minimax, "ViT3DDecoder", functools.partial(minimax.ViT3DDecoder, **MINIMAX_DECODER)):
            return made(**THIN[kind][2])
    if kind != "vae-mochi":
        return made(**THIN[kind][2])
    vae = made.__new__(made)
    torch.nn.Module.__init__(vae)
    same = {"base_channels": 32, "channel_multipliers": [1, 2, 1, 2], "num_res_blocks": [1, 1, 2, 1, 1],
            "latent_dim": 12, "padding_mode": "replicate"}
    vae.encoder = mochi.Encoder(in_channels=15, temporal_reductions=[1, 2, 3], spatial_reductions=[2, 2, 2],
                                input_is_conv_1x1=True,
                                prune_bottlenecks=[False] * 5, has_attentions=[False, True, True, True, True], **same)
    vae.decoder = mochi.Decoder(temporal_expansions=[1, 2, 3], spatial_expansions=[2, 2, 2], has_attention=[False] * 5,
                                output_norm=False,
                                **same)
    return vae


@contextmanager
def thin_class(kind):
    """While active, ComfyUI's loader makes the thin VAE of this kind."""
    if kind not in THIN:
        yield
        return
    module_name, class_name, _ = THIN[kind]
    module = importlib.import_module(module_name)
    made = getattr(module, class_name)
    setattr(module, class_name, lambda *_, **__: thin(kind, made))
    try:
        yield
    finally:
        setattr(module, class_name, made)


def autoencoder(kind, encoder=False):
    """ComfyUI's VAE, random, its decoder thin. An encoder of full width (of SD's family) only where it is asked for."""
    import comfy.ldm.lightricks.vae.causal_video_autoencoder
    import comfy.ldm.modules.diffusionmodules.model
    import comfy.ldm.wan.vae
    import comfy.taesd.taesd
    if kind == "vae-wan":
        return comfy.ldm.wan.vae.WanVAE(dim=16, z_dim=16, temperal_downsample=[False, True, True])
    if kind in THIN:
        module_name, class_name, _ = THIN[kind]
        return thin(kind, getattr(importlib.import_module(module_name), class_name))
    if kind in VAE_CONFIGS:
        return comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE(config=VAE_CONFIGS[kind])
    if kind == "vae-taesd":
        return comfy.taesd.taesd.TAESD(latent_channels=16)
    channels = {"vae-sd": 4, "vae-flux2": 32}.get(kind, 16)
    module = torch.nn.Module()
    module.decoder = comfy.ldm.modules.diffusionmodules.model.Decoder(**AUTOENCODER, z_channels=channels)
    if encoder:
        full = {**AUTOENCODER, "ch": 128}
        module.encoder = comfy.ldm.modules.diffusionmodules.model.Encoder(**full, z_channels=channels)
    if kind in ("vae-sd", "vae-flux2"):
        module.quant_conv = torch.nn.Conv2d(2 * channels, 2 * channels, 1)
        module.post_quant_conv = torch.nn.Conv2d(channels, channels, 1)
    if kind == "vae-flux2":
        module.bn = torch.nn.BatchNorm2d(4 * channels, affine=False)
    return module


def state_dict(kind, size="test", encoder=False, positions=None):
    """Tensors of a checkpoint under the names that files have. positions: rows of its square table of positions."""
    module = autoencoder(kind, encoder) if kind in AUTOENCODERS else transformer(kind, size)
    with torch.no_grad():
        fill(module, torch.Generator().manual_seed(SEED))
        if kind == "vae-flux2":                                # a variance is positive
            module.bn.running_var.copy_(1 + module.bn.running_var.abs())
        if kind == "vae-cosmos":
            module.latent_std.copy_(0.5 + module.latent_std.abs())
    tensors = {name: tensor.clone().contiguous() for name, tensor in module.state_dict().items()}
    if kind == "vae-cosmos":                                   # which ComfyUI tells it by, and makes itself
        tensors["decoder.unpatcher3d.wavelets"] = module.decoder.unpatcher3d.wavelets.clone()
    if kind == "stable-zero123":                               # of a picture, and where it is seen from
        generator = torch.Generator().manual_seed(SEED)
        tensors |= {"cc_projection.weight": torch.randn(768, 772, generator=generator) * 772 ** -0.5,
                    "cc_projection.bias": 0.1 * torch.randn(768, generator=generator)}
    if kind.startswith("minimax-h3"):                             # which folders leave to the class
        steps = torch.arange(len(tensors["rope.inv_freq"])) / len(tensors["rope.inv_freq"])
        tensors["rope.inv_freq"] = 10000.0 ** -steps
    if kind.startswith("stable-audio"):                        # and what says numbers of seconds to it
        tensors |= seconds_of(kind)
    if positions is not None:
        hidden = tensors["x_embedder.proj.weight"].shape[0]
        tensors["pos_embed"] = 0.1 * torch.randn(1, positions ** 2, hidden,
                                                 generator=torch.Generator().manual_seed(SEED))
    if not kind.startswith("vae"):                             # a VAE's are written where this pack is not imported too
        tensors = families()[kind].testing.in_file(tensors) if kind in families() else tensors
    # files say .scale where ComfyUI's module says .weight
    if kind.startswith(("flux", "chroma")):
        tensors = {name.replace("_norm.weight", "_norm.scale") if "norm." in name else name: tensor
                   for name, tensor in tensors.items()}
    return tensors


def seconds_of(kind):
    """Networks that stand beside a model of Stable Audio in its file, under their names there."""
    generator, found, is_made = torch.Generator().manual_seed(SEED), {}, kind.endswith("3")
    for name in families()[kind].detection.values:
        leaf = name.rpartition(".")[2]
        if leaf == "weights" and is_made:                      # its waves are of no file
            continue
        shape = {"weights": (128,), "weight": (768, 256 if is_made else 257)}.get(leaf, (768,))
        found[name] = torch.randn(shape, generator=generator) * (0.06 if leaf == "weight" else 1)
    return found


def save(kind, path, size="test", prefix="", dtype=None, encoder=False, positions=None, vae=None):
    """Write a checkpoint. vae: the kind of one that is in the same file, as in all-in-one checkpoints,
    after some of a text encoder."""
    from safetensors.torch import save_file
    tensors = {name if name.startswith("conditioner.") else prefix + name: tensor if dtype is None else tensor.to(dtype)
               for name, tensor in state_dict(kind, size, encoder, positions).items()}
    if vae is not None:
        tensors |= {f"first_stage_model.{name}": tensor for name, tensor in state_dict(vae, encoder=True).items()}
        tensors["cond_stage_model.text_model.encoder.layers.0.mlp.fc1.weight"] = torch.ones(4, 4)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    said = ({"vae": VAE_CONFIGS[kind]} if kind in VAE_CONFIGS else {"transformer": said_of(kind)} if kind in SAID
            else None)
    config = {} if said is None else {"config": json.dumps(said)}
    save_file(tensors, str(path), metadata={"format": "pt", **config})


def said_of(kind):
    """What a file's metadata says of its transformer: of LTX-2 all, of others how they differ."""
    base, changed = VARIANTS.get(kind, (kind, {}))
    family = families()[kind]
    return (family.testing.arguments if base == "ltx-2" else {}) | changed | family.detection.described


def save_scaled(path, source, marks="comfy_quant", per_row=False):
    """Write the checkpoint `source` anew, its matrices as scaled float8; returns {name: tensor} of what that comes to.

    marks: "comfy_quant", "scaled_fp8" (the older one) or "metadata". per_row: every second matrix has a scale for each
    row.
    """
    from safetensors.torch import load_file, save_file
    tensors, plain, said = {}, {}, {}
    names = matrices(source)
    for number, (name, tensor) in enumerate(load_file(source).items()):
        tensors[name] = plain[name] = tensor
        if name not in names:
            continue
        layer, dtype = name.removesuffix(".weight"), (torch.float8_e5m2 if marks == "metadata" else torch.float8_e4m3fn)
        most = tensor.abs().amax(1, keepdim=True) if per_row and number % 2 else tensor.abs().amax().view(())
        scale = most / torch.finfo(dtype).max
        tensors[name] = (tensor / scale).to(dtype)
        plain[name] = tensors[name].float() * scale
        said[layer] = {"format": "float8_e5m2" if marks == "metadata" else "float8_e4m3fn"}
        tensors[f"{layer}.{'scale_weight' if marks == 'scaled_fp8' else 'weight_scale'}"] = scale
        tensors[f"{layer}.{'scale_input' if marks == 'scaled_fp8' else 'input_scale'}"] = torch.tensor(0.5)
        if marks == "comfy_quant":
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(said[layer]).encode()), dtype=torch.uint8)
    if marks == "scaled_fp8":
        tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    metadata = {"_quantization_metadata": json.dumps({"layers": said})} if marks == "metadata" else {}
    save_file(tensors, str(path), metadata=metadata_of(source) | metadata)
    return plain


# Where a block of a GGUF type has its factors, float16: {place: its share}. One that is taken away has the share that
# makes their mean 0.
FACTORS = {"Q6_K": {208: 1.0}, "Q5_K": {0: 1.0, 2: 15.5}, "Q4_K": {0: 1.0, 2: 7.5}, "Q3_K": {108: 1.0},
           "Q2_K": {80: 1.0, 82: 1.5}}


def save_gguf(path, source, type_="Q8_0"):
    """Write the checkpoint `source` as a GGUF file, as ComfyUI-GGUF's converter names and shapes it; returns {name:
    tensor} of what its weights come to by the package gguf. Types that this does not write are of random blocks.
    """
    import gguf
    import numpy as np
    from safetensors.torch import load_file
    writer, plain, names, generator = gguf.GGUFWriter(str(path), "flux"), {}, matrices(source), np.random.default_rng(
        SEED)
    kind = gguf.GGMLQuantizationType[type_]
    block = gguf.GGML_QUANT_SIZES[kind][0]
    if "config" in metadata_of(source):
        writer.add_string("config", metadata_of(source)["config"])
    for name, tensor in load_file(source).items():
        values = tensor.float().numpy()
        if name not in names or values.shape[1] % block:
            if values.ndim == 5:                               # ggml knows four dims
                writer.add_array(f"comfy.gguf.orig_shape.{name}", list(values.shape))
                values = values.reshape(values.shape[0], values.shape[1], -1, values.shape[4])
            writer.add_tensor(name, values)
            plain[name] = tensor.float()
            continue
        if type_.endswith("_K") or type_.startswith("IQ"):
            raw = random_blocks(kind, *values.shape, generator)
        else:
            raw = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        plain[name] = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file,
                  writer.close):
        write()
    return plain


def save_dequantised(path, source, quantisation):
    """Write the checkpoint `source` anew, with what its matrices come to as torchao's int8,
    or as bitsandbytes' nf4 in blocks of 64."""
    from safetensors.torch import load_file, save_file
    names = matrices(source)
    save_file({name: of_library(tensor, quantisation) if name in names
               and (quantisation == "int8" or tensor.shape[1] % 64 == 0) else tensor
               for name, tensor in load_file(source).items()}, str(path), metadata=metadata_of(source))


def of_library(weight, quantisation):
    """A matrix as a library's own layer computes with it. Called by tests marked `quantisers`; and for int8 by others,
    where comfy-kitchen makes it."""
    if quantisation == "nf4":
        from bitsandbytes import functional
        return functional.dequantize_nf4(*functional.quantize_nf4(weight, blocksize=64))
    if importlib.util.find_spec("torchao") is None:
        from comfy_kitchen.tensor import QuantizedTensor
        return QuantizedTensor.from_float(weight, "TensorWiseINT8Layout", per_channel=True).dequantize()
    from torchao import quantization as library
    layers = torch.nn.Sequential(torch.nn.Linear(*reversed(weight.shape), bias=False))
    layers[0].weight.data = weight.clone()
    library.quantize_(layers, library.Int8WeightOnlyConfig())
    return layers[0].weight.dequantize()


def random_blocks(kind, rows, columns, generator):
    """The bytes of a matrix of a GGUF type, at random; its numbers are as large as those of a model's linear layer."""
    import gguf
    import numpy as np
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    factors = 1e-3 * generator.standard_normal(blocks.shape[:2])

    def with_factors(factors):
        for place, share in FACTORS.get(kind.name, {0: 1.0}).items():
            blocks[..., place:place + 2] = (share * factors).astype(np.float16)[..., None].view(np.uint8)
        return blocks.reshape(rows, -1)

    numbers = gguf.quants.dequantize(with_factors(factors), kind)
    return with_factors(factors * columns ** -0.5 / np.sqrt(np.mean(numbers ** 2)))


def matrices(source):
    """Names of a checkpoint's tensors that are matrices of linear layers, of which ComfyUI takes quantised ones."""
    from safetensors import safe_open
    with safe_open(source, "pt") as file:
        return {name for name in file.keys() if name.endswith(".weight") and not name.startswith("conditioner.")
                and not ("pixel_blocks." in name and ".adaLN_modulation.0." in name)           # which it splits
                and len(file.get_slice(name).get_shape()) == 2}  # noqa: SIM118


def metadata_of(source):
    from safetensors import safe_open
    with safe_open(source, "pt") as file:
        return file.metadata() or {}


def import_comfyui(folder=None):
    """Make ComfyUI's packages importable in this process, on the CPU;
    with PyTorch's attention, which it takes by itself on GPUs."""
    folder = folder or os.environ["XDIT_COMFYUI"]
    sys.path.insert(0, str(folder))
    import comfy.options
    comfy.options.enable_args_parsing(False)
    import comfy.cli_args
    comfy.cli_args.args.cpu = comfy.cli_args.args.use_pytorch_cross_attention = True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=(*families(), *AUTOENCODERS))
    parser.add_argument("path")
    parser.add_argument("--size", choices=("test", "demo"), default="test")
    options = parser.parse_args()
    import_comfyui()
    save(options.kind, options.path, options.size)
