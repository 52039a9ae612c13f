"""HunyuanVideo with a first frame that is given ("replace"): its tokens are modulated as those of another time.

As in ComfyUI's model: in blocks of two streams, these are the first frame's tokens; in blocks of one, as many from the
text's first on.
Placed on diffusers' model by HunyuanVideo's `amend`. A forward without such a frame is diffusers' own.

# B batch, T tokens, C channels
"""

from contextvars import ContextVar

import torch


class PerToken:
    """A modulation that differs from token to token, (B, T, C), where a block of diffusers would spread one of (B,
    C) over all."""

    def __init__(self, tokens_BTC):
        self._tokens_BTC = tokens_BTC

    def unsqueeze(self, dim):
        return self._tokens_BTC

    def __getitem__(self, index):
        return self._tokens_BTC


def install_given_frame(model):
    """Have the model take `given_time`, (B,), the time of the given frame, or None, and `given_tokens`, how many tokens
    that frame has in this latent or patch. What its rotary tables then hold beside sines: (T,) bool, which tokens are
    modulated as given."""
    embed, rope, forward = model.time_text_embed.forward, model.rope.forward, model.forward
    this_forward = ContextVar("this_forward")

    def with_first_frame(*, given_time, given_tokens, **inputs):
        before = this_forward.set({"time": given_time, "tokens": given_tokens,
                                   "num_text": inputs["encoder_hidden_states"].shape[1]})
        try:
            return forward(**inputs)
        finally:
            this_forward.reset(before)

    def embedded(timestep, text, guidance=None):
        run = this_forward.get()
        run["emb"] = None if run["time"] is None else embed(run["time"], text, guidance)[0]
        return embed(timestep, text, guidance)[0], run["emb"]

    def tables(latent):
        sines, run = rope(latent), this_forward.get()
        if run["time"] is None:
            return sines
        a_frame = latent.shape[3] // model.rope.patch_size * (latent.shape[4] // model.rope.patch_size)
        places, of_text = (torch.arange(count, device=sines[0].device) for count in (len(sines[0]), run["num_text"]))
        return (*sines, places < a_frame, places + run["num_text"] < a_frame, of_text < a_frame)

    def last(hidden_BTC, emb):
        run = this_forward.get()
        if run["emb"] is None:
            return normed(hidden_BTC, emb)
        parts = model.norm_out.linear(model.norm_out.silu(torch.cat([emb, run["emb"]])).to(hidden_BTC.dtype)).chunk(
            2, 1)
        first = torch.arange(hidden_BTC.shape[1], device=hidden_BTC.device) < run["tokens"]
        scale, shift = (_select(part, first) for part in parts)
        return model.norm_out.norm(hidden_BTC) * (1 + scale) + shift
    normed = model.norm_out.forward
    model.forward, model.time_text_embed.forward, model.rope.forward, model.norm_out.forward = (
        with_first_frame, embedded, tables, last)

    for block in model.transformer_blocks:
        marks = _mark_norm(block.norm1)
        block.forward = _double(block.forward, marks)
    for block in model.single_transformer_blocks:
        marks = _mark_norm(block.norm)
        block.forward = _single(block.forward, marks)


def _select(both, marked):
    """(2B, C), of the time and then of the given frame's; marked: (T,). -> (B, T, C)."""
    own, given = both.chunk(2)
    return torch.where(marked[:, None], given[:, None], own[:, None])


def _mark_norm(norm):
    """Have an adaptive norm modulate tokens that are marked otherwise.
    Returns the list to put (the other embedding, marks (T,)) in."""
    forward, marks = norm.forward, []

    def modulated(hidden_BTC, emb):
        if not marks:
            return forward(hidden_BTC, emb=emb)
        given, marked = marks
        parts = norm.linear(norm.silu(torch.cat([emb, given])))
        shift, scale, *others = (_select(part, marked)
                                 for part in parts.chunk(parts.shape[1] // hidden_BTC.shape[2], 1))
        return norm.norm(hidden_BTC) * (1 + scale) + shift, *map(PerToken, others)
    norm.forward = modulated
    return marks


def _double(forward, marks):
    def block(hidden_states, encoder_hidden_states, temb, attention_mask=None, freqs_cis=None, given=None,
              num_tokens=None):
        marks[:] = [] if given is None else [given, freqs_cis[2]]
        return forward(hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis[:2])
    return block


def _single(forward, marks):
    def block(hidden_states, encoder_hidden_states, temb, attention_mask=None, image_rotary_emb=None, given=None,
              num_tokens=None):
        marks[:] = [] if given is None else [given, torch.cat(image_rotary_emb[3:])]
        return forward(hidden_states, encoder_hidden_states, temb, attention_mask, image_rotary_emb[:2])
    return block
