"""Published models that can be counted by name: their configs, usual sizes of latents and text, and checkpoints without
a file.

Values missing from a config are the defaults of diffusers' class, which are those of the model it was written for:
Flux.1 dev, Flux.2 dev, Qwen-Image, Z-Image, Wan 2.1 14B, HunyuanVideo 1.5, LTX-2, and those from Chroma to
Cosmos-Predict1. Values of SD3.5, SDXL, DiT and Latte are from their publishers' config.json; the width of PixArt's text
is T5 XXL's. Others follow from the header of the published file by the family's own rules, as do all values of
ComfyUI's classes.
"""

import functools
import inspect
from dataclasses import dataclass, field

import torch

from ...checkpoints.build_transformer import build_empty
from ...checkpoints.quantisation.layer_formats import FORMATS, ROTATING, Layer
from ...checkpoints.quantisation.quantised_weights import block_of
from ...models import FAMILIES, wan_dancer, wan_s2v
from ...models.common.family import Family
from ...protocol.specs import ModelSpec


@dataclass(frozen=True)
class Published:
    """A published model. frames: of the usual image or video. tokens: of text. branches: of guidance; 1 if guidance is
    embedded. arguments: config values that differ from the defaults of the model's class."""

    family: str
    size: tuple[int, int] = (1024, 1024)   # columns and rows of pixels
    frames: int = 1
    tokens: int = 512
    branches: int = 2
    arguments: dict = field(default_factory=dict)

    @property
    def config(self):
        """All arguments of diffusers' class; of ComfyUI's class, those without a default."""
        import diffusers
        family = FAMILIES[self.family]
        parameters = {} if family.is_comfyuis else inspect.signature(
            getattr(diffusers, family.transformer).__init__).parameters
        settings = {f"_{name}": values[0] for name, values in family.detection.settings.items()}
        return {name: parameter.default for name, parameter in parameters.items() if name != "self"} | settings | {
            name: rule for name, rule in family.detection.config.rules.items() if not callable(rule)} | self.arguments

    def checkpoint(self, name, type_="BF16"):
        """An Unwritten checkpoint of the model. type_: of its weights."""
        return Unwritten(name, FAMILIES[self.family], self.config, type_)


WAN_14B = {"text_dim": 4096, "ffn_dim": 13824, "num_layers": 40}
# with the argument names of ComfyUI's class
WAN_14B_OF_COMFYUI = {"out_dim": 16, "dim": 5120, "num_heads": 40, "text_dim": 4096, "freq_dim": 256,
                      "ffn_dim": 13824, "num_layers": 40, "cross_attn_norm": True}
PIXELDIT_1B = {"hidden_size": 1536, "num_groups": 24, "pixel_hidden_size": 16, "pixel_attn_hidden_size": 1152,
               "pixel_num_groups": 16, "patch_depth": 14, "pixel_depth": 2, "txt_embed_dim": 2304,
               "_pixel_token_width": 5632}
