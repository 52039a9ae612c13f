"""A bias between tokens, made a part of the queries and keys themselves: every method then shares it out, sends and
keeps it as it does these, and no mask of queries by keys is made. Called by attention_dispatch.py.

# B batch, N heads, T tokens, H head size
"""

import torch
import torch.nn.functional as F

NUM_MORE = 8                               # numbers a head; kernels ask for a multiple of so many, and four are needed


def with_bias(q_BNTH, k_BNTH, v_BNTH, bias_1T2, scale):
    """Queries, keys and values whose products, times scale, are those of the given ones and a_q b_k + b_q a_k.

    bias: a and b of each of these tokens, which are the queries' and the keys'. Of attention's output the first H
    numbers count.
    """
    a, b = (each[:, None, :, None].to(q_BNTH.dtype) for each in bias_1T2.unbind(2))
    # what `scale` takes back, as two numbers, that half precision has it exactly enough
    whole = torch.tensor(1 / scale, dtype=torch.float64)
    high = whole.to(q_BNTH.dtype)
    low = (whole - high.double()).to(q_BNTH.dtype)
    of_query = torch.cat([a * high.item(), a * low.item(), b, b], 3)
    of_key = torch.cat([b, b, a * high.item(), a * low.item()], 3)
    widened = [torch.cat([tensor, more.expand(*tensor.shape[:3], -1)], 3)
               for tensor, more in ((q_BNTH, of_query), (k_BNTH, of_key))]
    return *(F.pad(tensor, (0, NUM_MORE - 4)) for tensor in widened), F.pad(v_BNTH, (0, NUM_MORE))
