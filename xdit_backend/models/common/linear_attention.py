"""Linear attention for diffusers' models, which exposes its sums over tokens so that ranks can add them up.

# B batch, N heads, T tokens, H head size
"""

from types import MethodType

import torch


def attending(attend):
    """For Family.adapt_model: replace the forward of attn1 in each block. That of diffusers neither exposes its sums
    nor keeps a dtype wider than float32."""
    def adapt_model(model, config):
        for block in model.transformer_blocks:
            block.attn1.forward = MethodType(attend, block.attn1)
    return adapt_model


def projected(attention, hidden_states):
    """Queries and keys, none below 0, and values: (B, N, T, H), in float32 or wider."""
    def heads(tensor):
        return tensor.unflatten(2, (attention.heads, -1)).transpose(1, 2).to(wide)

    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    query, key = attention.to_q(hidden_states), attention.to_k(hidden_states)
    if attention.norm_q is not None:
        query, key = attention.norm_q(query), attention.norm_k(key)
    return heads(query).relu(), heads(key).relu(), heads(attention.to_v(hidden_states))
