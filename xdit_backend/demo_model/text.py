"""The demo model's text encoder: one vector per word, the mean of its subwords' vectors (P. Bojanowski et al. 2017,
section 3.2).

The transformer's own text stream relates words to each other, so nothing larger is needed. Because vectors belong to
subwords, a plural or a misspelling stays close to the word that was learnt.
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
UNET_WIDTH = 768       # context width of SD 1.5's U-Nets, see unet_context
NUM_BUCKETS = 8192
MIN_SUBWORD, MAX_SUBWORD = 3, 5


def tokens_of(prompt):
    """Split a prompt into lower-case words, at spaces and punctuation."""
    return re.findall(r"[^\W_]+", prompt.lower())


def subword_buckets(word):
    """Buckets of a word: of the word itself, and of all its subwords of 3 to 5 letters, with its ends marked."""
    marked = f"<{word}>"
    subwords = {marked} | {marked[at:at + size] for size in range(MIN_SUBWORD, MAX_SUBWORD + 1)
                           for at in range(len(marked) - size + 1)}
    return sorted(zlib.crc32(subword.encode()) % NUM_BUCKETS for subword in subwords)


class TextEncoder(nn.Module):
    """Prompts to context [B, 24, 128] and pooled [B, 128]. Positions without a word have a learnt vector."""

    def __init__(self):
        super().__init__()
        self.pieces = nn.EmbeddingBag(NUM_BUCKETS, WIDTH, mode="mean")
        self.blank = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.position = nn.Parameter(torch.randn(MAX_WORDS, WIDTH) * 0.1)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, buckets, offsets, positions, batch):
        """Encode words that `arrange` has prepared.

        buckets [P]; offsets [W]: start of each word in buckets; positions [W]: position of each word among the batch's
        24 * batch.
        """
        vectors = self.norm(self.pieces(buckets, offsets))
        context = self.blank.repeat(batch * MAX_WORDS, 1).index_copy(0, positions, vectors)
        context = context.view(batch, MAX_WORDS, WIDTH)
        total = vectors.new_zeros(batch, WIDTH).index_add(0, positions // MAX_WORDS, vectors)
        count = torch.bincount(positions // MAX_WORDS, minlength=batch).clamp(min=1)
        return context + self.position, total / count[:, None]

    @torch.no_grad()
    def encode(self, prompts):
        """Encode B prompts to context [B, 24, 128] and pooled [B, 128]. Raises ConfigError for more than 24 words."""
        lists = [tokens_of(prompt) for prompt in prompts]
        for tokens in lists:
            if len(tokens) > MAX_WORDS:
                raise ConfigError(f"Shorten the prompt: it has {len(tokens)} words, and the demo model reads at most "
                                  f"{MAX_WORDS}.")
        return self(*arrange(lists), len(lists))


def arrange(lists):
    """Tensors for the forward, from lists of at most 24 words each."""
    buckets, offsets, positions = [], [], []
    for row, tokens in enumerate(lists):
        for column, word in enumerate(tokens):
            offsets.append(len(buckets))
            positions.append(row * MAX_WORDS + column)
            buckets += subword_buckets(word)
    return torch.tensor(buckets, dtype=torch.long), torch.tensor(offsets, dtype=torch.long), torch.tensor(
        positions, dtype=torch.long)


def unet_context(context):
    """Pad the context with zeros to the width of SD 1.5's U-Nets, [B, 24, 768]."""
    return nn.functional.pad(context, (0, UNET_WIDTH - context.shape[-1]))


def load_text_encoder():
    """Load the trained text encoder, in float32."""
    encoder = TextEncoder()
    encoder.load_state_dict(load_file(WEIGHTS / "xdit_demo_text.safetensors"))
    return encoder
