"""AnyFlow: Wan's blocks, conditioned on the timestep at which a step ends, so that few steps suffice. ComfyUI has no
model of it."""

from types import MethodType

import torch
import torch.nn.functional as F

from .common.family import Detection, Family, Inputs, Sampled, SmallConfig
from .common.inputs import (
    Unpacked,
    compute_dtype_of,
    config_of,
    folder_alone,
    frames_first,
    from_conditioning,
    has,
    in_config_json,
    sigma_after,
    stored_dtype,
)
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut

LATENT, TABLE = Unpacked((1, 2, 2)), TokenArgument(0, ("image",))


def _full_sizes(rows, args, kwargs):
    """For Cut: the call's sizes in tokens, (frames, (rows, columns)), for the full latent."""
    layout = kwargs["layout_cfg"]
    sizes = [layout["total_frames"], *layout["full_frame_shape"]]
    sizes[rows.axis] = rows.whole_token_rows
    return args, kwargs | {"layout_cfg": layout | {"total_frames": sizes[0], "full_frame_shape": tuple(sizes[1:])}}


def _rotate(tensor_BTNH, cos, sin):
    """Rotate by float64 tables (T, H / 2), in float32 or wider, as Wan's does. diffusers rotates in float64, which
    consumer GPUs compute at 1/64 of the speed."""
    wide = torch.promote_types(tensor_BTNH.dtype, torch.float32)
    even, odd = tensor_BTNH.to(wide).unflatten(3, (-1, 2)).unbind(4)
    cos, sin = cos.to(wide).unsqueeze(1), sin.to(wide).unsqueeze(1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), 4).flatten(3).type_as(tensor_BTNH)


def _attend(self, hidden_states, rotary_emb, attention_mask=None):
    """Self-attention with real-valued rotary tables. (B, T, C) -> (B, T, C)."""
    query, key, value = (tensor.unflatten(2, (self.heads, -1)) for tensor in (
        self.norm_q(self.to_q(hidden_states)), self.norm_k(self.to_k(hidden_states)), self.to_v(hidden_states)))
    query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
    out = F.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
    return self.to_out[0](out.transpose(1, 2).flatten(2))


def _embed_times(embedder, dtype):
    """The class's forward_timestep, which rounds sinusoids and the gate to the dtype of the weights; for float8
    weights, to the compute dtype. dtype: () -> compute dtype."""
    def embedded(timestep, delta_timestep, encoder_hidden_states, token_per_frame):
        stored = stored_dtype(embedder.time_embedder.linear_1, dtype())
        time, delta = (embed(embedder.timesteps_proj(times.flatten()).to(stored)).type_as(encoder_hidden_states)
                       for embed, times in ((embedder.time_embedder, timestep),
                                            (embedder.delta_embedder, delta_timestep)))
        gate = embedder.delta_emb_gate.to(stored)
        mixed = (1 - gate) * time + gate * delta
        projected = embedder.time_proj(embedder.act_fn(mixed))
        return tuple(each.unflatten(0, timestep.shape).repeat_interleave(token_per_frame, 1)
                     for each in (mixed, projected))
    return embedded


def _adapt(model, config):
    """Use one timestep per video instead of one per token, and real-valued rotary tables."""
    frames_first(model, config)
    embedder, rope = model.condition_embedder, model.rope
    embedder.forward_timestep = _embed_times(embedder, compute_dtype_of(model))
    condition, positions = embedder.forward, rope.forward
    embedder.forward = lambda *args, layout_cfg: condition(*args, layout_cfg=layout_cfg | {"full_token_per_frame": 1})
    rope.forward = lambda **sizes: torch.view_as_real(positions(**sizes)["query"][0, 0]).unbind(2)
    for block in model.blocks:
        block.attn1.forward = MethodType(_attend, block.attn1)


def _time_after(call):
    """The timestep at the end of the step, (B, 1). For calls between the sampler's noise levels, the call's own
    timestep, which gives the velocity there."""
    after = from_conditioning("sigma_after", times=1000)(call)
    return (call.timestep if after is None else after).unsqueeze(1)


ANYFLOW = Family(
    name="AnyFlow", title="AnyFlow", transformer="AnyFlowTransformer3DModel", adapt_model=_adapt,
    pixels=lambda config: (4, 8, 8), sampled=Sampled("FLOW", {"shift": 5.0, "multiplier": 1000.0}, "Wan21", memory=0.9),
    activation_factors={"alone": 9.28, "residual": 12.14, "whole": 8.73, "outside": 5.14, "held": 0.85, "block": 12.59,
                        "exchange": 14.2, "entered": 5.38, "attends": 8.65, "early": 0.85, "cut": 0.69},
    detection=Detection(
        recognise=has("condition_embedder.delta_embedder.linear_1.weight", "blocks.0.attn1.to_q.weight"),
        refusals=(folder_alone,),
        config=config_of(
            patch_size=LATENT.patch, image_dim=None, num_attention_heads=in_config_json,
            attention_head_dim=in_config_json,
            in_channels=in_config_json, out_channels=in_config_json, text_dim=in_config_json, freq_dim=in_config_json,
            ffn_dim=in_config_json, num_layers=in_config_json, cross_attn_norm=in_config_json, eps=in_config_json,
            rope_max_seq_len=in_config_json, gate_value=in_config_json, deltatime_type=in_config_json),
        convert=lambda tensors, config: tensors),
    inputs=Inputs(
        latent=LATENT, per_call_inputs=sigma_after, conditioning={"context": "text_dim", "sigma_after": None},
        arguments={"hidden_states": LATENT, "encoder_hidden_states": from_conditioning("context"),
                   "timestep": lambda call: call.timestep.unsqueeze(1), "r_timestep": _time_after}),
    plan=ModelPlan(
        blocks=(BlockList("blocks", "blocks."),), streams={"hidden_states": "image"}, attention={"attn1": ("image",)},
        tokens={"rotary_emb": TABLE}, positions={"rope": Cut(TABLE, _full_sizes)},
        cacheable={"attn2.to_k": "run", "attn2.to_v": "run"},
        cacheable_outside={"condition_embedder.text_embedder": "run"}),
    testing=SmallConfig({"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12,
                         "in_channels": 16, "out_channels": 16, "text_dim": 24, "freq_dim": 32, "ffn_dim": 32,
                         "num_layers": 4},
                        input_shapes={"sigma_after": lambda config, shape, tokens: (1,)}))
