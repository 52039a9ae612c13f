"""Attention with sparse weights for PLADIS (Kim et al. 2025, arXiv 2503.07677), which extrapolates from the weights of
softmax to those of entmax.

# B batch, N heads, T tokens, H head size
"""

import torch


def sparse_attention(q_BNTH, k_BNTH, v_BNTH, entmax, scale=None):
    """Attention with weights `scale` x entmax + (1 - `scale`) x softmax. entmax: a specs.Entmax. scale: of the logits;
    None: torch's default."""
    logits = q_BNTH @ k_BNTH.transpose(2, 3) * (q_BNTH.shape[3] ** -0.5 if scale is None else scale)
    weights = entmax.scale * entmax_weights(logits, entmax.alpha) + (1 - entmax.scale) * logits.softmax(-1)
    return weights.to(v_BNTH.dtype) @ v_BNTH


def entmax_weights(logits, alpha):
    """Entmax over the last dim, exactly, by sorting. alpha 1.5: Peters, Niculae and Martins 2019, arXiv 1905.05702,
    algorithm 2. alpha 2: sparsemax (Martins and Astudillo 2016, arXiv 1602.02068), algorithm 1."""
    assert alpha in (1.5, 2.0), "entmax has a solution by sorting for two values of alpha"
    logits = (logits - logits.amax(-1, keepdim=True)) * (alpha - 1)
    descending = logits.sort(-1, descending=True).values
    count = torch.arange(1, logits.shape[-1] + 1, device=logits.device, dtype=logits.dtype)
    if alpha == 2:
        excess = descending.cumsum(-1) - 1
        thresholds, size = excess / count, (count * descending > excess).sum(-1, keepdim=True)
    else:
        mean = descending.cumsum(-1) / count
        deviation = count * (descending.square().cumsum(-1) / count - mean.square())
        thresholds = mean - ((1 - deviation) / count).clamp_min(0).sqrt()
        size = (thresholds <= descending).sum(-1, keepdim=True)
    return (logits - thresholds.gather(-1, size - 1)).clamp_min(0) ** (1 / (alpha - 1))
