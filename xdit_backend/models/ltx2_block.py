"""LTX-2's block as ComfyUI 0.31 and newer compute it: video-to-audio attention reads the video after audio-to-video
attention has been added to it. Before, and in diffusers, both directions read the video as it was before either."""

import functools
from types import MethodType

AGAIN = "video_is_normed_again"            # conditioning of a call of such a ComfyUI, whatever its value


def choose_block(block, is_again):
    """Have diffusers' block compute as either version of ComfyUI. is_again() -> as 0.31 and newer?"""
    as_before, again = block.forward, MethodType(_forward_norming_again, block)

    @functools.wraps(as_before)
    def forward(*args, **kwargs):
        return (again if is_again() else as_before)(*args, **kwargs)
    block.forward = forward


def _forward_norming_again(self, hidden_states, audio_hidden_states, encoder_hidden_states,
                           audio_encoder_hidden_states, temb, temb_audio, temb_ca_scale_shift,
                           temb_ca_audio_scale_shift, temb_ca_gate, temb_ca_audio_gate, temb_prompt=None,
                           temb_prompt_audio=None, video_rotary_emb=None, audio_rotary_emb=None,
                           ca_video_rotary_emb=None, ca_audio_rotary_emb=None, encoder_attention_mask=None,
                           audio_encoder_attention_mask=None, self_attention_mask=None, audio_self_attention_mask=None,
                           a2v_cross_attention_mask=None, v2a_cross_attention_mask=None, use_a2v_cross_attention=True,
                           use_v2a_cross_attention=True, **unused):
    """LTX2VideoTransformerBlock.forward of diffusers, without perturbed attention."""
    batch = len(hidden_states)
    video = self.get_mod_params(self.scale_shift_table, temb, batch)
    audio = self.get_mod_params(self.audio_scale_shift_table, temb_audio, batch)

    normed = _modulated(self.norm1(hidden_states), *video[:2])
    hidden_states = hidden_states + video[2] * self.attn1(
        hidden_states=normed, encoder_hidden_states=None, query_rotary_emb=video_rotary_emb,
        attention_mask=self_attention_mask)
    normed = _modulated(self.audio_norm1(audio_hidden_states), *audio[:2])
    audio_hidden_states = audio_hidden_states + audio[2] * self.audio_attn1(
        hidden_states=normed, encoder_hidden_states=None, query_rotary_emb=audio_rotary_emb,
        attention_mask=audio_self_attention_mask)

    hidden_states = hidden_states + _text_attention(
        self, "", hidden_states, encoder_hidden_states, video[6:9], temb_prompt, encoder_attention_mask)
    audio_hidden_states = audio_hidden_states + _text_attention(
        self, "audio_", audio_hidden_states, audio_encoder_hidden_states, audio[6:9], temb_prompt_audio,
        audio_encoder_attention_mask)

    of_video, of_audio = self.video_a2v_cross_attn_scale_shift_table, self.audio_a2v_cross_attn_scale_shift_table
    video_scale_shift = self.get_mod_params(of_video[:4], temb_ca_scale_shift, batch)
    audio_scale_shift = self.get_mod_params(of_audio[:4], temb_ca_audio_scale_shift, batch)
    normed_audio = self.video_to_audio_norm(audio_hidden_states)
    if use_a2v_cross_attention:
        gate = self.get_mod_params(of_video[4:], temb_ca_gate, batch)[0]
        hidden_states = hidden_states + gate * self.audio_to_video_attn(
            _modulated(self.audio_to_video_norm(hidden_states), *video_scale_shift[1::-1]),
            encoder_hidden_states=_modulated(normed_audio, *audio_scale_shift[1::-1]),
            query_rotary_emb=ca_video_rotary_emb, key_rotary_emb=ca_audio_rotary_emb,
            attention_mask=a2v_cross_attention_mask)
    if use_v2a_cross_attention:
        gate = self.get_mod_params(of_audio[4:], temb_ca_audio_gate, batch)[0]
        audio_hidden_states = audio_hidden_states + gate * self.video_to_audio_attn(
            _modulated(normed_audio, *audio_scale_shift[3:1:-1]),
            encoder_hidden_states=_modulated(self.audio_to_video_norm(hidden_states), *video_scale_shift[3:1:-1]),
            query_rotary_emb=ca_audio_rotary_emb, key_rotary_emb=ca_video_rotary_emb,
            attention_mask=v2a_cross_attention_mask)

    hidden_states = hidden_states + video[5] * self.ff(_modulated(self.norm3(hidden_states), *video[3:5]))
    audio_hidden_states = audio_hidden_states + audio[5] * self.audio_ff(
        _modulated(self.audio_norm3(audio_hidden_states), *audio[3:5]))
    return hidden_states, audio_hidden_states


def _text_attention(self, prefix, hidden_states, text, modulation, temb_prompt, mask):
    """modulation: shift, scale and gate of the queries, or () in a model that modulates neither them nor the text."""
    normed = getattr(self, f"{prefix}norm2")(hidden_states)
    if modulation:
        normed = _modulated(normed, *modulation[:2])
        table = getattr(self, f"{prefix}prompt_scale_shift_table")
        text = _modulated(text, *self.get_mod_params(table, temb_prompt, len(text)))
    attended = getattr(self, f"{prefix}attn2")(normed, encoder_hidden_states=text, query_rotary_emb=None,
                                               attention_mask=mask)
    return attended * modulation[2] if modulation else attended


def _modulated(tensor, shift, scale):
    return tensor * (1 + scale) + shift
