"""HunyuanVideo from text, and from an image as additional channels. Two streams, then one; joint attention, image
first; guidance."""

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, all_text, blocks, config_of, even_sides, from_conditioning, has, size, timestep
from .common.key_mapping import SWAPPED, table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.riflex import with_riflex
from .common.tp_plan import PARALLEL_MLP
from .hunyuan_first_frame import install_first_frame

LATENT, BOTH, TABLE = Unpacked((1, 2, 2)), ("image", "text"), TokenArgument(0, ("image",))
TABLES = (TABLE,) * 4 + (TokenArgument(0, ("text",)),)         # rotary tables, and masks of the first frame's tokens

KEYS = table(                                                  # both the publisher's and ComfyUI's names
    (r"(_in|_embedder)\.(?:mlp\.0|in_layer|linear_1)\.", r"\1.linear_1."),
    (r"(_in|_embedder)\.(?:mlp\.2|out_layer|linear_2)\.", r"\1.linear_2."),
    (r"^time_in\.", "time_text_embed.timestep_embedder."), (r"^guidance_in\.", "time_text_embed.guidance_embedder."),
    (r"^vector_in\.", "time_text_embed.text_embedder."), (r"^img_in\.", "x_embedder."),
    (r"^txt_in\.input_embedder\.", "context_embedder.proj_in."),
    (r"^txt_in\.t_embedder\.", "context_embedder.time_text_embed.timestep_embedder."),
    (r"^txt_in\.c_embedder\.", "context_embedder.time_text_embed.text_embedder."),
    (r"^txt_in\.individual_token_refiner\.blocks\.", "context_embedder.token_refiner.refiner_blocks."),
    (r"(refiner_blocks\.\d+)\.adaLN_modulation\.1\.", r"\1.norm_out.linear."),
    (r"(refiner_blocks\.\d+)\.mlp\.", r"\1.ff."),
    (r"\.(?:self_attn|img_attn)[._]qkv\.", (".attn.to_q.", ".attn.to_k.", ".attn.to_v."), (1, 1, 1)),
    (r"\.txt_attn[._]qkv\.", (".attn.add_q_proj.", ".attn.add_k_proj.", ".attn.add_v_proj."), (1, 1, 1)),
    (r"\.linear1\.", (".attn.to_q.", ".attn.to_k.", ".attn.to_v.", ".proj_mlp."), (1, 1, 1, 4)),
    (r"\.linear2\.", ".proj_out."),
    (r"\.txt_attn(?:_|\.norm\.)(q|k)(?:uery|ey)?_norm\.\w+$", r".attn.norm_added_\1.weight"),
    (r"(?:\.img_attn)?(?:[._]|\.norm\.)(q|k)(?:uery|ey)?_norm\.\w+$", r".attn.norm_\1.weight"),
    (r"\.(?:self_attn|img_attn)[._]proj\.", ".attn.to_out.0."), (r"\.txt_attn[._]proj\.", ".attn.to_add_out."),
    (r"\.img_mod\.lin(?:ear)?\.", ".norm1.linear."), (r"\.txt_mod\.lin(?:ear)?\.", ".norm1_context.linear."),
    (r"\.modulation\.lin(?:ear)?\.", ".norm.linear."),
    (r"\.img_mlp\.", ".ff."), (r"\.txt_mlp\.", ".ff_context."),
    (r"(\.ff(?:_context)?)\.(?:0|fc1)\.", r"\1.net.0.proj."),
    (r"(\.ff(?:_context)?)\.(?:2|fc2)\.", r"\1.net.2."),
    (r"^double_blocks\.", "transformer_blocks."), (r"^single_blocks\.", "single_transformer_blocks."),
    (r"^final_layer\.linear\.", "proj_out."), (r"^final_layer\.adaLN_modulation\.1\.", "norm_out.linear.", SWAPPED))


def _num_first_frame_tokens(call):
    """Number of tokens of the first frame in this latent or patch."""
    after_it = call.patch is not None and call.patch.dim == 2 and call.patch.start > 0
    return 0 if after_it else LATENT.num_tokens((1, 1, 1, *call.latent.shape[3:]))


