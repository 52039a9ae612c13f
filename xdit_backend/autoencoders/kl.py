"""LDM's image VAE, which most image models use. Flux.2's normalisation and patches are applied on the host."""

from ..protocol.errors import CheckpointError
from .vae_family import VaeFamily, count_layers


def kl_config(shapes, settings=None):
    """Configuration from the shapes of tensors with LDM's names (decoder.up.0.block...)."""
    half = "decoder" if any(name.startswith("decoder.") for name in shapes) else "encoder"
    level = "decoder.up" if half == "decoder" else "encoder.down"
    for name in (f"{half}.conv_in.weight", f"{half}.conv_out.weight", f"{level}.0.block.0.conv1.weight"):
        if name not in shapes:
            raise CheckpointError(f"It has no tensor {name}; its {len(shapes)} tensors begin with "
                                  f"{', '.join(list(shapes)[:3])}.")
        if len(shapes[name]) != 4:
            raise CheckpointError(f"{name} has shape {list(shapes[name])}, an image VAE's has 4 dims.")
    num_levels = count_layers(shapes, level + ".{}.block.0.conv1.weight")
    decodes = half == "decoder"
    out_channels = shapes["decoder.conv_out.weight"][0] if decodes else 3
    return {
        "in_channels": shapes.get("encoder.conv_in.weight", (0, out_channels))[1],
        "out_channels": out_channels,
        "latent_channels": (shapes["decoder.conv_in.weight"][1] if decodes
                            else shapes["encoder.conv_out.weight"][0] // 2),
        # level 0 has the image's size in both halves; LDM's decoder runs the levels from the last to the first
        "block_out_channels": tuple(shapes[f"{level}.{index}.block.0.conv1.weight"][0] for index in range(num_levels)),
        # a decoder has one more
        "layers_per_block": count_layers(shapes, level + ".0.block.{}.conv1.weight") - decodes,
        "down_block_types": ("DownEncoderBlock2D",) * num_levels,
        "up_block_types": ("UpDecoderBlock2D",) * num_levels,
        "norm_num_groups": 32,  # in LDM for every width
        "mid_block_add_attention": f"{half}.mid.attn_1.q.weight" in shapes,
        "use_quant_conv": "quant_conv.weight" in shapes,
        "use_post_quant_conv": "post_quant_conv.weight" in shapes,
        # ComfyUI's latent format has already removed the model's scale and shift
        "scaling_factor": 1.0,
    }


def _convert(tensors, config):
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint
    return convert_ldm_vae_checkpoint(tensors, config)


KL = VaeFamily(
    models=("SD", "SDXL", "SD3", "Flux", "Flux.2"),
    autoencoder="AutoencoderKL",
    decoder=("decoder.", "post_quant_conv."),
    encoder=("encoder.", "quant_conv."),
    config=kl_config,
    convert=_convert,
)
