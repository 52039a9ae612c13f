"""LTX-2's sound, a stream of tokens beside the video's: what a file says of it, how a call hands it over,
what the forward is given."""

import torch

from ..protocol.errors import ConfigError
from .describe import given, has, size, text_mask
from .ltx_tokens import NUM_HEADS
from .plan import TokenArgument

VIDEO, AUDIO, FREQUENCIES = ("image",), ("audio",), 16
FRAMES_A_TOKEN, SOUNDS_A_FRAME = 8, 25 / 24
HAS_PROJECTION = has("caption_projection.linear_2.weight")

# tables are of all heads at once, or of each
TOKENS = {
    **dict.fromkeys(("temb", "temb_ca_scale_shift"), TokenArgument(1, VIDEO)),
    **dict.fromkeys(("temb_audio", "temb_ca_audio_scale_shift"), TokenArgument(1, AUDIO)),
    **dict.fromkeys(("video_rotary_emb", "ca_video_rotary_emb"), TokenArgument(-2, VIDEO)),
    **dict.fromkeys(("audio_rotary_emb", "ca_audio_rotary_emb"), TokenArgument(-2, AUDIO))}
SETTINGS = {
    "audio_num_attention_heads": (NUM_HEADS,), "audio_positional_embedding_max_pos": ([20],),
    "use_middle_indices_grid": (False, True),
    "rope_type": ("interleaved", "split"), "frequencies_precision": ("float32", "float64"),
    "av_ca_timestep_scale_multiplier": (1.0, 1000.0), "apply_gated_attention": (False, True),
    "caption_proj_before_connector": (False, True), "caption_projection_first_linear": (True, False),
    "cross_attention_adaln": (False, True)}
SAYS = {"causal_temporal_positioning": True, "use_middle_indices_grid": True, "rope_type": "split",
        "frequencies_precision": "float64",
        "av_ca_timestep_scale_multiplier": 1000.0}             # the metadata of published files
RULES = {
    "audio_in_channels": size("audio_patchify_proj.weight", 1), "audio_out_channels": size("audio_proj_out.weight", 0),
    "audio_num_attention_heads": NUM_HEADS,
    "audio_attention_head_dim": size("audio_patchify_proj.weight", 0, NUM_HEADS),
    "audio_cross_attention_dim": size("transformer_blocks.0.audio_attn2.to_k.weight", 1),
    "use_prompt_embeddings": HAS_PROJECTION,
    **dict.fromkeys(("gated_attn", "audio_gated_attn"), has("transformer_blocks.0.attn1.to_gate_logits.weight")),
    **dict.fromkeys(("cross_attn_mod", "audio_cross_attn_mod"), has("prompt_adaln_single.linear.weight"))}


def split_parts(latents, times, config, options):
    """The video, its timestep, and of this call: the sound, (B, C, T, F), its times, and the latest time of each."""
    video, *sounds = latents
    times = times if isinstance(times, tuple) else (times, times)
    channels = config["audio_in_channels"] // FREQUENCIES
    if (len(sounds) > 1 or any(sound.ndim != 4 or sound.shape[1::2] != (channels, FREQUENCIES) or 0 in sound.shape
                               for sound in sounds)):
        raise ConfigError("Make them with the nodes for LTX-2's latents, and join them with LTXVConcatAVLatent: the "
                          f"latent has parts of the shapes {', '.join(str(tuple(part.shape)) for part in latents)}, "
                          f"and LTX-2 works on a video and a sound of (batch, {channels}, length, {FREQUENCIES}).")
    most = torch.stack([part.max() for part in times])[None]
    return video, times[0], dict(zip(("audio",), sounds)) | {"audio_times": times[1], "most_times": most}


def call_shapes(config, shape, length=None):
    """{name: shape} of what split_parts makes, for a video of this shape. length: of the sound; None: as long as the
    video; 0: there is none."""
    if length is None:
        length = round(shape[2] * FRAMES_A_TOKEN * SOUNDS_A_FRAME)
    sound = {"audio": (shape[0], config["audio_in_channels"] // FREQUENCIES, length, FREQUENCIES)} if length else {}
    return sound | {"audio_times": (shape[0],), "most_times": (1, 2)}


def num_sounds(conditioning):
    """Tokens of sound; where a latent has none, one that nothing reads."""
    return conditioning["audio"].shape[2] if "audio" in conditioning else 1


def unpack_sound(tokens):
    return tokens.unflatten(2, (-1, FREQUENCIES)).transpose(1, 2)


def _tokens(call):
    if "audio" not in call.conditioning:
        return call.latent.new_zeros(len(call.latent), 1, call.config["audio_in_channels"])
    return call.conditioning["audio"].transpose(1, 2).flatten(2)              # (B, C, T, F) -> (B, T, C * F)


def _latest(times):
    """(B,), of all of an image's tokens."""
    return 1000 * (times if times.ndim == 1 else times.flatten(1).max(1).values)


ARGUMENTS = {
    "audio_hidden_states": _tokens, "audio_timestep": lambda call: 1000 * call.conditioning["audio_times"],
    "audio_num_frames": lambda call: num_sounds(call.conditioning),
    "isolate_modalities": lambda call: "audio" not in call.conditioning,
    "audio_encoder_attention_mask": text_mask, "most_times": given("most_times"),
    "sigma": lambda call: _latest(call.timestep),
    "audio_sigma": lambda call: _latest(call.conditioning["audio_times"])}
