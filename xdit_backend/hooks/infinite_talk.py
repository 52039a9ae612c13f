"""Whom each token of a video with two speakers belongs to: what InfiniteTalk (MultiTalk, Kong et al. 2025, arXiv
2505.22647) tells them apart by. Called by attention_dispatch.py, for injected_networks.py.

# B batch, N heads, T tokens of this rank, H head size, S tokens of a frame, P speakers
"""

import torch
import torch.nn.functional as F

from ..distributed.collectives import all_reduce, largest
from .block_hooks import places_of

RANGES = (0, 4), (20, 24)                  # of the places that a speaker's tokens get, as ComfyUI's model has them
BASE = 10000.0                             # of the angles
EPSILON = 1e-8                             # beside sums and differences that are divided by, likewise


def tell_apart(context, query_BNTH, key_BNTH):
    """Note for the rest of a block where its tokens are between the speakers, if a network of the forward is to tell
    these apart. query, key: of the block's self-attention. Every rank of the sequence and tensor axes calls it."""
    for _, network in context.networks:
        if network.tells_apart:
            assert context.patch is None, "InfiniteTalk's node wraps the sampling, so that every step is whole"
            masks = network.weight("masks", torch.float32)
            context.cuts["speakers"] = _places(_likeness(context, query_BNTH, key_BNTH, masks), context)


def audio_places(num_tokens, device):
    """The places of the tokens of a frame's sound, (num_tokens,): the first half is the first speaker's."""
    return torch.cat([torch.full((num_tokens // len(RANGES),), sum(each) / 2, device=device) for each in RANGES])


def turned(tensor_BNTH, places):
    """Queries or keys with their pairs of numbers turned by their places, (B or 1, T)."""
    size = tensor_BNTH.shape[3]
    speeds = BASE ** (-torch.arange(0, size, 2, dtype=torch.float32, device=places.device) / size)
    angles = places.float()[:, None, :, None] * speeds
    first, second = tensor_BNTH.float().unflatten(3, (-1, 2)).unbind(-1)
    return torch.stack([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()],
                       -1).flatten(3).type_as(tensor_BNTH)


def _likeness(context, query_BNTH, key_BNTH, masks_PS):
    """How much each token attends to where each speaker is in the first frame, a mean over all heads: (B, T, P),
    float32. It is attention whose values are the masks."""
    mesh, (people, size) = context.mesh, masks_PS.shape
    values = F.pad(masks_PS.T.to(query_BNTH.dtype), (0, query_BNTH.shape[3] - people))
    key = _of_first_frame(context, key_BNTH, size)
    found = F.scaled_dot_product_attention(query_BNTH, key, values.expand(*key.shape[:2], -1, -1))
    total, num_heads = found[..., :people].float().sum(1), masks_PS.new_full((1,), query_BNTH.shape[1])
    if mesh.degrees["tensor"] > 1:
        total, num_heads = all_reduce([total, num_heads], mesh.tensor_group, context.traffic)
    return total / num_heads / (masks_PS.sum(1) + EPSILON)


def _of_first_frame(context, key_BNTH, size):
    """The keys of the first frame's tokens, which some ranks have."""
    if context.mesh.sequence_degree == 1:
        return key_BNTH[:, :, :size]
    places, _ = places_of(context, ("image",), torch.device("cpu"))        # on the device it would be waited for
    first, keys = int(places[0]), key_BNTH.new_zeros(*key_BNTH.shape[:2], size, key_BNTH.shape[3])
    own = max(0, min(len(places), size - first))
    keys[:, :, first:first + own] = key_BNTH[:, :, :own]
    return all_reduce([keys], context.mesh.sequence_group, context.traffic)[0]


def _places(likeness_BTP, context):
    """(B, T): of each token, in the range of the speaker whom it is most like, by how like it is to them among all
    tokens of the video."""
    bounds = torch.stack([likeness_BTP.amax(1), -likeness_BTP.amin(1)])
    if context.mesh.sequence_degree > 1:
        bounds = largest(bounds, context.mesh.sequence_group, context.traffic)
    most, least = bounds[0, :, None], -bounds[1, :, None]
    scaled = (likeness_BTP - least) / (most - least + EPSILON)
    scaled = torch.stack([column * (end - start) + start for column, (start, end) in zip(scaled.unbind(2), RANGES)], 2)
    return scaled.gather(2, likeness_BTP.argmax(2, keepdim=True))[..., 0]
