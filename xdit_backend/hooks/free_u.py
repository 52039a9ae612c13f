"""FreeU (Si et al. 2024, arXiv 2309.11497): what a U-Net's way up gives is made stronger, and the low frequencies of
what it is joined with, the skip, weaker. Called by unet.py, on whole images.

# B batch, C channels, H rows, W columns
"""

import torch


def free_u(hidden_BCHW, skip_BCHW, given):
    """The two, as ComfyUI's nodes change them before they are joined; none is written to. given: a specs.FreeU."""
    scales = given.scales.get(str(hidden_BCHW.shape[1]))
    if scales is None:
        return hidden_BCHW, skip_BCHW
    strength, weakness = scales
    half = hidden_BCHW.shape[1] // 2
    if given.by_mean:                                          # its second version
        mean = hidden_BCHW.mean(1, keepdim=True)
        low, high = (chosen(mean, (2, 3), keepdim=True) for chosen in (torch.amin, torch.amax))
        strength = (strength - 1) * ((mean - low) / (high - low)) + 1
    hidden = torch.cat([hidden_BCHW[:, :half] * strength, hidden_BCHW[:, half:]], 1)
    return hidden, _without_low(skip_BCHW, weakness)


def _without_low(skip_BCHW, scale):
    """The four lowest frequencies times scale."""
    frequencies = torch.fft.fftshift(torch.fft.fftn(skip_BCHW.float(), dim=(-2, -1)), dim=(-2, -1))
    row, column = (length // 2 for length in skip_BCHW.shape[-2:])
    frequencies[..., row - 1:row + 1, column - 1:column + 1] *= scale
    return torch.fft.ifftn(torch.fft.ifftshift(frequencies, dim=(-2, -1)), dim=(-2, -1)).real.to(skip_BCHW.dtype)
