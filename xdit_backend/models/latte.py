"""Latte: text to video; blocks over the positions of each frame alternate with blocks over the frames of each
position. ComfyUI has no model of it."""

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, Sampled, SmallConfig
from .common.inputs import (
    ALL_FRAMES,
    PerFrame,
    config_of,
    folder_alone,
    from_conditioning,
    has,
    in_config_json,
    timestep,
)
from .common.plan import BlockList, ModelPlan
from .common.position_slicing import embedded

LATENT = PerFrame((ALL_FRAMES, 2, 2))


def _latent(call):
    num_frames, length = call.latent.shape[2], call.config["video_length"]
    if num_frames not in (1, length):
        raise ConfigError(f"Use a latent of {length} frames, which is a length of {4 * length - 3} in "
                          f"EmptyHunyuanLatentVideo: Latte generates videos of {length} frames, or images of one, and "
                          f"the latent has {num_frames}.")
    return LATENT(call)


def _adapt(model, config):
    """Make each spatial block call the temporal block after it, so that hidden states between blocks are always (B * F,
    T, C).

    diffusers' forward then skips the temporal blocks.
    """
    seen = []                                                  # number of frames of this call's latent

    def both(spatial, temporal, positions):
        spatial_forward = spatial.forward

        def forward(hidden_states, attention_mask, encoder_hidden_states, encoder_attention_mask, timestep,
                    cross_attention_kwargs, class_labels):
            hidden = spatial_forward(hidden_states, encoder_hidden_states=encoder_hidden_states, timestep=timestep)
            num_frames, num_positions = *seen, hidden.shape[1]
            # (B * F, T, C) -> (B * T, F, C)
            turned = hidden.unflatten(0, (-1, num_frames)).transpose(1, 2).flatten(0, 1)
            if positions is not None and num_frames > 1:
                turned = turned + positions().to(turned.dtype)
            turned = temporal(turned, timestep=timestep[::num_frames].repeat_interleave(num_positions, 0))
            return turned.unflatten(0, (-1, num_positions)).transpose(1, 2).flatten(0, 1)
        return forward

    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.__setitem__(slice(None), [kwargs["hidden_states"].shape[2]]
                                                      if "hidden_states" in kwargs else []),
        # the proxy model in ComfyUI is called with other arguments and has no blocks to run
        with_kwargs=True)
    for number, (spatial, temporal) in enumerate(zip(model.transformer_blocks, model.temporal_transformer_blocks)):
        spatial.forward = both(spatial, temporal, None if number else lambda: model.temp_pos_embed)


LATTE = Family(
    name="Latte", title="Latte", transformer="LatteTransformer3DModel", adapt_model=_adapt,
    sampled=Sampled("EPS", {"beta_schedule": "sqrt_linear", "linear_start": 0.0001, "linear_end": 0.02}, "SD15", {
        "latent_dimensions": 3}, memory=0.5),
    num_channels=lambda config: config["in_channels"],
    activation_factors={"residual": 7.65, "held": 1.45, "block": 15.2, "exchange": 14.3, "own": 0.1},
    detection=Detection(
        recognise=has("temporal_transformer_blocks.0.attn1.to_q.weight", "adaln_single.linear.weight"),
        refusals=(folder_alone,),
        config=config_of(
            patch_size=2, norm_type="ada_norm_single", activation_fn="gelu-approximate", norm_elementwise_affine=False,
            sample_size=in_config_json,
            in_channels=in_config_json, out_channels=in_config_json, num_layers=in_config_json,
            num_attention_heads=in_config_json, attention_head_dim=in_config_json,
            attention_bias=in_config_json,
            attention_type=in_config_json, caption_channels=in_config_json, cross_attention_dim=in_config_json,
            norm_eps=in_config_json, norm_num_groups=in_config_json,
            num_embeds_ada_norm=in_config_json, video_length=in_config_json, dropout=in_config_json),
        convert=lambda tensors, config: tensors),
    inputs=Inputs(
        latent=LATENT, conditioning={"context": "caption_channels"},
        arguments={"hidden_states": _latent, "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"), "enable_temporal_attentions": False}),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks.", paired="temporal_transformer_blocks"),),
        streams={"hidden_states": "image"}, attention={"attn1": ("image",)}, positions={"pos_embed": embedded},
        cacheable={"attn2.to_k": "run", "attn2.to_v": "run"}, cacheable_outside={"caption_projection": "run"}),
    testing=SmallConfig({"in_channels": 4, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 8,
                         "num_layers": 4, "patch_size": 2, "sample_size": 8, "cross_attention_dim": 32,
                         "caption_channels": 24, "attention_bias": True, "video_length": 3,
                         "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single",
                         "norm_elementwise_affine": False, "norm_eps": 1e-6, "num_embeds_ada_norm": 1000}))