SEEDVR2 = {"vid_in_channels": 33, "vid_out_channels": 16, "txt_in_dim": 5120, "head_dim": 128}
COSMOS2_2B = {"num_attention_heads": 16, "rope_scale": (1.0, 4.0, 4.0)}
KANDINSKY5 = {"in_visual_dim": 16, "out_visual_dim": 16}
SD15 = {
    "sample_size": 64, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 768, "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280, 1280), "attention_head_dim": (8, 8, 8, 8),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "transformer_layers_per_block": (1, 1, 1, 1)}
SDXL_BASE = {
    "sample_size": 128, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 2048, "layers_per_block": 2,
    "block_out_channels": (320, 640, 1280), "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10), "class_embed_type": "projection",
    "projection_class_embeddings_input_dim": 2816}
PUBLISHED = {
    "flux.1-dev": Published("Flux.1", branches=1, arguments={"guidance_embeds": True}),
    "flux.2-dev": Published("Flux.2", branches=1),
    "qwen-image": Published("Qwen-Image", (1328, 1328), tokens=128),
    "z-image": Published("Z-Image", branches=1, tokens=128),
    "sd3.5-large": Published("SD3", tokens=333, arguments={
        "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432, "pos_embed_max_size": 192,
        "qk_norm": "rms_norm"}),
    "sdxl": Published("SDXL", tokens=77, arguments=SDXL_BASE),
    "wan2.1-14b-480p": Published("Wan", (832, 480), 81, arguments=WAN_14B),
    "wan2.1-14b-720p": Published("Wan", (1280, 720), 81, arguments=WAN_14B),
    "wan2.2-i2v-14b-480p": Published("Wan", (832, 480), 81, arguments=WAN_14B | {"in_channels": 36}),
    "wan2.2-i2v-14b-720p": Published("Wan", (1280, 720), 81, arguments=WAN_14B | {"in_channels": 36}),
    "hunyuanvideo-1.5": Published("HunyuanVideo 1.5", (1280, 720), 121, tokens=1000),
    "ltx-2": Published("LTX-2", (1280, 704), 121, tokens=1024, arguments={
        "use_prompt_embeddings": True, "_text_width": 7680}),
    "chroma": Published("Chroma"),
    "chroma-radiance": Published("Chroma Radiance", arguments={
        "_pixel_width": 64, "_pixel_layers": 4, "_ratio": 4, "_convolution": True, "_x0": False, "_sequential": False}),
    # the size of ComfyUI's template
    "minimax-h3": Published("MiniMax H3", (1344, 768), 124, branches=1, arguments={"_has_frequencies": True,
                                                                              "_curve_points": None}),
    "ovis-image": Published("Ovis-Image", tokens=256),
    "pixart-sigma": Published("PixArt-Sigma", tokens=300, arguments={"caption_channels": 4096}),
    "lumina-2": Published("Lumina 2", tokens=256),
    "hunyuanimage-2.1": Published("HunyuanImage", (2048, 2048), tokens=1000),
    "hunyuanimage-2.1-refiner": Published("HunyuanImage refiner", (2048, 2048), tokens=256, branches=1, arguments={
        "in_channels": 128, "num_attention_heads": 26, "guidance_embeds": True, "use_meanflow": True}),
    "hunyuanvideo-1.5-sr": Published("HunyuanVideo 1.5 distilled", (1920, 1080), 121, tokens=1000, branches=1,
                                     arguments={"in_channels": 98}),
    "hunyuanimage-2.1-distilled": Published("HunyuanImage distilled", (2048, 2048), tokens=1000, branches=1, arguments={
        "guidance_embeds": True, "use_meanflow": True, "patch_size": [1, 1], "text_embed_2_dim": 1472}),
    "anyflow-14b": Published("AnyFlow", (832, 480), 81, branches=1),
    "auraflow": Published("AuraFlow", tokens=256),
    "sana-1.6b": Published("Sana", tokens=300),
    # as diffusers' conversion script sets it: the class default is narrower
    "sana-video-2b-480p": Published("Sana-Video", (832, 480), 81, tokens=300, arguments={"mlp_ratio": 3.0}),
    "hunyuanvideo": Published("HunyuanVideo", (1280, 720), 129, tokens=256, branches=1),
    "ltx-video-2b": Published("LTX-Video", (704, 512), 161, tokens=128),
    "mochi": Published("Mochi", (848, 480), 163, tokens=256),
    "cogvideox-2b": Published("CogVideoX", (720, 480), 49, tokens=226),
    "cogvideox-5b-i2v": Published("CogVideoX-I2V", (720, 480), 49, tokens=226, arguments={
        "in_channels": 32, "num_attention_heads": 48, "num_layers": 42}),
    "cosmos-predict1-7b": Published("Cosmos-Predict1", (1280, 704), 121),
    "longcat-image": Published("LongCat-Image", arguments={"num_layers": 10, "num_single_layers": 20}),
    "pixart-alpha": Published("PixArt-Alpha", tokens=120, arguments={"caption_channels": 4096}),
    "ernie-image": Published("ERNIE-Image", tokens=256, arguments={
        "hidden_size": 4096, "num_attention_heads": 32, "num_layers": 36, "ffn_hidden_size": 12288,
        "text_in_dim": 3072}),
    "krea-2": Published("Krea 2", arguments={"_text_width": 30720}),
    "hidream-i1": Published("HiDream-I1", tokens=128, arguments={
        "in_channels": 16, "out_channels": 16, "caption_channels": [4096, 4096], "_text_width": 4096,
        "_layer_width": 4096, "llama_layers": [*range(32), *[31] * 16]}),
    "hunyuandit-1.2": Published("HunyuanDiT", tokens=77, arguments={
        "num_layers": 40, "in_channels": 4, "hidden_size": 1408, "mlp_ratio": 4.3637, "sample_size": 128,
        "use_style_cond_and_image_meta_size": False}),
    "cosmos-predict2-2b": Published("Cosmos-Predict2", arguments=COSMOS2_2B),
    "anima": Published("Anima", arguments=COSMOS2_2B | {"_conditioner": {
        "source_dim": 1024, "target_dim": 1024, "model_dim": 1024, "num_layers": 6, "num_attention_heads": 16,
        "target_vocab_size": 32128, "use_self_attention": True}}),
    "kandinsky-5-lite": Published("Kandinsky 5", (768, 512), 121, tokens=256, arguments=KANDINSKY5 | {
        "model_dim": 1792, "ff_dim": 7168}),
    "kandinsky-5-image": Published("Kandinsky 5 Image", tokens=256, arguments=KANDINSKY5 | {
        "model_dim": 2560, "ff_dim": 10240, "axes_dims": (32, 48, 48), "num_text_blocks": 4,
        "num_visual_blocks": 50}),
    "cogvideox-1.5-5b": Published("CogVideoX 1.5", (1360, 768), 81, tokens=226, arguments={
        "num_attention_heads": 48, "num_layers": 42}),
    "dit-xl-2-512": Published("DiT", (512, 512), tokens=1, arguments={"sample_size": 64, "out_channels": 8}),
    "latte-1": Published("Latte", (512, 512), 16, tokens=120, arguments={
        "num_layers": 28, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8, "attention_bias": True,
        "cross_attention_dim": 1152, "caption_channels": 4096, "num_embeds_ada_norm": 1000, "norm_eps": 1e-6}),
    "sd1.5": Published("SD 1.5", (512, 512), tokens=77, arguments=SD15),
    "sd2.1": Published("SD 2", (768, 768), tokens=77, arguments=SD15 | {
        "attention_head_dim": (5, 10, 20, 20), "cross_attention_dim": 1024, "use_linear_projection": True}),
    "sd-x4": Published("SD x4 upscaler", (2048, 2048), tokens=77, arguments=SD15 | {
        "in_channels": 7, "block_out_channels": (256, 512, 512, 1024), "cross_attention_dim": 1024,
        "down_block_types": SD15["down_block_types"][::-1], "up_block_types": SD15["up_block_types"][::-1],
        "use_linear_projection": True}),
    "svd": Published("Stable Video Diffusion", (1024, 576), 14, tokens=1, arguments={
        "sample_size": 64, "num_attention_heads": (5, 10, 20, 20), "transformer_layers_per_block": (1, 1, 1, 1)}),
    "stable-cascade-c": Published("Stable Cascade C", tokens=77, arguments={
        "c_in": 16, "c_out": 16, "c_cond": 2048, "c_hidden": (2048, 2048), "nhead": (32, 32),
        "level_config": ("CTA", "CTA"), "blocks": ((8, 24), (24, 8)), "block_repeat": ((1, 1), (1, 1)),
        "c_clip_text": 1280, "c_clip_text_pooled": 1280, "c_clip_img": 768}),
    "stable-cascade-b": Published("Stable Cascade B", tokens=77, arguments={
        "c_in": 4, "c_out": 4, "c_cond": 1280, "c_hidden": (320, 640, 1280, 1280), "nhead": (-1, -1, 20, 20),
        "level_config": ("CT", "CT", "CTA", "CTA"), "blocks": ((2, 6, 28, 6), (6, 28, 6, 2)),
        "block_repeat": ((1, 1, 1, 1), (3, 3, 2, 2)), "c_clip": 1280, "c_effnet": 16, "c_pixels": 3}),
    "omnigen2": Published("OmniGen 2", tokens=256, arguments={
        "in_channels": 16, "hidden_size": 2520, "num_layers": 32, "num_refiner_layers": 2, "num_attention_heads": 21,
        "num_kv_heads": 7, "text_feat_dim": 2048, "multiple_of": 10240, "axes_dim_rope": (40, 40, 40)}),
    "boogu-image": Published("Boogu-Image", tokens=256, arguments={
        "in_channels": 16, "hidden_size": 3360, "num_layers": 32, "num_double_stream_layers": 8,
        "num_refiner_layers": 2, "num_attention_heads": 28, "num_kv_heads": 7, "instruction_feat_dim": 4096,
        "multiple_of": 13568, "axes_dim_rope": (40, 40, 40)}),
    "lens": Published("Lens", (1440, 1440), arguments={
        "in_channels": 128, "out_channels": 32, "num_layers": 48, "attention_head_dim": 64, "num_attention_heads": 24,
        "enc_hidden_dim": 2880, "axes_dims_rope": (8, 28, 28), "multi_layer_encoder_feature": True,
        "selected_layer_index": (0, 1, 2, 3), "_text_width": 11520}),
    "ideogram-4": Published("Ideogram 4", arguments={
        "in_channels": 128, "num_layers": 34, "attention_head_dim": 256, "num_attention_heads": 18,
        "intermediate_size": 12288, "adaln_dim": 512, "llm_features_dim": 53248, "mrope_section": (24, 20, 20)}),
    "joyimage": Published("JoyImage", tokens=256, arguments={
        "in_channels": 16, "hidden_size": 4096, "num_layers": 40, "num_attention_heads": 32, "text_dim": 4096,
        "mlp_width_ratio": 4.0, "rope_dim_list": (16, 56, 56)}),
    "mage-flow": Published("Mage-Flow", tokens=128, arguments={
        "in_channels": 128, "out_channels": 128, "num_layers": 12, "attention_head_dim": 128,
        "num_attention_heads": 24, "joint_attention_dim": 2560, "axes_dims_rope": (16, 56, 56)}),
    # 47 s of audio at 21.5 latents per second; and 95 s at 10.8
    "stable-audio-open-1.0": Published("Stable Audio Open", (1024, 1024), tokens=130, arguments={
        "io_channels": 64, "embed_dim": 1536, "depth": 24, "num_heads": 24, "cond_token_dim": 768,
        "global_cond_dim": 1536, "project_cond_tokens": False}),
    "stable-audio-3-medium": Published("Stable Audio 3", (1024, 1024), tokens=257, arguments={
        "io_channels": 256, "embed_dim": 1536, "depth": 24, "num_heads": 24, "cond_token_dim": 768,
        "global_cond_dim": 768, "project_cond_tokens": True, "local_add_cond_dim": 257,
        "attn_kwargs": {"qk_norm": "rms", "differential": True}, "timestep_features_type": "expo"}),
    # 120 s of songs at 86 latents per second, of 25 text tokens per second
    "minimax-music-3": Published("MiniMax Music 3", (2400, 2352), tokens=3000, arguments={
        "depth": 36, "width": 2048, "context_dim": 32768}),
    # 120 s of songs at 10.8 tokens per second
    "ace-step-1.0": Published("ACE-Step 1.0", (1292, 1024), tokens=256, arguments={
        "in_channels": 8, "out_channels": 8, "num_layers": 24, "inner_dim": 2560, "num_attention_heads": 20,
        "mlp_ratio": 2.5, "speaker_embedding_dim": 512, "text_embedding_dim": 768, "ssl_latent_dims": [1024, 768],
        "lyric_encoder_vocab_size": 6693, "lyric_hidden_size": 1024, "_lyric_heads": 16, "_lyric_units": 4096,
        "_lyric_blocks": 6}),
    # 120 s of audio at 25 latents per second: the number of tokens of an image of this size
    "ace-step-1.5": Published("ACE-Step 1.5", (1920, 1600), tokens=256, arguments={
        "in_channels": 192, "hidden_size": 2048, "text_hidden_dim": 1024, "num_dit_layers": 24, "num_lyric_layers": 8,
        "num_timbre_layers": 4, "num_tokenizer_layers": 2, "head_dim": 128, "num_heads": 16, "num_kv_heads": 8,
        "intermediate_size": 6144, "fsq_dim": 2048, "encoder_hidden_size": 2048, "encoder_intermediate_size": 6144,
        "encoder_num_heads": 16, "audio_acoustic_hidden_dim": 64}),
    # a shape has 3072 tokens in version 2 and 4096 in 2.1: the number of tokens of an image of this size; the
    # conditioning is the output of a vision model
    "hunyuan3d-2": Published("Hunyuan3D 2", (1024, 768), tokens=1370, arguments={
        "in_channels": 64, "context_in_dim": 1536, "hidden_size": 1024, "num_heads": 16, "depth": 16,
        "depth_single_blocks": 32, "guidance_embed": False}),
    "hunyuan3d-2.1": Published("Hunyuan3D 2.1", (1024, 1024), tokens=1370, arguments={
        "in_channels": 64, "hidden_size": 2048, "context_dim": 1024, "depth": 21, "num_heads": 16, "num_moe_layers": 6,
        "num_experts": 8}),
    "z-image-omni": Published("Z-Image-Omni", tokens=128, arguments={"siglip_feat_dim": 1152, "_time_width": 1024}),
    "z-image-pixel": Published("Z-Image pixel", tokens=256, arguments={
        "dim": 3840, "n_layers": 30, "n_refiner_layers": 2, "n_heads": 30, "n_kv_heads": 30, "multiple_of": 10240,
        "cap_feat_dim": 2560, "axes_dims": (32, 48, 48), "decoder_hidden_size": 3840, "decoder_num_res_blocks": 4,
        "decoder_max_freqs": 8}),
    "newbie-image": Published("NewBie-Image", tokens=512, arguments={
        "in_channels": 16, "dim": 2304, "n_layers": 36, "n_refiner_layers": 2, "n_heads": 24, "n_kv_heads": 8,
        "multiple_of": 9216, "cap_feat_dim": 2560, "clip_text_dim": 1024, "axes_dims": (32, 32, 32)}),
    "triposplat": Published("TripoSplat", (1, 8192), tokens=4101, arguments={
        "in_channels": 16, "model_channels": 1024, "cond_channels": 1280, "out_channels": 16, "num_blocks": 24,
        "num_refiner_blocks": 2, "num_head_channels": 64, "cam_channels": 5, "cond2_channels": 128, "mlp_ratio": 4}),
    "hidream-o1": Published("HiDream-O1", (2048, 2048), tokens=100, arguments={
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vision_hidden_size": 1152,
        "vision_intermediate_size": 4304, "vision_depth": 27, "vision_num_position_embeddings": 2304}),
    "seedvr2-3b": Published("SeedVR2", (1280, 720), 21, tokens=58, branches=1, arguments=SEEDVR2 | {
        "num_layers": 32, "mlp_type": "swiglu", "vid_dim": 2560, "heads": 20, "mm_layers": 10, "rope_dim": 126,
        "rope_type": "mmrope3d", "vid_out_norm": True}),
    "seedvr2-7b": Published("SeedVR2", (1280, 720), 21, tokens=58, branches=1, arguments=SEEDVR2 | {
        "num_layers": 36, "mlp_type": "normal", "vid_dim": 3072, "heads": 24, "mm_layers": 36, "rope_dim": 60,
        "rope_type": "rope3d"}),
    "pixeldit": Published("PixelDiT", tokens=300, arguments=PIXELDIT_1B),
    "pid": Published("PiD", (4096, 4096), tokens=300, branches=1, arguments=PIXELDIT_1B | {
        "lq_latent_channels": 16, "lq_hidden_dim": 512, "lq_interval": 2, "lq_num_res_blocks": 4,
        "latent_spatial_down_factor": 8, "lq_latent_unpatchify_factor": 1, "lq_gate_per_token": False,
        "pit_lq_inject": False, "lq_conv_padding_mode": "zeros", "rope_ref_h": 1024, "rope_ref_w": 1024}),
    "wan2.1-vace-14b-480p": Published("Wan VACE", (832, 480), 81),
    "wan2.1-fun-camera-14b-480p": Published("Wan Camera", (832, 480), 81, arguments=WAN_14B_OF_COMFYUI | {
        "in_dim": 32, "model_type": "camera", "in_dim_control_adapter": 24, "_image_dim": 1280,
        "flf_pos_embed_token_number": None}),
    "wan2.1-fun-control-14b-480p": Published("Wan Fun-Control", (832, 480), 81, arguments=WAN_14B_OF_COMFYUI | {
        "in_dim": 48, "model_type": "i2v", "in_dim_ref_conv": 16, "_image_dim": 1280,
        "flf_pos_embed_token_number": None}),
    "wan2.1-humo-17b-480p": Published("Wan HuMo", (832, 480), 97, arguments=WAN_14B_OF_COMFYUI | {
        "in_dim": 36, "model_type": "humo"}),
    "wan2.2-animate-14b-480p": Published("Wan Animate", (832, 480), 77, arguments=WAN_14B_OF_COMFYUI | {
        "in_dim": 36, "model_type": "animate", "_image_dim": 1280, "flf_pos_embed_token_number": None}),
    "wan-animate-2-14b-480p": Published("Wan Animate 2", (832, 480), 77, arguments=WAN_14B_OF_COMFYUI | {
        "in_dim": 36, "_image_dim": 1280, "flf_pos_embed_token_number": None}),
    "wan2.1-scail-14b-480p": Published("Wan SCAIL", (832, 480), 81, arguments=WAN_14B_OF_COMFYUI | {
        "in_dim": 20, "model_type": "scail", "_image_dim": 1280, "flf_pos_embed_token_number": None}),
    "wan2.1-scail-2-14b-480p": Published("Wan SCAIL-2", (832, 480), 81, arguments=WAN_14B_OF_COMFYUI | {
        "in_dim": 20, "model_type": "scail2", "mask_in_dim": 28, "_image_dim": 1280,
        "flf_pos_embed_token_number": None}),
    "wan2.2-s2v-14b-480p": Published("Wan S2V", (832, 480), 77, arguments=WAN_14B_OF_COMFYUI | {
        "in_dim": 16, "model_type": "s2v", "audio_dim": 1024, "audio_inject_layers": wan_s2v.LAYERS}),
    "wandancer-14b-480p": Published("WanDancer", (480, 832), 149, arguments=WAN_14B_OF_COMFYUI | {
        "in_dim": 36, "model_type": "wandancer", "in_dim_ref_conv": 16, "audio_inject_layers": wan_dancer.LAYERS,
        "_image_dim": 1280}),
}


# the format that rotates groups of columns together, the usual group size; it has a scale for each row
ROTATED, COLUMNS_ROTATED = "convrot_w4a4", 256


@dataclass(frozen=True)
class Unwritten:
    """A checkpoint of a published model without a file: the attributes of checkpoints.Checkpoint that a count reads.

    type_: of its weights, as named by safetensors or GGUF, or a ComfyUI format (quantisation/layer_formats.py). With a
    GGUF type or a ComfyUI format all nn.Linear whose shape allows it have this type, and the others are BF16. Tensor
    names are those of diffusers.
    """

    name: str
    family: Family
    config: dict
    type_: str = "BF16"

    folder_config = property(lambda self: self.config)

    @functools.cached_property
    def tensors(self):
        """{name: (shape, whether it is the weight of an nn.Linear)} of the model."""
        model = build_empty(self.family, self.config)
        linear = {f"{name}.weight" for name, module in model.named_modules() if type(module) is torch.nn.Linear}
        return {name: (tuple(tensor.shape), name in linear) for name, tensor in model.state_dict().items()}

    shapes = property(lambda self: {name: shape for name, (shape, _) in self.tensors.items()})
    quantised = property(lambda self: {name for name, type_ in self.dtypes.items()
                                       if type_ not in ("BF16", "F32", "F16")})

    @property
    def dtypes(self):
        if self.type_ == "BF16" or self.layers:
            return {name: self.layers[name].type if name in self.layers else "BF16" for name in self.tensors}
        numbers = block_of(self.type_)[0]
        return {name: self.type_ if linear and shape[1] % numbers == 0 else "BF16"
                for name, (shape, linear) in self.tensors.items()}

    @functools.cached_property
    def layers(self):
        if self.type_ not in FORMATS:
            return {}
        how = FORMATS[self.type_]
        layers = {name: Layer(self.type_, shape, {what: f"{name.removesuffix('weight')}{what}" for what in how.scales},
                              0 if how.block or how.group else shape[0] if self.type_ == ROTATED else 1,
                              COLUMNS_ROTATED if self.type_ in ROTATING else 0, group=how.group)
                  for name, (shape, linear) in self.tensors.items() if linear}
        return {name: layer for name, layer in layers.items() if layer.shape[1] % layer.block[0] == 0}

    @property
    def stored(self):
        return {} if self.layers else {name: (0, shape) for name, shape in self.shapes.items()}

    def under_diffusers_names(self, tensors):
        return tensors

    def spec(self, storage_dtype, compute_dtype, stages=None, tensor_degree=1, quantisation="", fast=False,
             weights_memory=0):
        return ModelSpec(self.name, self.family.name, "", storage_dtype, compute_dtype, stages, tensor_degree,
                         quantisation, fast, weights_memory)
