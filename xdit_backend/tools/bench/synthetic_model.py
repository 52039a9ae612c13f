"""A random Flux-shaped transformer in a diffusers folder, and calls of it, for timing."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ...host.calls import Call
from ...protocol.errors import ConfigError

HEAD_SIZE = 64


@dataclass(frozen=True)
class Setting:
    """The model and its inputs: a Flux of this width and depth, on a latent of this many tokens."""

    width: int
    num_double_blocks: int
    num_single_blocks: int
    num_image_tokens: int
    num_text_tokens: int
    dtype: str

    @property
    def rows(self):
        """Latent rows and columns: two per token along each side."""
        side = 2 * round(self.num_image_tokens ** 0.5)
        if (side // 2) ** 2 != self.num_image_tokens:
            raise ConfigError(f"Use tokens={(side // 2) ** 2}: {self.num_image_tokens} is not a square number.")
        return side

    def exchanged(self, degrees):
        """Elements that a rank sends in one block's attention: Ulysses 4 (S/D) h (U-1)/U, Ring 2 (S/R) (h/U) (R-1), for
        its heads.

        S includes text, which is sharded too (docs/design/layouts.md).
        """
        ring, ulysses = degrees["ring"], degrees["ulysses"]
        tokens, width = self.num_image_tokens + self.num_text_tokens, self.width / degrees["tensor"]
        return (4 * tokens / (ring * ulysses) * width * (ulysses - 1) / ulysses
                + 2 * tokens / ring * width / ulysses * (ring - 1))

    def added_up(self, degrees):
        """Elements that a rank sends for tensor parallelism: 2 (X-1)/X (S/D) h per all-reduce, two in a double block
        and one in a single block; (X-1)/X of 12 h and 3 h elements of modulation (docs/design/tensor.md)."""
        tensor, tokens = degrees["tensor"], (self.num_image_tokens
                                             + self.num_text_tokens) / (degrees["ring"] * degrees["ulysses"])
        sums = 2 * self.num_double_blocks + self.num_single_blocks
        modulation = 12 * self.num_double_blocks + 3 * self.num_single_blocks
        return (tensor - 1) / tensor * self.width * (2 * tokens * sums + modulation)

    @property
    def split_elements(self):
        """Parameters that tensor parallelism shards: 36 h^2 and 26 h of a double block, 15 h^2 and 10 h of a single
        block; norms and the biases of row-parallel layers are not sharded."""
        return (self.num_double_blocks * (36 * self.width + 26) + self.num_single_blocks
                * (15 * self.width + 10)) * self.width


def write_model(setting, folder):
    """Write a random transformer in diffusers' format."""
    from diffusers import FluxTransformer2DModel
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**model_config(setting))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, setting.dtype))
    model.save_pretrained(Path(folder) / "transformer")


def model_config(setting):
    return {"patch_size": 1, "in_channels": 64, "num_layers": setting.num_double_blocks,
            "num_single_layers": setting.num_single_blocks, "attention_head_dim": HEAD_SIZE,
            "num_attention_heads": setting.width // HEAD_SIZE, "joint_attention_dim": 256, "pooled_projection_dim": 64,
            "guidance_embeds": False, "axes_dims_rope": (8, 28, 28)}


def calls(setting, num_branches):
    """One call per branch, as in a sampler's step."""
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(1, 16, setting.rows, setting.rows, generator=generator)
    return [Call(latent, torch.tensor([0.7]), {
        "context": torch.randn(1, setting.num_text_tokens, 256, generator=generator),
        "y": torch.randn(1, 64, generator=generator)}) for _ in range(num_branches)]
