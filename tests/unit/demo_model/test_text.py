"""The demo model's text encoder."""

import pytest
import torch

from xdit_backend.demo_model.text import MAX_WORDS, WIDTH, TextEncoder, arrange, subword_buckets, tokens_of
from xdit_backend.protocol.errors import ConfigError


def test_punctuation_and_capitals_do_not_matter():
    assert tokens_of("Cat-face, on a BLUE background!") == ["cat", "face", "on", "a", "blue", "background"]


def test_a_plural_shares_most_pieces_with_its_singular():
    apple, apples, guitar = (set(subword_buckets(word)) for word in ("apple", "apples", "guitar"))

    assert len(apple & apples) > len(apple) / 2
    assert len(apple & guitar) <= 1


def test_prompts_of_a_batch_do_not_see_each_other():
    torch.manual_seed(0)
    encoder = TextEncoder()

    context, pooled = encoder.encode(["red apple", "", "cat"])
    alone, alone_pooled = encoder.encode(["cat"])

    assert context.shape == (3, MAX_WORDS, WIDTH) and pooled.shape == (3, WIDTH)
    assert torch.equal(context[2], alone[0]) and torch.equal(pooled[2], alone_pooled[0])
    assert torch.equal(pooled[1], torch.zeros(WIDTH))


def test_the_order_of_words_matters():
    torch.manual_seed(0)
    encoder = TextEncoder()

    first, second = encoder.encode(["red apple", "apple red"])[0]

    assert not torch.allclose(first, second)


def test_a_long_prompt_is_refused_with_the_number_of_its_words():
    with pytest.raises(ConfigError, match="^Shorten the prompt: it has 25 words, and the demo model reads at most 24"):
        TextEncoder().encode(["word " * 25])


def test_nothing_to_read_is_arranged_as_nothing():
    assert [tensor.numel() for tensor in arrange([[], []])] == [0, 0, 0]
