"""LTX-2's audio stream: config rules, latent component, and arguments of the forward. A reference voice precedes the
audio's own tokens, without noise and at times that end before the video begins."""

import torch

from ..protocol.errors import ConfigError
from .common.inputs import from_conditioning, has, size, text_mask, token_range
from .common.ltx_tokens import LATENT, NUM_HEADS
from .common.plan import TokenArgument

VIDEO, AUDIO, FREQUENCIES = ("image",), ("audio",), 16
ISOLATED = "isolated"                      # conditioning of a call in which video and audio do not attend to each other
FRAMES_A_TOKEN, AUDIO_TOKENS_A_FRAME = 8, 25 / 24
HAS_PROJECTION = has("caption_projection.linear_2.weight")

# tables are for all heads at once, or for each head
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
    "cross_attention_adaln": (False, True), "ff_bias": (True, False), "audio_ff_bias": (True, False)}
PUBLISHED_SETTINGS = {"causal_temporal_positioning": True, "use_middle_indices_grid": True, "rope_type": "split",
                      "frequencies_precision": "float64",
                      "av_ca_timestep_scale_multiplier": 1000.0}             # metadata of published files
RULES = {
    "audio_in_channels": size("audio_patchify_proj.weight", 1), "audio_out_channels": size("audio_proj_out.weight", 0),
    "audio_num_attention_heads": NUM_HEADS,
    "audio_attention_head_dim": size("audio_patchify_proj.weight", 0, NUM_HEADS),
    "audio_cross_attention_dim": size("transformer_blocks.0.audio_attn2.to_k.weight", 1),
    "use_prompt_embeddings": HAS_PROJECTION,
    **dict.fromkeys(("gated_attn", "audio_gated_attn"), has("transformer_blocks.0.attn1.to_gate_logits.weight")),
    **dict.fromkeys(("cross_attn_mod", "audio_cross_attn_mod"), has("prompt_adaln_single.linear.weight")),
    **{f"{of}ff_bias": has(f"transformer_blocks.0.{of}ff.net.0.proj.bias") for of in ("", "audio_")},
    "use_keyframes_abs_pos_embedding": has("keyframes_abs_pos_embedding")}


def split_components(latents, times, config, options):
    """Return the video, its timestep, and for this call the audio (B, C, T, F), its timesteps, and the latest
    timestep of each."""
    video, *audio = latents
    times = times if isinstance(times, tuple) else (times, times)
    channels = config["audio_in_channels"] // FREQUENCIES
    if (len(audio) > 1 or any(audio.ndim != 4 or audio.shape[1::2] != (channels, FREQUENCIES) or 0 in audio.shape
                              for audio in audio)):
        raise ConfigError("Make video and audio with the nodes for LTX-2's latents, and join them with "
                          "LTXVConcatAVLatent: the latent's components have the shapes "
                          f"{', '.join(str(tuple(part.shape)) for part in latents)}, and LTX-2 needs a video and audio "
                          f"of (batch, {channels}, length, {FREQUENCIES}).")
    most = torch.stack([part.max() for part in times])[None]
    return video, times[0], dict(zip(("audio",), audio)) | {"audio_times": times[1], "most_times": most}


