"""The demo model's text encoder: a vector a word, the mean of its pieces' vectors (P. Bojanowski et al. 2017, section
3.2).

The transformer's own text stream relates the words to each other, so nothing larger is needed. Pieces of words, and not
whole ones, are what has vectors: a plural or a slip of the pen stays close to the word that was learnt.
"""

import re
import zlib
from pathlib import Path

import torch
import torch.nn as nn
from safetensors.torch import load_file

from ..protocol.errors import ConfigError

WEIGHTS = Path(__file__).parent / "weights"
MAX_WORDS = 24
WIDTH = 128
UNET_WIDTH = 768       # that SD 1.5's U-Nets read, see as_unets_context
NUM_BUCKETS = 8192
MIN_PIECE, MAX_PIECE = 3, 5


def tokens_of(prompt):
    """The words of a prompt, in lower case; punctuation only separates."""
    return re.findall(r"[^\W_]+", prompt.lower())


def pieces_of(word):
    """Buckets of a word: of itself, and of all its pieces of 3 to 5 letters, its ends marked."""
    marked = f"<{word}>"
    pieces = {marked} | {marked[at:at + size] for size in range(MIN_PIECE, MAX_PIECE + 1)
                         for at in range(len(marked) - size + 1)}
    return sorted(zlib.crc32(piece.encode()) % NUM_BUCKETS for piece in pieces)


class TextEncoder(nn.Module):
    """Prompts to context [B, 24, 128] and pooled [B, 128]; a place without a word holds a learnt vector."""

    def __init__(self):
        super().__init__()
        self.pieces = nn.EmbeddingBag(NUM_BUCKETS, WIDTH, mode="mean")
        self.blank = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.position = nn.Parameter(torch.randn(MAX_WORDS, WIDTH) * 0.1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, buckets, offsets, places, batch):
        """buckets [P], offsets [W] of each word in them, places [W] of each word in the batch's 24 * batch places."""
        words = self.norm(self.pieces(buckets, offsets))
        context = self.blank.repeat(batch * MAX_WORDS, 1).index_copy(0, places, words).view(batch, MAX_WORDS, WIDTH)
        total = words.new_zeros(batch, WIDTH).index_add(0, places // MAX_WORDS, words)
        count = torch.bincount(places // MAX_WORDS, minlength=batch).clamp(min=1)
        return context + self.position, total / count[:, None]

    @torch.no_grad()
    def encode(self, prompts):
        """Context [B, 24, 128] and pooled [B, 128] of B prompts. Raises ConfigError for one of more than 24 words."""
        lists = [tokens_of(prompt) for prompt in prompts]
        for words in lists:
            if len(words) > MAX_WORDS:
                raise ConfigError(f"Shorten the prompt: it has {len(words)} words, and the demo model reads "
                                  f"{MAX_WORDS} at most.")
        return self(*arrange(lists), len(lists))


def arrange(lists):
    """forward's tensors of lists of at most 24 words each."""
    buckets, offsets, places = [], [], []
    for row, words in enumerate(lists):
        for column, word in enumerate(words):
            offsets.append(len(buckets))
            places.append(row * MAX_WORDS + column)
            buckets += pieces_of(word)
    return torch.tensor(buckets, dtype=torch.long), torch.tensor(offsets, dtype=torch.long), torch.tensor(
        places, dtype=torch.long)


def as_unets_context(context):
    """The context as a U-Net of SD 1.5's kind reads it, [B, 24, 768]: followed by zeros."""
    return nn.functional.pad(context, (0, UNET_WIDTH - context.shape[-1]))


def load_text_encoder():
    """The trained text encoder, in float32."""
    encoder = TextEncoder()
    encoder.load_state_dict(load_file(WEIGHTS / "xdit_demo_text.safetensors"))
    return encoder
