"""Wan 2.1 and 2.2: one stream over frames, rows and columns; text and CLIP vision tokens by cross-attention; rotary
positions. Bernini's references are tokens after the image's.

ComfyUI concatenates input images to the latent's channels; where Wan 2.2's 5B model keeps conditioning frames instead,
they have their own timesteps.
"""

import torch
import torch.nn.functional as F

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.forward_state import ForwardValue
from .common.inputs import (
    Unpacked,
    blocks,
    config_of,
    diffusers_converter,
    frame_times,
    from_conditioning,
    has,
    only_prefixes,
    optional_size,
    size,
)
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.riflex import with_riflex
from .common.rope_scaling import with_scales
from .wan_bernini import expanded_context, num_context_tokens, with_context

LATENT, ALL = Unpacked((1, 2, 2)), ("image", "reference")
TABLE, TIMES = TokenArgument(1, ALL), TokenArgument(1, ALL, ndim=4)
CONVERT = diffusers_converter("convert_wan_transformer_to_diffusers")
MODULES = {"patch_embedding", "text_embedding", "time_embedding", "time_projection", "blocks", "head", "img_emb"}


# tensors of other families
OTHERS = ("vace_patch_embedding.weight", "control_adapter.conv.weight", "audio_proj.audio_proj_glob_1.layer.weight",
          "face_adapter.fuser_blocks.0.k_norm.weight", "patch_embedding_pose.weight",
          "casual_audio_encoder.encoder.final_linear.weight", "patch_embedding_global.weight", "ref_conv.weight")


def _recognise(shapes):
    return has("blocks.0.self_attn.norm_q.weight", "head.modulation", "patch_embedding.weight")(shapes) \
        and not any(has(name)(shapes) for name in OTHERS)


def _variant(shapes):
    """Name a variant of Wan that has additional modules and is not supported."""
    variants = {"Wan with audio (MultiTalk)": "audio_proj."}
    return next((f"of the variant {name}" for name, tensor in variants.items() if has(tensor)(shapes)), None)


def _convert(tensors, config):
    """Rename the positions of first and last frame, which diffusers' converter does not handle."""
    return CONVERT({name.replace("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"): tensor
                    for name, tensor in tensors.items()}, config)


def _adapt(model, config):
    """Follow ComfyUI where diffusers rounds timesteps to the dtype of the weights, embeds them for each token, and
    assumes 512 text tokens."""
    embedder, sines, frame_sizes, num_vision_tokens = model.condition_embedder, [], [], ForwardValue(model)
    make_sines, embed, condition = embedder.timesteps_proj.forward, embedder.time_embedder.forward, embedder.forward
    model.patch_embedding.register_forward_hook(
        lambda module, args, tokens: frame_sizes.append(tokens.shape[3] * tokens.shape[4]))

    def remember(timestep):
        sines[:] = [make_sines(timestep)]
        return sines[0]

    def conditioned(timestep, text, vision=None, timestep_seq_len=None):
        num_vision_tokens.set(0 if vision is None else vision.shape[1])
        time, projected, *rest = condition(timestep, text, vision, timestep_seq_len)
        frame_size = frame_sizes.pop()
        if timestep_seq_len is not None:                       # one per frame: repeat for all tokens of the frame
            time, projected = time.repeat_interleave(frame_size, 1), projected.repeat_interleave(frame_size, 1)
        return time, projected, *rest

    embedder.timesteps_proj.forward, embedder.forward = remember, conditioned
    embedder.time_embedder.forward = lambda rounded: embed(
        sines[0].to(rounded.dtype if rounded.dtype.itemsize > 4 else torch.float32).view(rounded.shape))
    if config.get("pos_embed_seq_len") is not None:
        embedder.image_embedder.forward = _with_positions(embedder.image_embedder)
    slowed = with_riflex(model, with_scales(model, model.forward), lambda latent: latent.shape[2])
    model.forward = with_context(model, slowed)
    if config.get("added_kv_proj_dim") is not None:
        for block in model.blocks:
            block.attn2.forward = _vision_and_text(block.attn2, num_vision_tokens)


def _with_positions(embedder):
    """Position embedding of a first and a last image for any number of tokens; tokens beyond the last position are
    dropped."""
    def embedded(vision):
        positions = embedder.pos_embed
        vision = vision[:, :positions.shape[1]] + positions[:, :vision.shape[1]]
        return embedder.norm2(embedder.ff(embedder.norm1(vision)))
    return embedded


