"""HunyuanDiT: one stream; two texts by cross-attention; blocks of the second half take skips from blocks of the
first half."""

from types import MethodType

import torch
import torch.nn.functional as F

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, blocks, config_of, from_conditioning, has, size, timestep, token_range
from .common.key_mapping import SWAPPED, table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.tp_plan import REPLICATED

LATENT, BASE = Unpacked((2, 2)), 32                            # tokens along the longer side in the units of positions
WIDTH, HEAD_SIZE, NUM_BLOCKS = size("x_embedder.proj.weight",
                                    0), size("blocks.0.attn1.q_norm.weight", 0), blocks("blocks.")
TEXTS = ("context", "text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5")

KEYS = table(
    (r"^x_embedder\.", "pos_embed."), (r"^mlp_t5\.0\.", "text_embedder.linear_1."),
    (r"^mlp_t5\.2\.", "text_embedder.linear_2."),
    (r"^(pooler|style_embedder)\.", r"time_extra_emb.\1."),
    (r"^extra_embedder\.0\.", "time_extra_emb.extra_embedder.linear_1."),
    (r"^extra_embedder\.2\.", "time_extra_emb.extra_embedder.linear_2."),
    (r"^t_embedder\.mlp\.0\.", "time_extra_emb.timestep_embedder.linear_1."),
    (r"^t_embedder\.mlp\.2\.", "time_extra_emb.timestep_embedder.linear_2."), (r"^final_layer\.linear\.", "proj_out."),
    (r"^final_layer\.adaLN_modulation\.1\.", "norm_out.linear.", SWAPPED),
    (r"\.default_modulation\.1\.", ".norm1.linear."),
    (r"\.norm1\.(weight|bias)", r".norm1.norm.\1"), (r"\.norm2\.", ".norm_of_mlp."), (r"\.norm3\.", ".norm2."),
    (r"\.norm_of_mlp\.", ".norm3."), (r"\.attn1\.Wqkv\.", (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."), (1, 1, 1)),
    (r"\.attn2\.q_proj\.", ".attn2.to_q."), (r"\.attn2\.kv_proj\.", (".attn2.to_k.", ".attn2.to_v."), (1, 1)),
    (r"\.out_proj\.", ".to_out.0."), (r"\.([qk])_norm\.", r".norm_\1."), (r"\.mlp\.fc1\.", ".ff.net.0.proj."),
    (r"\.mlp\.fc2\.", ".ff.net.2."))


def _texts(call):
    """The first text, its mask of real tokens, the second text, and its mask. Raises ConfigError for texts of
    another model."""
    texts = [from_conditioning(name)(call) for name in TEXTS]
    needed = call.config["text_len"], call.config["text_len_t5"]
    if any(text is None for text in texts) or any(text.shape[1] < least for text, least in zip(texts[::2], needed)):
        lengths = " and ".join("none" if text is None else str(text.shape[1]) for text in texts[::2])
        raise ConfigError("Use the CLIP of HunyuanDiT's checkpoint, and CLIP Text Encode: HunyuanDiT takes two "
                          f"texts with masks, of at least {needed[0]} and {needed[1]} tokens, and the conditioning "
                          f"has {lengths}.")
    return texts


def _num_text_tokens(conditioning):
    return sum(conditioning[name].shape[1] for name in TEXTS[::2] if name in conditioning)


def _sizes(call):
    """Height and width of the image, of the target, and the crop offset, (B, 6). Versions before 1.2 take them."""
    sizes = from_conditioning("image_meta_size")(call)
    return call.latent.new_zeros(len(call.latent), 6) if sizes is None else sizes.contiguous()


def _rotary(call):
    """Cosines and sines of the columns' and rows' positions, each (tokens, head size).

    Positions are those of an image with BASE tokens per side, into which this one is scaled and centred.
    """
    first, count, num_tokens = token_range(call, LATENT)
    columns, device, width = LATENT.counts(call.latent.shape)[1], call.latent.device, call.config[
        "attention_head_dim"] // 2
    rows = num_tokens // columns
    frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2, device=device).float() / width)

    def angles(count):
        side = round(BASE / max(rows, columns) * count)
        positions = round((BASE - side) / 2) + torch.arange(count, dtype=torch.float64, device=device) * (side / count)
        return positions.float()[:, None] * frequencies

    shape = (rows, columns, -1)
    both = torch.cat([angles(columns).expand(shape), angles(rows)[:, None].expand(shape)], 2).flatten(0, 1)
    own = both[first:first + count].repeat_interleave(2, 1)
    return own.cos().to(call.latent), own.sin().to(call.latent)


def _adapt(model, config):
    """Replace the forward: ComfyUI takes texts of any length, and computes norms and rotations in the compute dtype.
    diffusers' attention pooling bypasses its linear modules."""
    for module in model.modules():
        if type(module).__name__ == "FP32LayerNorm":
            module.forward = MethodType(torch.nn.LayerNorm.forward, module)
    model.time_extra_emb.pooler.forward = MethodType(_pool, model.time_extra_emb.pooler)
    for block in model.blocks:
        block.attn1.forward, block.attn2.forward = (MethodType(_attend, attention)
                                                    for attention in (block.attn1, block.attn2))

    def forward(latent, timestep, texts, sizes, rotary, return_dict):
        first, first_mask, second, second_mask = texts
        learned, style = model.text_embedding_padding, torch.zeros(len(latent), dtype=torch.long, device=latent.device)
        text = torch.cat([_padded(first, first_mask, learned[:config["text_len"]]),
                          _padded(model.text_embedder(second), second_mask, learned[config["text_len"]:])], 1)
        time = model.time_extra_emb(timestep, second[:, :config["text_len_t5"]], sizes, style,
                                    hidden_dtype=latent.dtype)
        hidden, skips, half = model.pos_embed(latent), [], len(model.blocks) // 2
        for number, block in enumerate(model.blocks):
            hidden = block(hidden, text, time, rotary, skips.pop() if number > half else None)
            if number < half - 1:
                skips.append(hidden)
        tokens = model.proj_out(model.norm_out(hidden, time))
        # (B, n * m, p * q * C) -> (B, C, n * p, m * q)
        cut = tokens.unflatten(2, (2, 2, -1)).unflatten(1, LATENT.counts(latent.shape))
        return (cut.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3),)
    model.forward = forward


