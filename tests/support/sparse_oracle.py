"""The oracle of block-sparse attention: token by token, from the definition in docs/design/sparse-attention.md."""

import math

import torch

BLOCK = 64


def sparse_oracle(q, k, v, query_positions, key_positions, options, sinks=(), dense_rows=(), scale=None):
    """Attention of queries (B, N, T, H) at these positions (T,) to keys and values at theirs.

    options: specs.SparseOptions. sinks: positions whose blocks every query selects. dense_rows: positions of queries
    whose blocks select all.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    rows, columns = query_positions // BLOCK, key_positions // BLOCK
    blocks = columns.unique().tolist()
    members = [(columns == block).nonzero()[:, 0] for block in blocks]
    means = torch.stack([k[:, :, own].mean(2) for own in members], 2)
    centre = means.mean(2, keepdim=True)
    means, keys = means - centre, k - centre
    is_sink = [block in {position // BLOCK for position in sinks} for block in blocks]
    out = torch.zeros_like(q)
    for row in rows.unique().tolist():
        own = (rows == row).nonzero()[:, 0]
        mean = q[:, :, own].mean(2)
        pooled = (means * mean[:, :, None]).sum(3) * scale                     # (B, N, blocks)
        if options.method == "sol-attn":
            deviation = ((mean * scale) ** 2 * (means ** 2).mean(2)).sum(2, keepdim=True)
            chosen = pooled > options.tau * (deviation + 1e-6 / math.log2(math.e) ** 2).sqrt()
        else:
            others = [index for index, sink in enumerate(is_sink) if not sink]
            count = max(0, min(len(others) - 1, max(1, round(options.keep_percent / 100 * len(others)))))
            chosen = torch.zeros_like(pooled, dtype=torch.bool)
            if count:
                least = pooled[..., others].sort(2, descending=True).values[..., count - 1:count]
                chosen[..., others] = pooled[..., others] >= least
        for index, block in enumerate(blocks):
            if abs(block - row) <= 1 or is_sink[index] or row in {position // BLOCK for position in dense_rows}:
                chosen[..., index] = True
        # one softmax over the tokens of chosen blocks, and one pooled key of each other block
        logits = q[:, :, own] @ keys.transpose(2, 3) * scale
        for index, tokens in enumerate(members):
            logits[..., tokens] = logits[..., tokens].masked_fill(~chosen[:, :, None, index:index + 1], -math.inf)
        sizes = torch.tensor([len(tokens) for tokens in members], dtype=q.dtype)
        rest = (pooled + sizes.log()).masked_fill(chosen, -math.inf)[:, :, None].expand(-1, -1, len(own), -1)
        weights = torch.cat([logits, rest], 3).softmax(3)
        values = torch.cat([v, torch.stack([v[:, :, tokens].mean(2) for tokens in members], 2)], 2)
        out[:, :, own] = weights @ values
    return out
