"""InfiniteTalk (MultiTalk, Kong et al. 2025, arXiv 2505.22647) with two speakers: positions that assign each token of
the video to a speaker.

# B batch, N heads, T tokens of this rank, H head size, S tokens of a frame, P speakers
"""

import torch
import torch.nn.functional as F

from ..distributed.collectives import all_reduce, largest
from .block_hooks import token_indices_of

RANGES = (0, 4), (20, 24)                  # positions of each speaker's tokens, as in ComfyUI's model
BASE = 10000.0                             # of the rotary angles
EPSILON = 1e-8                             # added to denominators, as in ComfyUI's model


def locate_speakers(context, query_BNTH, key_BNTH):
    """Compute the tokens' positions between the speakers for the rest of a block, if a network of the forward has two
    speakers. query, key: of the block's self-attention. Every rank of the sequence and tensor axes calls it."""
    for _, network in context.patches.networks:
        if network.has_two_speakers:
            assert context.patch is None, "InfiniteTalk's node wraps the sampling, so that every step is synchronous"
            masks = network.weight("masks", torch.float32)
            context.state.cuts["speakers"] = _positions(_speaker_scores(context, query_BNTH, key_BNTH, masks), context)


def audio_positions(num_tokens, device):
    """Positions of the audio tokens of a frame, (num_tokens,): the first half is the first speaker's."""
    return torch.cat([torch.full((num_tokens // len(RANGES),), sum(each) / 2, device=device) for each in RANGES])


def rotated(tensor_BNTH, positions):
    """Apply a rotary embedding to queries or keys. positions: (B or 1, T)."""
    size = tensor_BNTH.shape[3]
    speeds = BASE ** (-torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size)
    angles = positions.float()[:, None, :, None] * speeds
    first, second = tensor_BNTH.float().unflatten(3, (-1, 2)).unbind(-1)
    return torch.stack([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()],
                       -1).flatten(3).type_as(tensor_BNTH)


def _speaker_scores(context, query_BNTH, key_BNTH, masks_PS):
    """Attention of each token to each speaker's region of the first frame, averaged over all heads: (B, T, P), float32.
    It is computed as attention whose values are the masks."""
    mesh, (num_speakers, size) = context.mesh, masks_PS.shape
    values = F.pad(masks_PS.T.to(query_BNTH.dtype), (0, query_BNTH.shape[3] - num_speakers))
    key = _keys_of_first_frame(context, key_BNTH, size)
    found = F.scaled_dot_product_attention(query_BNTH, key, values.expand(*key.shape[:2], -1, -1))
    total, num_heads = found[..., :num_speakers].float().sum(1), masks_PS.new_full((1,), query_BNTH.shape[1])
    if mesh.degrees["tensor"] > 1:
        total, num_heads = all_reduce([total, num_heads], mesh.tensor_group, context.traffic)
    return total / num_heads / (masks_PS.sum(1) + EPSILON)


def _keys_of_first_frame(context, key_BNTH, size):
    """The keys of the first frame's tokens, from the ranks that have them."""
    if context.mesh.sequence_degree == 1:
        return key_BNTH[:, :, :size]
    # on the CPU, since reading an index from the device would synchronise
    indices, _ = token_indices_of(context, ("image",), torch.device("cpu"))
    first, keys = int(indices[0]), key_BNTH.new_zeros(*key_BNTH.shape[:2], size, key_BNTH.shape[3])
    own = max(0, min(len(indices), size - first))
    keys[:, :, first:first + own] = key_BNTH[:, :, :own]
    return all_reduce([keys], context.mesh.sequence_group, context.traffic)[0]


def _positions(scores_BTP, context):
    """Position of each token, (B, T): in the range of the speaker with the highest score, at the score's place between
    the lowest and the highest over all tokens of the video."""
    bounds = torch.stack([scores_BTP.amax(1), -scores_BTP.amin(1)])
    if context.mesh.sequence_degree > 1:
        bounds = largest(bounds, context.mesh.sequence_group, context.traffic)
    most, least = bounds[0, :, None], -bounds[1, :, None]
    scaled = (scores_BTP - least) / (most - least + EPSILON)
    scaled = torch.stack([column * (end - start) + start for column, (start, end) in zip(scaled.unbind(2), RANGES)], 2)
    return scaled.gather(2, scores_BTP.argmax(2, keepdim=True))[..., 0]
