"""HunyuanVideo with first-frame conditioning ("replace"): tokens of the first frame are modulated by another timestep.

As in ComfyUI's model, these are the first frame's tokens in blocks of two streams, and as many tokens from the text's
first on in blocks of one. Installed on diffusers' model by Family.adapt_model. A forward without a first frame is
diffusers' own.

# B batch, T tokens, C channels
"""

from contextvars import ContextVar

import torch


class PerToken:
    """A modulation that differs between tokens, (B, T, C), in place of a (B, C) one that diffusers' block
    broadcasts."""

    def __init__(self, tokens_BTC):
        self._tokens_BTC = tokens_BTC

    def unsqueeze(self, dim):
        return self._tokens_BTC

    def __getitem__(self, index):
        return self._tokens_BTC


def install_first_frame(model):
    """Add two arguments to the model's forward: `first_frame_time`, (B,) or None, and `num_first_frame_tokens` in
    this latent or patch. The rotary tables then also have masks (T,) bool of the tokens that the first frame's
    timestep modulates."""
    embed, rope, forward = model.time_text_embed.forward, model.rope.forward, model.forward
    this_forward = ContextVar("this_forward")

    def with_first_frame(*, first_frame_time, num_first_frame_tokens, **inputs):
        before = this_forward.set({"time": first_frame_time, "tokens": num_first_frame_tokens,
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
        positions, of_text = (torch.arange(count, device=sines[0].device) for count in (len(sines[0]), run["num_text"]))
        return (*sines, positions < a_frame, positions + run["num_text"] < a_frame, of_text < a_frame)

    def last(hidden_BTC, emb):
        run = this_forward.get()
        if run["emb"] is None:
            return normed(hidden_BTC, emb)
        activated = model.norm_out.silu(torch.cat([emb, run["emb"]])).to(hidden_BTC.dtype)
        modulations = model.norm_out.linear(activated).chunk(2, 1)
        first = torch.arange(hidden_BTC.shape[1], device=hidden_BTC.device) < run["tokens"]
        scale, shift = (_select(part, first) for part in modulations)
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
    """Choose between two modulations (2B, C), the timestep's and the first frame's, by a mask (T,). Returns (B, T,
    C)."""
    own, first_frame = both.chunk(2)
    return torch.where(marked[:, None], first_frame[:, None], own[:, None])


def _mark_norm(norm):
    """Make an adaptive norm modulate marked tokens by another embedding. Returns the list that takes [that
    embedding, mask (T,)]."""
    forward, marks = norm.forward, []

    def modulated(hidden_BTC, emb):
        if not marks:
            return forward(hidden_BTC, emb=emb)
        first_frame, marked = marks
        modulations = norm.linear(norm.silu(torch.cat([emb, first_frame])))
        shift, scale, *others = (_select(part, marked)
                                 for part in modulations.chunk(modulations.shape[1] // hidden_BTC.shape[2], 1))
        return norm.norm(hidden_BTC) * (1 + scale) + shift, *map(PerToken, others)
    norm.forward = modulated
    return marks


def _double(forward, marks):
    def block(hidden_states, encoder_hidden_states, temb, attention_mask=None, freqs_cis=None, first_frame=None,
              num_tokens=None):
        marks[:] = [] if first_frame is None else [first_frame, freqs_cis[2]]
        return forward(hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis[:2])
    return block


def _single(forward, marks):
    def block(hidden_states, encoder_hidden_states, temb, attention_mask=None, image_rotary_emb=None, first_frame=None,
              num_tokens=None):
        marks[:] = [] if first_frame is None else [first_frame, torch.cat(image_rotary_emb[3:])]
        return forward(hidden_states, encoder_hidden_states, temb, attention_mask, image_rotary_emb[:2])
    return block