def _vision_and_text(attn, num_vision_tokens):
    """Sum of cross-attention over an image's tokens and over the text's. Without an image, both are over the text."""
    def heads(tensor):
        return tensor.unflatten(2, (attn.heads, -1)).transpose(1, 2)
    attn.changed_text = lambda query, out: out                 # see injected_networks.install_guide

    def attend(hidden_states, context, *others):
        count = num_vision_tokens.get()
        vision, text = context.split([count, context.shape[1] - count], 1) if count else (context, context)
        # all projections, then their norms
        query, key, vision_key = attn.to_q(hidden_states), attn.to_k(text), attn.add_k_proj(vision)
        query, key, vision_key = heads(attn.norm_q(query)), heads(attn.norm_k(key)), heads(
            attn.norm_added_k(vision_key))
        of_text = attn.changed_text(query, F.scaled_dot_product_attention(query, key, heads(attn.to_v(text))))
        of_vision = F.scaled_dot_product_attention(query, vision_key, heads(attn.add_v_proj(vision)))
        return attn.to_out[0]((of_text + of_vision).transpose(1, 2).flatten(2))
    return attend


class _Plan(ModelPlan):
    audio_attention = ("norm2", "attn2")
    text_attention = "attn2"


WAN = Family(
    name="Wan", title="Wan 2.1, 2.2 text- and image-to-video", transformer="WanTransformer3DModel",
    pixels=lambda config: (4, 16, 16) if config["out_channels"] == 48 else (4, 8, 8), adapt_model=_adapt,
    keep_in_compute_dtype=("patch_embedding",), called_by_nodes=("text_embedding",),
    activation_factors={"alone": 11.2, "residual": 4.3, "whole": 11.2, "outside": 5.3, "held": 1.15, "block": 10.0,
                        "exchange": 13.0},
    detection=Detection(
        recognise=_recognise, refusals=(_variant, only_prefixes(MODULES)),
        config=config_of(
            patch_size=LATENT.patch, in_channels=size("patch_embedding.weight", 1),
            out_channels=size("head.head.weight", 0, 4),
            num_attention_heads=size("patch_embedding.weight", 0, 128), attention_head_dim=128,
            text_dim=size("text_embedding.0.weight", 1), freq_dim=size("time_embedding.0.weight", 1),
            ffn_dim=size("blocks.0.ffn.0.weight", 0), num_layers=blocks("blocks."),
            cross_attn_norm=has("blocks.0.norm3.weight"), image_dim=optional_size("img_emb.proj.1.weight", 1),
            added_kv_proj_dim=optional_size("blocks.0.cross_attn.k_img.weight", 1),
            pos_embed_seq_len=optional_size("img_emb.emb_pos", 1)),
        convert=_convert),
    inputs=Inputs(
        latent=LATENT,
        conditioning={"context": "text_dim", "clip_fea": "image_dim", "rope_scales": None, "riflex": None,
                      "context_latents": None},
        lengths={"reference": num_context_tokens(LATENT)}, ignored=("reference_latent", "denoise_mask"),
        arguments={"hidden_states": LATENT, "timestep": frame_times,
                   "encoder_hidden_states": from_conditioning("context"),
                   "encoder_hidden_states_image": from_conditioning("clip_fea", where="image_dim"),
                   "rope_scales": from_conditioning("rope_scales"), "riflex": from_conditioning("riflex"),
                   "context_latents": expanded_context(LATENT)}),
    plan=_Plan(
        blocks=(BlockList("blocks", "blocks.", patched="double", added="double_block", returns=(ALL,)),),
        streams={"hidden_states": ALL}, attention={"attn1": ALL},
        tokens={"rotary_emb": TABLE, "temb": TIMES}, positions={"rope": Cut(TABLE)},
        cacheable_outside={"condition_embedder.text_embedder": "run"}),
    testing=SmallConfig(
        {"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 7,
         "out_channels": 4, "text_dim": 24, "freq_dim": 256, "ffn_dim": 32, "num_layers": 4, "image_dim": 20,
         "added_kv_proj_dim": 48, "pos_embed_seq_len": 6},
        "comfy.ldm.wan.model:WanModel",
        {"model_type": "t2v", "in_dim": 16, "dim": 256, "ffn_dim": 512, "freq_dim": 256, "text_dim": 4096,
         "out_dim": 16, "num_heads": 2, "num_layers": 3,
         "text_len": 512}, more={"model_type": "i2v", "flf_pos_embed_token_number": 8}))