def _padded(text, mask, learned):
    """Replace tokens that are not real, among the last of a text, by learned ones."""
    last = torch.where(mask[:, -len(learned):, None].bool(), text[:, -len(learned):], learned.to(text.dtype))
    return torch.cat([text[:, :-len(learned)], last], 1)


def _pool(self, tokens):
    """Attention pooling with the mean of a text's tokens as the query. (B, T, C) -> (B, C)."""
    def heads(tensor):
        return tensor.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1) + self.positional_embedding.to(tokens.dtype)
    out = F.scaled_dot_product_attention(heads(self.q_proj(tokens[:, :1])), heads(self.k_proj(tokens)),
                                         heads(self.v_proj(tokens)))
    return self.c_proj(out.transpose(1, 2).flatten(2))[:, 0]


def _attend(self, hidden_states, encoder_hidden_states=None, image_rotary_emb=None):
    def heads(tensor):
        return tensor.unflatten(2, (self.heads, -1)).transpose(1, 2)           # (B, N, T, H)

    def rotated(tensor):
        cos, sin = image_rotary_emb
        return tensor * cos + torch.stack([-tensor[..., 1::2], tensor[..., 0::2]], -1).flatten(-2) * sin

    read = hidden_states if encoder_hidden_states is None else encoder_hidden_states
    query, key = rotated(self.norm_q(heads(self.to_q(hidden_states)))), self.norm_k(heads(self.to_k(read)))
    out = F.scaled_dot_product_attention(query, rotated(key) if encoder_hidden_states is None else key,
                                         heads(self.to_v(read)))
    return self.to_out[0](out.transpose(1, 2).flatten(2))


class _Plan(ModelPlan):
    def skips(self, num_blocks):
        return {block: num_blocks - 1 - block for block in range(num_blocks // 2 + 1, num_blocks)}


HUNYUAN_DIT = Family(
    name="HunyuanDiT", title="HunyuanDiT 1.0 to 1.2", transformer="HunyuanDiT2DModel", adapt_model=_adapt,
    num_channels=lambda config: config["in_channels"],
    activation_factors={"alone": 13.95, "residual": 5.35, "whole": 7.5, "outside": 4.85, "held": 1.1, "block": 14.9,
                        "exchange": 15.45, "own": 0.05},
    detection=Detection(
        recognise=has("mlp_t5.0.weight", "text_embedding_padding"),
        config=config_of(
            num_layers=NUM_BLOCKS, patch_size=2, sample_size=128, in_channels=size("x_embedder.proj.weight", 1),
            hidden_size=WIDTH,
            attention_head_dim=HEAD_SIZE, num_attention_heads=lambda shapes: WIDTH(shapes) // HEAD_SIZE(shapes),
            # as in ComfyUI
            mlp_ratio=lambda shapes: 4.3637 if (WIDTH(shapes), NUM_BLOCKS(shapes)) == (1408, 40) else 4.0,
            learn_sigma=True,
            cross_attention_dim=size("mlp_t5.2.weight", 0), cross_attention_dim_t5=size("mlp_t5.0.weight", 1),
            pooled_projection_dim=size("pooler.c_proj.weight", 0),
            use_style_cond_and_image_meta_size=has("style_embedder.weight"),
            text_len=lambda shapes: shapes["text_embedding_padding"][0] - shapes["pooler.positional_embedding"][0] + 1,
            text_len_t5=lambda shapes: shapes["pooler.positional_embedding"][0] - 1),
        convert=KEYS, config_from_tensors=("sample_size",)),
    inputs=Inputs(
        latent=LATENT,
        conditioning={"context": "cross_attention_dim", "text_embedding_mask": None,
                      "encoder_hidden_states_t5": "cross_attention_dim_t5", "text_embedding_mask_t5": None,
                      "image_meta_size": None},
        lengths={"text": _num_text_tokens},
        arguments={"latent": LATENT, "timestep": timestep(), "texts": _texts, "sizes": _sizes, "rotary": _rotary}),
    plan=_Plan(
        blocks=(BlockList("blocks", "blocks.", control="output", patched="double"),),
        streams={"hidden_states": "image"},
        attention={"attn1": ("image",)}, tokens={"image_rotary_emb": TokenArgument(0, ("image",))},
        tp_plan={"skip_linear": REPLICATED},
        cacheable={"norm1.linear": "step", "attn2.to_k": "run", "attn2.to_v": "run"},
        cacheable_outside={"text_embedder": "run", "time_extra_emb.pooler": "run"}),
    testing=SmallConfig(
        {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "patch_size": 2, "sample_size": 16,
         "hidden_size": 32, "num_layers": 8, "cross_attention_dim": 24, "cross_attention_dim_t5": 16,
         "pooled_projection_dim": 16, "text_len": 5, "text_len_t5": 6, "use_style_cond_and_image_meta_size": False,
         "learn_sigma": True},
        "comfy.ldm.hydit.models:HunYuanDiT",
        {"depth": 6, "hidden_size": 96, "num_heads": 4, "text_states_dim": 48, "text_states_dim_t5": 64, "text_len": 8,
         "text_len_t5": 10},
        more={"size_cond": True, "use_style_cond": True}, detected="HunyuanDiT"))
