"""PuLID (Guo et al. 2024, arXiv 2404.16022): what attention finds in a picture of a face is added without what of it
goes along what it found before, in the text. Called by hooks/injected_networks.py.

# B batch, N heads, T tokens, H head size, S tokens of the picture
"""

import torch


def across(found_BNTH, before_BNTH, query_BNTH, key_BNSH, first, add_up):
    """What queries found in a picture, without most of its part along what they found before: of each channel, over all
    tokens of the image.

    first: of that part so much is kept as attention goes to the picture's first so many tokens, in the mean over the
    image's; of all heads together and not scaled. 0: nothing is. add_up(tensors) -> their sums over the ranks that have
    the image's other tokens, each of which calls it.
    """
    found, before = (tensor.to(torch.promote_types(tensor.dtype, torch.float32))
                     for tensor in (found_BNTH, before_BNTH))
    query, key = (tensor.transpose(1, 2).flatten(2) for tensor in (query_BNTH, key_BNSH))      # BNTH -> BTC
    shares = (query @ key.transpose(1, 2)).softmax(-1, dtype=found.dtype)[..., :first].sum((1, 2))     # (B,)
    products = [(found * before).sum(2), (before * before).sum(2)]                             # (B, N, H)
    along, whole, shares, tokens = add_up([*products, shares, shares.new_tensor([query.shape[1]])])
    kept = (shares / tokens).view(-1, 1, 1, 1)
    return (found + (kept - 1) * (along / whole)[:, :, None] * before).to(found_BNTH.dtype)
