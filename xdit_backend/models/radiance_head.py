"""Input and output of pixel models, in place of an autoencoder: tokens are patches of pixels, and after the transformer
a small network per patch predicts its pixels. For Family.adapt_model.

# B batch, T tokens, P pixels of a patch, C channels of a pixel, W width of a token, M patches (B * T)
"""

import torch
import torch.nn.functional as F
from torch import nn

TILE = 512                     # patches processed at a time, as in ComfyUI: each has weights of its own


class PatchLinear(nn.Conv2d):
    """A convolution with non-overlapping patches, applied to patches that are already cut. (B, T, C * P) -> (B, T,
    W)."""

    def forward(self, tokens):
        return F.linear(tokens, self.weight.flatten(1), self.bias)


class PixelEmbedder(nn.Module):
    """A linear layer of each pixel and cosines of its position in the patch: (M, P, C) -> (M, P, width). Computes in
    float32 or wider, as ComfyUI does."""

    def __init__(self, num_channels, width, num_frequencies):
        super().__init__()
        self.num_frequencies = num_frequencies
        self.embedder = nn.Sequential(nn.Linear(num_channels + num_frequencies ** 2, width))

    def forward(self, pixels):
        wide = pixels.to(torch.promote_types(pixels.dtype, torch.float32))
        positions = self.positions(round(pixels.shape[1] ** 0.5), wide).expand(len(wide), -1, -1)
        return self.embedder(torch.cat([wide, positions], 2)).to(pixels.dtype)

    def positions(self, side, like):
        """Products of cosines along columns and rows, divided by 1 + the product of their frequencies: (P,
        num_frequencies ** 2)."""
        kind = {"dtype": like.dtype, "device": like.device}
        steps, along = torch.arange(self.num_frequencies, **kind), torch.linspace(0, 1, side, **kind)
        waves = torch.cos(along[:, None] * steps * torch.pi)                   # (side, frequencies)
        both = waves[None, :, :, None] * waves[:, None, None, :] / (1 + steps[:, None] * steps)
        return both.flatten(2).flatten(0, 1)


class PatchNetworkBlock(nn.Module):
    """A gated feed-forward whose weights a linear layer computes from the patch's token. pixels: (M, P, width);
    tokens: (M, W)."""

    def __init__(self, token_width, width, ratio):
        super().__init__()
        self.param_generator = nn.Linear(token_width, 3 * width ** 2 * ratio)
        self.norm = nn.RMSNorm(width)

    def forward(self, pixels, tokens):
        width = pixels.shape[2]
        gate, value, out = self.param_generator(tokens).chunk(3, 1)
        gate, value = (F.normalize(each.unflatten(1, (width, -1)), dim=1) for each in (gate, value))
        out, normed = F.normalize(out.unflatten(1, (-1, width)), dim=1), self.norm(pixels)
        return pixels + torch.bmm(F.silu(torch.bmm(normed, gate)) * torch.bmm(normed, value), out)


class LinearHead(nn.Module):
    """(B, width, rows, columns) to pixels, independently."""

    def __init__(self, width, num_channels):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(width), nn.Linear(width, num_channels)

    def forward(self, features):
        return self.linear(self.norm(features.movedim(1, -1))).movedim(-1, 1)


class ConvolutionHead(nn.Module):
    """(B, width, rows, columns) to pixels, with their neighbours: reads one row beyond a patch."""

    def __init__(self, width, num_channels):
        super().__init__()
        self.norm, self.conv = nn.RMSNorm(width), nn.Conv2d(width, num_channels, 3, padding=1)

    def forward(self, features):
        return self.conv(self.norm(features.movedim(1, -1)).movedim(-1, 1))


def run_patch_networks(embedder, networks, pixels, tokens):
    """Run the patch networks. pixels: (M, P, C); tokens: (M, W). Returns (M, P, width)."""
    def run(some, of):
        some = embedder(some)
        for network in networks:
            some = network(some, of)
        return some
    return torch.cat([run(some, of) for some, of in zip(pixels.split(TILE), tokens.split(TILE))])
