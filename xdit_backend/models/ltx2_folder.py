"""LTX-2's diffusers folders: names of the connectors' tensors, with which ComfyUI processes the text, and settings
of the connectors and the model."""

import re

from .common.family import FolderRules

# ComfyUI's prefix -> diffusers'
CONNECTOR_NAMES = {"connector": "video_connector", "audio_connector": "audio_connector"}
SIZES = ("attention_head_dim", "cross_attention_dim", "caption_channels", "audio_attention_head_dim",
         "audio_cross_attention_dim")


def connectors_name(name):
    """ComfyUI's name of a tensor of a folder's connectors. The projection of Gemma's hidden states before them
    belongs to the text encoder."""
    if not name.startswith(("video_connector.", "audio_connector.")):
        return None
    name = name.replace("_connector.", "_embeddings_connector.",
                        1).replace(".transformer_blocks.", ".transformer_1d_blocks.")
    return re.sub(r"\.norm_([qk])\.", r".\1_norm.", name)


def folder_metadata(folder):
    """A folder's config.json as the metadata of a single file. Positions are the middle of a frame in diffusers'
    model."""
    config, connectors, early = folder.config, folder.extra_parts.get("connectors", {}), not folder.config.get(
        "use_prompt_embeddings", True)
    sizes = {f"{ours}_{size}": connectors[f"{theirs}_{size}"] for ours, theirs in CONNECTOR_NAMES.items()
             for size in ("attention_head_dim", "num_attention_heads", "num_layers")
             if f"{theirs}_{size}" in connectors}
    return sizes | {key: config[key] for key in SIZES if key in config} | {
        "connector_apply_gated_attention": bool(connectors.get("video_gated_attn")),
        "causal_temporal_positioning": True,
        "use_middle_indices_grid": True, "rope_type": config.get("rope_type", "interleaved"),
        "frequencies_precision": "float64" if config.get("rope_double_precision", True) else "float32",
        "av_ca_timestep_scale_multiplier": config.get("cross_attn_timestep_scale_multiplier", 1000),
        "apply_gated_attention": bool(config.get("gated_attn")),
        "cross_attention_adaln": bool(config.get("cross_attn_mod")),
        **{name: config.get(name, True) for name in ("ff_bias", "audio_ff_bias")},
        "caption_proj_before_connector": early, "caption_projection_first_linear": not early}


TEXT_PREFIXES = "video_embeddings_connector.", "audio_embeddings_connector."
FOLDER = FolderRules(
    extra_parts={"connectors": connectors_name}, metadata=folder_metadata,
    arguments=("rope_type", "rope_double_precision", "cross_attn_timestep_scale_multiplier"))
