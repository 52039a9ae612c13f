"""Block-sparse attention: exact over the selected blocks of keys, pooled over the others.

Sol-Attn (arXiv 2607.24027) with an adaptive threshold, and the top-k selection of SLA (arXiv 2509.24006), as
comfy-kitchen defines them for ComfyUI's node BlockSparseAttention. docs/design/sparse-attention.md.

# B batch, N heads, T tokens, H head size, Q blocks of queries, K blocks of keys
"""

import functools
import math
from dataclasses import dataclass

import torch

from ..protocol.specs import SOL_ATTN
from ..protocol.specs import SPARSE_BLOCK as BLOCK
from .backends import HALF, attention_with_lse, capability_of
from .log_sum_exp import merge_attention

EPSILON = 1e-6 * math.log(2) ** 2          # added to the variance of logits: 1e-6 for logits in base 2
NO_KEYS = -1e30                            # log-sum-exp of a row without keys: finite, so that a merge gives no NaN
MAX_GATHERED = 2 ** 22                     # elements of the keys that are gathered at once
MAX_LOGITS = 2 ** 26                       # pooled logits of the heads that are selected for at once
MAX_PADDING = 1.25                         # of rows with different numbers of keys that are computed at once
FLEX_HEAD_SIZES = 64, 128                  # head sizes that FlexAttention computes


