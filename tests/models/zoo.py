"""Tiny random diffusers models of each family, with inputs for them. Used by the exactness tests, in float64."""

from dataclasses import dataclass

import torch

from xdit_backend.models import FAMILIES


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
CONFIGS = {"SD3": SD3, "Flux.1": FLUX, "Wan 2.1": WAN, "PixArt-Sigma": PIXART}


def example(name, dtype=torch.float64, rows=6, columns=10, num_text_tokens=7, batch=1, frames=3):
    """A model with seeded weights; rows x columns are latent pixels. The same on every rank."""
    import diffusers
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = getattr(diffusers, family.transformer)(**CONFIGS[name]).eval().to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    shape = (frames, rows, columns) if name == "Wan 2.1" else (rows, columns)
    latent = torch.randn(batch, 4, *shape, generator=generator).to(dtype)
    conditioning = {"context": torch.randn(batch, num_text_tokens, 24, generator=generator).to(dtype)}
    if "y" in family.conditioning:
        conditioning["y"] = torch.randn(batch, 16, generator=generator).to(dtype)
    if "guidance" in family.conditioning:
        conditioning["guidance"] = torch.full((batch,), 3.5, dtype=dtype)
    timestep = torch.full((batch,), 0.7 if name == "Flux.1" else 700.0, dtype=dtype)
    return Example(model, family, CONFIGS[name], latent, timestep, conditioning)