def _adapt(model, config):
    """Allow a workflow to disable guidance, as ComfyUI's model does, and support first-frame conditioning."""
    embed = model.time_text_embed
    forward = embed.forward

    def embedded(timestep, text, guidance=None):
        if guidance is not None or not config["guidance_embeds"]:
            return forward(timestep, text, guidance)
        return embed.timestep_embedder(embed.time_proj(timestep).to(text.dtype)) + embed.text_embedder(text), None
    embed.forward = embedded
    install_first_frame(model)
    model.forward = with_riflex(model, model.forward, lambda latent: latent.shape[2])


HUNYUAN_VIDEO = Family(
    name="HunyuanVideo", title="HunyuanVideo text- and image-to-video", transformer="HunyuanVideoTransformer3DModel",
    cfg="at cfg above 1", adapt_model=_adapt, pixels=lambda config: (4, 8, 8),
    activation_factors={"alone": 18.2, "residual": 4.2, "whole": 7.9, "outside": 3.3, "held": 0.2, "block": 18.0,
                        "exchange": 20.0, "own": 0.0},
    detection=Detection(
        recognise=has("txt_in.individual_token_refiner.blocks.0.norm1.weight", "vector_in."),
        config=config_of(
            patch_size=2, patch_size_t=1, in_channels=size("img_in.proj.weight", 1),
            out_channels=size("final_layer.linear.weight", 0, 4),
            num_attention_heads=size("img_in.proj.weight", 0, 128), attention_head_dim=128,
            num_layers=blocks("double_blocks."), num_single_layers=blocks("single_blocks."),
            num_refiner_layers=blocks("txt_in.individual_token_refiner.blocks."),
            guidance_embeds=has("guidance_in."), text_embed_dim=size("txt_in.input_embedder.weight", 1),
            rope_axes_dim=(16, 56, 56),
            pooled_projection_dim=lambda shapes: shapes.get("vector_in.in_layer.weight",
                                                            shapes.get("vector_in.mlp.0.weight"))[1]),
        convert=KEYS),
    inputs=Inputs(
        latent=LATENT,
        conditioning={"context": "text_embed_dim", "y": "pooled_projection_dim", "guidance": None,
                      "guiding_frame_index": None, "riflex": None},
        arguments={"hidden_states": even_sides("HunyuanVideo", LATENT), "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"), "encoder_attention_mask": all_text,
                   "pooled_projections": from_conditioning("y"),
                   "guidance": from_conditioning("guidance", times=1000, where="guidance_embeds"),
                   "riflex": from_conditioning("riflex"), "first_frame_time": from_conditioning("guiding_frame_index"),
                   "num_first_frame_tokens": _num_first_frame_tokens}),
    plan=ModelPlan(
        tp_plan=PARALLEL_MLP, takes_output_patches=True,
        blocks=(BlockList("transformer_blocks", "double_blocks.", returns=BOTH, image_fraction=0.5, control="input",
                          patched="double"),
                BlockList("single_transformer_blocks", "single_blocks.", "num_single_layers", returns=BOTH,
                          control="output", patched="single")),
        streams={"hidden_states": "image", "encoder_hidden_states": "text"}, attention={"attn": BOTH}, needs_text=True,
        tokens={"image_rotary_emb": TABLES, "freqs_cis": TABLES}, masks={"attention_mask": ()},
        positions={"rope": Cut(TABLES)},
        cacheable={"norm1.linear": "step", "norm1_context.linear": "step", "norm.linear": "step"},
        cacheable_outside={"context_embedder": "step"}),
    testing=SmallConfig(
        {"patch_size": 2, "patch_size_t": 1, "in_channels": 9, "out_channels": 4, "num_layers": 2,
         "num_single_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16, "num_refiner_layers": 1,
         "text_embed_dim": 24, "pooled_projection_dim": 16, "rope_axes_dim": (4, 6, 6), "guidance_embeds": True},
        "comfy.ldm.hunyuan_video.model:HunyuanVideo",
        {"in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 48, "hidden_size": 256,
         "mlp_ratio": 4.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 256,
         "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False,
         "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False}))
