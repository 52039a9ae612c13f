"""Latte: text to video; blocks over the places of a frame and over the frames of a place take turns. ComfyUI has no model of it."""

from ..protocol.errors import ConfigError
from .describe import Whole, config_of, folder_alone, given, has, said, timestep
from .plan import BlockList, Family, ModelPlan, Sampled, Tiny

LATENT = Whole((1, 2, 2))
TURNS = "its blocks attend over the places of a frame and over the frames of a place by turns, so that tokens would change ranks after each"


def _latent(asked):
    num_frames, length = asked.latent.shape[2], asked.config["video_length"]
    if num_frames not in (1, length):
        raise ConfigError(f"Latte draws videos of {length} frames, or a picture of one, and the latent has {num_frames}. Its positions are "
                          f"for so many. Use a latent of {length} frames: a length of {4 * length - 3} in EmptyHunyuanLatentVideo.")
    return LATENT(asked)


LATTE = Family(
    name="Latte", title="Latte", transformer="LatteTransformer3DModel",
    recognise=has("temporal_transformer_blocks.0.attn1.to_q.weight", "adaln_single.linear.weight"),
    refusals=(folder_alone,),
    config=config_of(
        patch_size=2, norm_type="ada_norm_single", activation_fn="gelu-approximate", norm_elementwise_affine=False, sample_size=said,
        in_channels=said, out_channels=said, num_layers=said, num_attention_heads=said, attention_head_dim=said, attention_bias=said,
        attention_type=said, caption_channels=said, cross_attention_dim=said, norm_eps=said, norm_num_groups=said, num_embeds_ada_norm=said,
        video_length=said, dropout=said),
    convert=lambda tensors, config: tensors, latent=LATENT,
    sampled=Sampled("EPS", {"beta_schedule": "sqrt_linear", "linear_start": 0.0001, "linear_end": 0.02}, "SD15", {
        "latent_dimensions": 3}, memory=0.5),
    refused=dict.fromkeys(("ulysses", "ring", "pipefusion", "displaced"), TURNS),
    num_channels=lambda config: config["in_channels"],         # the other half is the variance
    conditioning={"context": "caption_channels"},
    arguments={"hidden_states": _latent, "timestep": timestep(), "encoder_hidden_states": given("context")},
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks."),
                BlockList("temporal_transformer_blocks", "temporal_transformer_blocks.")),
        streams={"hidden_states": "image"}, attention={}),
    tiny=Tiny({"in_channels": 4, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "patch_size": 2,
               "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 24, "attention_bias": True, "video_length": 3,
               "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6,
               "num_embeds_ada_norm": 1000}),
)
