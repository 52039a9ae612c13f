"""PuLID (Guo et al. 2024, arXiv 2404.16022): attention to a face image, made orthogonal to attention to the text.

# B batch, N heads, T tokens, H head size, S tokens of the face image
"""

import torch


def orthogonalise(found_BNTH, before_BNTH, query_BNTH, key_BNSH, first, add_up):
    """Attention to the face image, without most of its component along the attention to the text, for each channel over
    all tokens of the image. Every rank that has tokens of the image calls it.

    found, before: attention to the face image and to the text. first: the fraction of that component that remains is
    the attention probability of the face image's first so many tokens, averaged over the image's tokens, computed over
    all heads together without scale; 0: none remains. add_up(tensors) -> their sums over the ranks.
    """
    found, before = (tensor.to(torch.promote_types(tensor.dtype, torch.float32))
                     for tensor in (found_BNTH, before_BNTH))
    query, key = (tensor.transpose(1, 2).flatten(2) for tensor in (query_BNTH, key_BNSH))      # BNTH -> BTC
    remaining = (query @ key.transpose(1, 2)).softmax(-1, dtype=found.dtype)[..., :first].sum((1, 2))          # (B,)
    products = [(found * before).sum(2), (before * before).sum(2)]                             # (B, N, H)
    along, norm, remaining, tokens = add_up([*products, remaining, remaining.new_tensor([query.shape[1]])])
    fraction = (remaining / tokens).view(-1, 1, 1, 1)
    return (found + (fraction - 1) * (along / norm)[:, :, None] * before).to(found_BNTH.dtype)
