"""Tiny random diffusers models of each family, with inputs for them. Used by the exactness tests, in float64."""

from dataclasses import dataclass

import torch

from xdit_backend.models import FAMILIES
from xdit_backend.models.plan import BlockList, Family, ModelPlan, TokenArgument


@dataclass
class Example:
    """A model, its family, and what ComfyUI would hand to it."""

    model: torch.nn.Module
    family: object
    config: dict
    latent: torch.Tensor
    timestep: torch.Tensor
    conditioning: dict

    def run(self):
        """The model's own prediction, like the latent."""
        inputs = self.family.inputs(self.latent, self.timestep, self.conditioning, self.config)
        return self.family.prediction(self.model(**inputs, return_dict=False)[0], self.latent)


SD3 = {"sample_size": 128, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 4, "attention_head_dim": 8,
       "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 24, "pooled_projection_dim": 16,
       "pos_embed_max_size": 32, "qk_norm": "rms_norm", "dual_attention_layers": (0,)}
FLUX = {"patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 4, "joint_attention_dim": 24, "pooled_projection_dim": 16, "guidance_embeds": True,
        "axes_dims_rope": (4, 4, 8)}
WAN = {"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
       "text_dim": 24, "freq_dim": 256, "ffn_dim": 32, "num_layers": 4}
PIXART = {"sample_size": 128, "patch_size": 2, "in_channels": 4, "out_channels": 8, "num_layers": 4, "num_attention_heads": 4,
          "attention_head_dim": 8, "cross_attention_dim": 32, "caption_channels": 24, "attention_bias": True,
          "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single", "norm_elementwise_affine": False,
          "norm_eps": 1e-6, "use_additional_conditions": False}

# A U-shaped model that is no family of the product: its skips cross stages.
HUNYUAN = {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "patch_size": 2, "sample_size": 16, "hidden_size": 32,
           "num_layers": 8, "cross_attention_dim": 24, "cross_attention_dim_t5": 16, "pooled_projection_dim": 16, "text_len": 5,
           "text_len_t5": 6, "use_style_cond_and_image_meta_size": False, "learn_sigma": True}


def _hunyuan_inputs(latent, timestep, conditioning, config, patch=None):
    from diffusers.models.embeddings import get_2d_rotary_pos_embed
    rows, columns = (patch.whole if patch else latent.shape[2]) // 2, latent.shape[3] // 2
    tables = get_2d_rotary_pos_embed(8, ((0, 0), (rows, columns)), (rows, columns), output_type="pt")
    first = patch.start // 2 * columns if patch else 0
    tables = tuple(table.to(latent.dtype)[first:first + latent.shape[2] // 2 * columns] for table in tables)
    ones = [torch.ones(len(latent), length, dtype=torch.long) for length in (5, 6)]
    return {"hidden_states": latent, "timestep": timestep, "encoder_hidden_states": conditioning["context"],
            "text_embedding_mask": ones[0], "encoder_hidden_states_t5": conditioning["t5"], "text_embedding_mask_t5": ones[1],
            "image_rotary_emb": tables}


HUNYUAN_DIT = Family(
    name="HunyuanDiT", transformer="HunyuanDiT2DModel",
    plan=ModelPlan(
        blocks=(BlockList("blocks", "blocks."),), streams={"hidden_states": "image"}, attention={"attn1": ("image",)},
        tokens={"image_rotary_emb": TokenArgument(0, ("image",))}, once={"norm1.linear": "step"},
        skips=lambda num_blocks: {block: num_blocks - 1 - block for block in range(num_blocks // 2 + 1, num_blocks)}),
    recognise=lambda shapes: False, config=lambda shapes: None, convert=lambda tensors, config: tensors, inputs=_hunyuan_inputs,
    prediction=lambda output, latent: output[:, :latent.shape[1]], conditioning=("context", "t5"))

CONFIGS = {"SD3": SD3, "Flux.1": FLUX, "Wan 2.1": WAN, "PixArt-Sigma": PIXART}


def example(name, dtype=torch.float64, rows=6, columns=10, num_text_tokens=7, batch=1, frames=3):
    """A model with seeded weights; rows x columns are latent pixels. The same on every rank."""
    import diffusers
    family, config = (FAMILIES[name], CONFIGS[name]) if name in CONFIGS else (HUNYUAN_DIT, HUNYUAN)
    num_text_tokens = 5 if family is HUNYUAN_DIT else num_text_tokens
    torch.manual_seed(0)
    model = getattr(diffusers, family.transformer)(**config).eval().to(dtype).requires_grad_(False)
    family.amend(model, config)
    generator = torch.Generator().manual_seed(1)
    columns += 60 if name == "PixArt-Sigma" else 0             # it has no positions for latents of less than 66 rows and columns
    shape = (frames, rows, columns) if name == "Wan 2.1" else (rows, columns)
    latent = torch.randn(batch, 4, *shape, generator=generator).to(dtype)
    conditioning = {"context": torch.randn(batch, num_text_tokens, 24, generator=generator).to(dtype)}
    if "y" in family.conditioning:
        conditioning["y"] = torch.randn(batch, 16, generator=generator).to(dtype)
    if "guidance" in family.conditioning:
        conditioning["guidance"] = torch.full((batch,), 3.5, dtype=dtype)
    if "t5" in family.conditioning:
        conditioning["t5"] = torch.randn(batch, 6, 16, generator=generator).to(dtype)
    timestep = torch.full((batch,), 0.7 if name == "Flux.1" else 700.0, dtype=dtype)
    return Example(model, family, config, latent, timestep, conditioning)
