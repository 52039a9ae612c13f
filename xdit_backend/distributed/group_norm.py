"""Group norm of an image whose rows are split among ranks."""

import torch
from torch.nn.functional import batch_norm

from ..system import accelerator

NORM_ELEMENTS = 2 ** 20        # elements whose moments are computed at once, which takes 8 MB of temporary memory
MAX_CHUNKS = 32                # chunks of an image: in 16 bits the float32 copy of one is a sixteenth of the image
CHANNEL_EPS = 1e-12            # torch.batch_norm_stats returns inverse deviations, and 0 for a constant without it


def group_norm_rows(x, num_groups, weight, bias, eps, split):
    """torch's group norm with the statistics of the complete image. Every rank of the split calls it.

    x: (B, C, ...), this rank's rows in any order. Statistics are float32, or float64 if x is. CPUs process a few groups
    at a time, or a few channels of one, to limit the size of wider copies. The ranks communicate once.
    """
    batch, channels = x.shape[0], x.shape[1] // num_groups     # channels of a group
    moments_BG = split.moments(*own_moments(x, num_groups))
    # torch's batch norm with known moments does the rest in one pass, with every channel of every image as a channel
    mean, variance = (moment.flatten().repeat_interleave(channels) for moment in moments_BG)
    weight, bias = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
    if batch > 1:
        weight, bias = (None if each is None else each.repeat(batch) for each in (weight, bias))
    flat = x.contiguous().view(1, len(mean), *x.shape[2:])
    return batch_norm(flat, mean, variance, weight, bias, eps=eps).view(x.shape)


def own_moments(x, num_groups):
    """Mean and biased variance of each group over this rank's rows, (B, G), float32 or float64; zeros without rows."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], num_groups, dtype=dtype), x.new_zeros(x.shape[0], num_groups, dtype=dtype)
    if accelerator.has_cuda_operators(x.device):
        mean, deviation = torch.batch_norm_stats(x.contiguous().view(1, -1, *x.shape[2:]), CHANNEL_EPS)
        return moments_of_channels(mean, (deviation ** -2 - CHANNEL_EPS).clamp_(min=0), x.shape[0], num_groups)
    channels, most = x.shape[1] // num_groups, max(NORM_ELEMENTS, x.numel() // MAX_CHUNKS)
    if channels > 1 and x.numel() > most * num_groups:         # a group's wider copy would be too large
        return moments_of_channels(*own_moments(x, x.shape[1]), len(x), num_groups)
    at_once = max(1, most * num_groups // x.numel())
    if at_once >= num_groups:
        return _moments(x.to(dtype), channels)
    moments = [_moments(x.narrow(1, group * channels, min(at_once, num_groups - group) * channels).to(dtype), channels)
               for group in range(0, num_groups, at_once)]
    return tuple(torch.cat(each, 1) for each in zip(*moments))


def _moments(x, channels):
    """Mean and biased variance of each group of `channels` channels, (B, G)."""
    # The group norm kernel computes both in one pass: 14 times faster on a CPU than torch.var_mean.
    num_groups = x.shape[1] // channels
    _, mean_BG, deviation_BG = torch.native_group_norm(
        x.contiguous(), None, None, x.shape[0], x.shape[1], x[0, 0].numel(), num_groups, 0.0)
    return mean_BG, deviation_BG ** -2


def moments_of_channels(mean, variance, batch, num_groups):
    """Mean and variance of groups of channels, (B, G), from those of each channel, (B * C,) or (B, C).

    On CUDA one kernel computes all channels' without a wider copy, with a thread block per channel; the group norm
    kernel has one per group, too few to fill the device.
    """
    mean_BGC, variance_BGC = (each.view(batch, num_groups, -1) for each in (mean, variance))
    mean_BG1 = mean_BGC.mean(2, keepdim=True)
    return mean_BG1[:, :, 0], (variance_BGC + (mean_BGC - mean_BG1) ** 2).mean(2)


def global_moments(mean_BG, variance_BG, split):
    """Combine each rank's mean and variance into those of the complete image. Every rank of the split calls it.

    Chan, Golub and LeVeque 1979: the ranks' variances plus the variance of their means, weighted by their fractions of
    the rows. Sums of squares would cancel if the mean is large.
    """
    moments = torch.stack([mean_BG, variance_BG])[None]
    means, variances = split.gather(moments, [1] * len(split.sizes), 0).unbind(1)
    fractions = split.fractions(means)[:, None, None]
    mean_BG = (fractions * means).sum(0)
    return mean_BG, (fractions * (variances + (means - mean_BG) ** 2)).sum(0)