@dataclass(frozen=True)
class BlockLayout:
    """Positions of a tensor's tokens in the model's sequence, whose blocks begin at multiples of BLOCK.

    runs: (position of the first token, number of tokens) of consecutive ones, in the order of the tensor. A block may
    have some of its tokens in another tensor.
    """

    runs: tuple[tuple[int, int], ...]

    @functools.cached_property
    def spans(self):
        """[(first block, number of blocks)] of consecutive blocks with tokens, ascending."""
        spans: list[list[int]] = []
        for first, end in sorted((start // BLOCK, -(-(start + size) // BLOCK)) for start, size in self.runs if size):
            if spans and first <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([first, end])
        return [(first, end - first) for first, end in spans]

    @property
    def num_blocks(self):
        return sum(count for _, count in self.spans)

    @functools.cached_property
    def _slots(self):
        """Index of each run's first token in `blocks`."""
        found = []
        for start, _ in self.runs:
            before = 0
            for first, count in self.spans:
                if first * BLOCK <= start < (first + count) * BLOCK:
                    found.append(before * BLOCK + start - first * BLOCK)
                    break
                before += count
            else:
                found.append(0)                                # a run without tokens
        return found

    @property
    def is_full(self):
        """Whether all tokens of all blocks are here."""
        return sum(size for _, size in self.runs) == self.num_blocks * BLOCK

    def blocks(self, tensor_BNTH):
        """(B, N, T, H) -> (B, N, blocks, BLOCK, H), zero where a block's token is not here."""
        if self._slots == [0] and self.is_full:
            return tensor_BNTH.unflatten(2, (-1, BLOCK))
        batch, heads, _, head_size = tensor_BNTH.shape
        blocks = tensor_BNTH.new_zeros(batch, heads, self.num_blocks * BLOCK, head_size)
        sizes = [size for _, size in self.runs]
        for slot, tokens in zip(self._slots, tensor_BNTH.split(sizes, 2)):
            blocks[:, :, slot:slot + tokens.shape[2]] = tokens
        return blocks.unflatten(2, (-1, BLOCK))

    def tokens(self, blocks):
        """Inverse of `blocks`."""
        flat = blocks.flatten(2, 3)
        found = [flat[:, :, slot:slot + size] for slot, (_, size) in zip(self._slots, self.runs)]
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def present(self, device):
        """(blocks, BLOCK) bool, True for tokens that are here."""
        here = torch.zeros(self.num_blocks * BLOCK, dtype=torch.bool, device=device)
        for slot, (_, size) in zip(self._slots, self.runs):
            here[slot:slot + size] = True
        return here.view(-1, BLOCK)

    def indices(self, device):
        """(blocks,) index of each block in the sequence."""
        return torch.cat([torch.arange(first, first + count, device=device) for first, count in self.spans])

    def take(self, of_union, union, dim):
        """The blocks of this layout, of a tensor with those of a `union` along `dim`."""
        chunks, positions = [], _offsets(union)
        for first, count in self.spans:
            start, offset = next((start, offset) for start, size, offset in positions if start <= first < start + size)
            chunks.append(of_union.narrow(dim, offset + first - start, count))
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim)


def _offsets(layout):
    """[(first block, number of blocks, index of the first one in the layout)] of the spans."""
    found, offset = [], 0
    for first, count in layout.spans:
        found.append((first, count, offset))
        offset += count
    return found


def union_of(layouts):
    """The BlockLayout of all tokens of several."""
    return BlockLayout(tuple(run for layout in layouts for run in layout.runs))


def union_sums(sums, layouts):
    """Sums over the blocks of the union, from those over the blocks of each layout: a list of (..., blocks, H)."""
    union = union_of(layouts)
    if len(layouts) == 1:
        return sums[0]
    total, positions = sums[0].new_zeros(*sums[0].shape[:-2], union.num_blocks, sums[0].shape[-1]), _offsets(union)
    for of_layout, layout in zip(sums, layouts):
        for (first, count, own) in _offsets(layout):
            start, offset = next((start, offset) for start, size, offset in positions if start <= first < start + size)
            total.narrow(-2, offset + first - start, count).add_(of_layout.narrow(-2, own, count))
    return total


def block_sums(blocks):
    """Sum over each block's tokens, (B, N, blocks, H), in float32 or better."""
    return blocks.sum(3, dtype=torch.promote_types(blocks.dtype, torch.float32))


def counts_of(layout, device):
    """Number of tokens of each block, (blocks, 1) float32."""
    return layout.present(device).sum(1, dtype=torch.float32)[:, None]


@dataclass(frozen=True)
class SparseAttention:
    """Block-sparse attention of one call, without its tensors.

    Every block of queries attends exactly to the blocks whose pooled keys score highest, and to its own block and its
    neighbours. Each other block contributes one logit, of its mean key with the mean query, and its mean value,
    weighted by its number of tokens.
    """

    method: str                            # SOL_ATTN or "sla"
    tau: float                             # SOL_ATTN: threshold in standard deviations of a block's scores
    keep: float                            # "sla": fraction of the blocks that are selected
    # BlockLayout of the queries, and of the keys, of each ring rank; keys of one entry are all here
    queries: tuple[BlockLayout, ...]
    keys: tuple[BlockLayout, ...]
    exact_keys: tuple[tuple[int, int], ...] = ()           # (first block, end): selected by all queries
    exact_rows: tuple[tuple[int, int], ...] = ()           # (first block, end): blocks of queries that select all

    def select(self, q_mean, k_mean, rank, scale):
        """(logits of the pooled keys, (B, N, Q, K); True for selected blocks, likewise).

        q_mean: (B, N, Q, H), mean queries of the blocks of this ring rank. k_mean: (B, N, K, H), mean keys of all
        blocks, minus their mean.
        """
        device, all_keys = q_mean.device, union_of(self.keys)
        logits = scale * q_mean @ k_mean.transpose(2, 3)
        rows, columns = self.queries[rank].indices(device)[:, None], all_keys.indices(device)[None]
        sinks = _within(columns, self.exact_keys)
        if self.method == SOL_ATTN:
            variance = (q_mean.square() * k_mean.square().mean(2, keepdim=True)).sum(3, keepdim=True)
            selected = logits > self.tau * torch.sqrt(variance * scale ** 2 + EPSILON)
        else:
            selected = self._highest(logits, sinks, all_keys)
        return logits, selected | ((rows - columns).abs() <= 1) | sinks | _within(rows, self.exact_rows)

    def _highest(self, logits, sinks, all_keys):
        """The highest logits of each row, without those of the sinks, which do not count."""
        num_others = sum(not any(start <= block < end for start, end in self.exact_keys)
                         for first, count in all_keys.spans for block in range(first, first + count))
        num_selected = max(0, min(num_others - 1, max(1, round(self.keep * num_others))))
        if not num_selected:
            return torch.zeros_like(logits, dtype=torch.bool)
        ranked = logits.masked_fill(sinks, -math.inf)
        return ranked >= ranked.topk(num_selected, 3).values[..., -1:]


def _within(blocks, ranges):
    found = torch.zeros_like(blocks, dtype=torch.bool)
    for start, end in ranges:
        found |= (blocks >= start) & (blocks < end)
    return found


def block_sparse_attention(q_BNTH, sums, hops, sparse, rank, scale=None):
    """Attention of this ring rank's queries.

    sums: (sums of the queries in its own blocks, (B, N, Q, H), over all ring ranks; sums of the keys and of the values
    of all blocks, (B, N, K, H)), from block_sums and union_sums.
    hops: yields (BlockLayout, keys, values (B, N, T, H)) until all keys have been there. Blocks that no query selects
    are not computed. sparse: a SparseAttention. Returns like q.
    """
    (q_sum, k_sum, v_sum), device = sums, q_BNTH.device
    scale = q_BNTH.shape[3] ** -0.5 if scale is None else scale
    layout, all_keys, dtype = sparse.queries[rank], union_of(sparse.keys), q_sum.dtype
    num_keys = counts_of(all_keys, device).to(dtype)
    num_queries = layout.take(counts_of(union_of(sparse.queries), device), union_of(sparse.queries), 0).to(dtype)
    k_mean = k_sum / num_keys
    centre = k_mean.mean(2, keepdim=True)
    heads = max(1, MAX_LOGITS // (q_sum.shape[0] * q_sum.shape[2] * k_mean.shape[2]))
    found = []
    for q_mean, means, v_mean in zip(*(each.split(heads, 1) for each in (
            q_sum / num_queries, k_mean - centre, v_sum / num_keys))):
        logits, selected = sparse.select(q_mean, means, rank, scale)
        found.append((selected, *_pooled(logits, selected, v_mean, num_keys)))
    selected, out, lse = (torch.cat(each, 1) for each in zip(*found))
    q_blocks = layout.blocks(q_BNTH)
    # the pooled logits are of centred keys: add the centre's logit, which differs from row to row
    of_centre = q_BNTH.to(dtype) @ centre.transpose(2, 3)
    lse = lse[..., None] + scale * layout.blocks(of_centre)
    out = out[:, :, :, None].expand(*q_blocks.shape[:4], -1)
    for key_layout, k_BNTH, v_BNTH in hops:
        found = attend_selected(q_blocks, k_BNTH, v_BNTH, key_layout, key_layout.take(selected, all_keys, 3), scale)
        if found is not None:
            out, lse = merge_attention(out, lse, *(each.to(dtype) for each in found))
    return layout.tokens(out).to(q_BNTH.dtype)


def _pooled(logits, selected, v_mean, num_keys):
    """Attention to the pooled blocks that are not selected: (out (B, N, Q, H), log-sum-exp (B, N, Q, 1))."""
    weighted = (logits + num_keys.log().T).masked_fill(selected, NO_KEYS)
    lse = torch.logsumexp(weighted, 3, keepdim=True).clamp_min(NO_KEYS)
    weights = torch.exp(weighted - lse).masked_fill(selected, 0)
    return weights @ v_mean, lse


def attend_selected(q_blocks, k_BNTH, v_BNTH, layout, selected, scale):
    """Exact attention of blocks of queries to their selected blocks of keys; None where there are none.

    q_blocks: (B, N, Q, BLOCK, H). k, v: (B, N, T, H), whose tokens are those of a BlockLayout. selected: (B, N, Q, K of
    the layout). Returns (out, like q_blocks; log-sum-exp, (B, N, Q, BLOCK, 1), NO_KEYS without keys).
    """
    if not layout.num_blocks or not q_blocks.shape[2]:
        return None
    k_blocks, v_blocks = layout.blocks(k_BNTH), layout.blocks(v_BNTH)
    if runs_flex(q_blocks):
        return _by_flex(q_blocks, k_blocks, v_blocks, layout, selected, scale, _compiled_flex())
    compute = _by_row if q_blocks.device.type == "cpu" else _gathered
    return compute(q_blocks, k_blocks, v_blocks, layout, selected, scale)


def _by_row(q_blocks, k_blocks, v_blocks, layout, selected, scale):
    """attend_selected on a CPU: one block of queries at a time, whose keys and logits stay in the cache. Its buffers
    are reused, since new memory of this size costs more than the arithmetic."""
    num_rows, _, head_size = q_blocks.shape[2:]
    num_columns, dtype = k_blocks.shape[2], torch.promote_types(q_blocks.dtype, torch.float32)
    queries, keys, values = (each.to(dtype).flatten(0, 2) for each in (q_blocks, k_blocks, v_blocks))
    flat = selected.reshape(-1, num_columns)
    counts = flat.sum(1).tolist()
    columns = flat.nonzero()[:, 1].split(counts)
    most = max(counts)
    if not most:
        return None
    out, lse = torch.empty_like(queries), queries.new_full((*queries.shape[:2], 1), NO_KEYS)
    gathered, memory = keys.new_empty(most, BLOCK, head_size), queries.new_empty(BLOCK * most * BLOCK)
    here = None if layout.is_full else layout.present(keys.device)
    for row, (count, wanted) in enumerate(zip(counts, columns)):
        if not count:
            out[row].zero_()
            continue
        index = wanted + row // num_rows * num_columns
        logits = memory[:BLOCK * count * BLOCK].view(BLOCK, -1)
        k = torch.index_select(keys, 0, index, out=gathered[:count]).view(-1, head_size)
        torch.addmm(logits, queries[row], k.T, beta=0, alpha=scale, out=logits)
        if here is not None:
            logits.masked_fill_(~here[wanted].flatten(), NO_KEYS)
        highest = logits.amax(1, keepdim=True)
        total = logits.sub_(highest).exp_().sum(1, keepdim=True)
        v = torch.index_select(values, 0, index, out=gathered[:count]).view(-1, head_size)
        torch.mm(logits, v, out=out[row]).div_(total)
        torch.add(highest, total.log_(), out=lse[row])
    return out.view(q_blocks.shape), lse.view(*q_blocks.shape[:4], 1)


def _gathered(q_blocks, k_blocks, v_blocks, layout, selected, scale):
    """attend_selected by one of torch's operators on gathered keys: rows with about the same number of selected blocks
    at once. Reads the selection on the host."""
    batch, heads, num_rows, _, head_size = q_blocks.shape
    num_columns = k_blocks.shape[2]
    flat = selected.reshape(-1, num_columns)
    counts, order = flat.sum(1).sort()
    listed = counts.tolist()
    columns = flat[order].to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    # index of a row's first key block among those of all images and heads
    first = (order // num_rows * num_columns)[:, None]
    queries = q_blocks.reshape(-1, 1, BLOCK, head_size)
    keys, values = (each.reshape(-1, BLOCK, head_size) for each in (k_blocks, v_blocks))
    out = torch.zeros_like(queries)
    lse = queries.new_full((*queries.shape[:3], 1), NO_KEYS, dtype=torch.promote_types(queries.dtype, torch.float32))
    here = None if layout.is_full else layout.present(queries.device)
    chunks = _chunks(listed, head_size)
    for start, end, most in chunks:
        wanted, rows = columns[start:end, :most], order[start:end]
        mask = None
        if here is not None or listed[start] < most:
            mask = torch.arange(most, device=counts.device) < counts[start:end, None]
            mask = mask[:, :, None].expand(-1, -1, BLOCK) if here is None else mask[:, :, None] & here[wanted]
            mask = mask.reshape(len(rows), 1, 1, -1)
        k, v = (each[first[start:end] + wanted].view(len(rows), 1, -1, head_size) for each in (keys, values))
        out[rows], of_rows = attention_with_lse(queries[rows], k, v, scale, mask)
        lse[rows] = of_rows.to(lse.dtype)
    return (out.view(q_blocks.shape), lse.view(*q_blocks.shape[:4], 1)) if chunks else None


def _chunks(counts, head_size):
    """[(first row, end, most blocks of a row)] of rows that are computed at once; rows without blocks are left out.
    counts: selected blocks of each row, ascending."""
    chunks, start = [], next((row for row, count in enumerate(counts) if count), len(counts))
    while start < len(counts):
        end = start + 1
        while (end < len(counts) and counts[end] <= MAX_PADDING * counts[start]
               and (end + 1 - start) * counts[end] * BLOCK * head_size <= MAX_GATHERED):
            end += 1
        chunks.append((start, end, counts[end - 1]))
        start = end
    return chunks


def runs_flex(q_blocks):
    """Whether FlexAttention computes tensors like these blocks of queries."""
    capability = capability_of(q_blocks.device)
    return (capability is not None and capability >= (8, 0) and q_blocks.dtype in HALF
            and q_blocks.shape[4] in FLEX_HEAD_SIZES)


@functools.cache
def _compiled_flex():
    """FlexAttention, compiled once for each number of blocks."""
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=False)


def _by_flex(q_blocks, k_blocks, v_blocks, layout, selected, scale, flex_attention):
    """attend_selected by FlexAttention (arXiv 2412.05496), without reading the selection on the host."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask
    here = layout.present(q_blocks.device)
    is_full, flat_here = here.all(1), here.flatten()

    def allowed(image, head, query, key):
        return selected[image, head, query // BLOCK, key // BLOCK] & flat_here[key]

    listed = [(blocks.sum(3, dtype=torch.int32),
               blocks.to(torch.uint8).argsort(dim=3, descending=True, stable=True).to(torch.int32))
              for blocks in (selected & ~is_full, selected & is_full)]
    mask = BlockMask.from_kv_blocks(*listed[0], *listed[1], BLOCK_SIZE=BLOCK, mask_mod=allowed,
                                    seq_lengths=(q_blocks.shape[2] * BLOCK, len(flat_here)),
                                    compute_q_blocks=False)
    out, more = flex_attention(q_blocks.flatten(2, 3), k_blocks.flatten(2, 3), v_blocks.flatten(2, 3), block_mask=mask,
                               scale=scale, return_aux=AuxRequest(lse=True),
                               kernel_options={"BLOCK_M": BLOCK, "BLOCK_N": BLOCK})
    lse = more.lse.unflatten(2, (-1, BLOCK))[..., None].clamp_min(NO_KEYS)
    return out.unflatten(2, (-1, BLOCK)), lse