def call_shapes(config, shape, length=None):
    """Shapes of what split_components returns, {name: shape}, for a video of this shape. length: of the audio; None:
    as long as the video; 0: no audio."""
    if length is None:
        length = round(shape[2] * FRAMES_A_TOKEN * AUDIO_TOKENS_A_FRAME)
    audio = {"audio": (shape[0], config["audio_in_channels"] // FREQUENCIES, length, FREQUENCIES)} if length else {}
    return audio | {"audio_times": (shape[0],), "most_times": (1, 2)}


def unfold(conditioning):
    """Replace the reference voice by its tokens, (1 or B, T, C F), and generated keyframes by numbers: tokens of a
    frame, first frame, number of frames, each plus one."""
    found, reference, keyframes = dict(conditioning), *(conditioning.get(name) for name in ("ref_audio",
                                                                                            "generated_keyframes"))
    if isinstance(reference, dict):
        found["ref_audio"] = reference["tokens"]
    if isinstance(keyframes, dict):
        found["generated_keyframes"] = [keyframes[name] + 1 for name in (
            "tokens_per_frame", "first_latent_frame", "num_keyframes")]
    return found


def num_references(conditioning):
    """Number of tokens of the reference voice; 0 without one."""
    return conditioning["ref_audio"].shape[1] if "ref_audio" in conditioning else 0


def num_audio(conditioning):
    """Number of audio tokens, including the reference's. Without audio there is one token, which nothing attends to."""
    own = conditioning["audio"].shape[2] if "audio" in conditioning else 0
    return own + num_references(conditioning) or 1


def unpack_audio(tokens):
    return tokens.unflatten(2, (-1, FREQUENCIES)).transpose(1, 2)


def _is_silent(call):
    return not {"audio", "ref_audio"} & call.conditioning.keys()


def _tokens(call):
    width, reference = call.config["audio_in_channels"], call.conditioning.get("ref_audio")
    if _is_silent(call):
        return call.latent.new_zeros(len(call.latent), 1, width)
    if reference is not None and (reference.ndim != 3 or reference.shape[2] != width):
        raise ConfigError("Encode the reference audio with LTX-2's audio VAE: its tokens have the shape "
                          f"{tuple(reference.shape)}, and this model needs (batch, length, {width}).")
    tokens = [] if reference is None else [reference.expand(len(call.latent), -1, -1)]
    if "audio" in call.conditioning:
        tokens.append(call.conditioning["audio"].transpose(1, 2).flatten(2))  # (B, C, T, F) -> (B, T, C * F)
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens, 1)


def _times(call):
    """Timesteps (B,), or one per token, (B, T, 1) or (B, T); a reference is at timestep zero."""
    times, count = call.conditioning["audio_times"], num_references(call.conditioning)
    if not count:
        return times
    own = times.reshape(len(times), -1).expand(-1, num_audio(call.conditioning) - count)
    return torch.cat([own.new_zeros(len(own), count), own], 1)


def _most_times(call):
    """The latest timesteps of video and audio, (B or 1, 2); 0 for audio that is only a reference."""
    most = from_conditioning("most_times")(call)
    is_alone = "ref_audio" in call.conditioning and "audio" not in call.conditioning
    return most * most.new_tensor([1, 0]) if is_alone else most


def positions_after_reference(rope, count, num_tokens, batch, device):
    """Seconds at which each token begins and ends, (B, 1, T, 2), where the first `count` tokens are a reference,
    which ends one token's length before 0. rope: diffusers' rotary embedding of the audio."""
    reference, own = (rope.prepare_audio_coords(batch, length, device) for length in (count, num_tokens - count))
    a_token = rope.scale_factors[0] * rope.hop_length / rope.sampling_rate
    return torch.cat([reference - (reference[0, 0, -1, 1].item() + a_token), own], 2)


def with_marker(call):
    """Tokens that LTX-2.5 marks as single frames of pixels, (1, T, 1): those of the first frame and of generated
    keyframes. None for a model without the marker."""
    if not call.config.get("use_keyframes_abs_pos_embedding"):
        return None
    first, count, _ = token_range(call, LATENT)
    marked = (LATENT.positions(call)[:, 0] == 0).float()
    if "generated_keyframes.0" in call.conditioning:
        size, start, num_frames = (call.conditioning[f"generated_keyframes.{number}"].shape[0] - 1
                                   for number in range(3))
        a_frame = call.latent.shape[3:].numel()
        if call.patch is None and size != a_frame:
            raise ConfigError("Separate the generated keyframes before the latent's size is changed: they are for "
                              f"frames of {size} tokens, and this latent has {a_frame}.")
        begin, end = (max(0, min(count, size * frame - first)) for frame in (start, start + num_frames))
        marked[begin:end] = 1
    return marked[None, :, None]


def _latest(times):
    """The latest timestep of an image's tokens, (B,)."""
    return 1000 * (times if times.ndim == 1 else times.flatten(1).max(1).values)


ARGUMENTS = {
    "audio_hidden_states": _tokens, "audio_timestep": lambda call: 1000 * _times(call),
    "num_references": lambda call: num_references(call.conditioning),
    "audio_num_frames": lambda call: num_audio(call.conditioning),
    "isolate_modalities": lambda call: _is_silent(call) or ISOLATED in call.conditioning,
    "audio_encoder_attention_mask": text_mask, "most_times": _most_times,
    "sigma": lambda call: _latest(call.timestep),
    "audio_sigma": lambda call: _latest(_times(call))}
