"""MiniMax H3's sequence of text, keyframes, references, audio and video: positions, kinds and timesteps of its tokens.

Positions and timesteps are those of ComfyUI's model (comfy.ldm.minimax); the order of the tokens differs, which
attention does not depend on.
"""

import itertools
import math

import torch
import torch.nn.functional as F

from ..protocol.errors import ConfigError
from .common.inputs import Packed

LATENT = Packed((1, 2, 2))
FRAMES_A_GROUP, FRAMES_A_TOKEN, FRAME_LENGTH, EXTENT = 5, 4, 5 / 3, 32.0
SHIFTS = {"minimax_h3_sigma_shift_video": 12.0, "minimax_h3_sigma_shift_audio": 3.0}  # defaults of MiniMaxH3SigmaShift
# times of keyframes and references, and of reference audio (1: noise-free); smallest sigma
REFERENCE_TIME, REFERENCE_AUDIO_TIME, LEAST_SIGMA = 0.999, 1.0, 1e-6
VIDEO_TAG, TEXT_TAG, AUDIO_TAG = range(3)
# rows of the table of timesteps, before those of MASKS
TIMES = VIDEO, AUDIO, REFERENCE, REFERENCE_AUDIO = range(4)
# kind -> ComfyUI's conditioning: the part of the noise that inpainting gives to a token
MASKS = {"video": "denoise_mask", "audio": "audio_denoise_mask"}
ALL_NOISE = 1 - 1e-3                       # a mask of at least this is none
KNOWN = {"layout", "seed", "frame_count", "keyframes", "refs", "cond_video_latents", "cond_audio_latents",
         "audio_scale"}
ONE_SCHEDULE = "xdit_one_schedule"         # key of transformer_options: see rescale_audio


def unfold(conditioning):
    """Flatten ComfyUI's minimax_payload, a nested dict, to {name: tensor or list of tensors}.

    Latents of keyframes and references have ComfyUI's noise added. A list has None for a reference without video or
    without audio. Unknown entries keep a name that no family supports.
    """
    payload = conditioning.get("minimax_payload")
    if payload is None:
        return conditioning
    rest = {name: value for name, value in conditioning.items() if name != "minimax_payload"}
    for kind, name in MASKS.items():
        rest |= {name: None} | _levels(kind, rest[name]) if rest.get(name) is not None else {}
    unknown = {f"minimax_payload.{name}": value for name, value in payload.items()
               if name not in KNOWN | {"text_token_tags"}}
    noisy = lambda latent: None if latent is None else _with_noise(latent, int(payload.get("seed", 0)))  # noqa: E731
    keyframes = {}
    for kind, name, convert in (("keyframe", "latent", noisy), ("keyframe_audio", "audio_latent", lambda sound: sound)):
        found = [each for each in payload.get("keyframes") or () if each.get(name) is not None]
        keyframes[f"{kind}s"] = [convert(each[name]) for each in found] or None
        # counts are lengths of tensors, which are not empty
        keyframes[f"{kind}_indices"] = [each["resolved_frame_index"] + 1 for each in found] or None
    references = payload.get("refs") or ()
    tags = payload.get("text_token_tags")
    return rest | unknown | keyframes | {
        "token_tags": None if tags is None else tags.view(1, -1).long(),
        "ref_videos": [noisy(each.get("latent")) for each in references] or None,
        "ref_audios": [each.get("audio_latent") for each in references] or None}


def _levels(kind, mask):
    """A mask of inpainting by its values: the bits of each as int32 (1, L), which no cast rounds, and the index of each
    token's value, (1, T) in the order of the tokens. {} for a mask of 1.

    mask: (B, 1, F, H, W) of the video, of whose pixels a token has the largest value; (B, 1, 2, T) of the audio.
    """
    mask = mask[0, 0].float()
    if kind == "video":
        mask = F.pad(mask[None], (0, mask.shape[-1] % 2, 0, mask.shape[-2] % 2), mode="replicate")
        mask = F.max_pool2d(mask[0], 2)
    if (mask >= ALL_NOISE).all():
        return {}
    levels, index = mask.flatten().unique(return_inverse=True)
    return {f"{kind}_levels": levels[None].view(torch.int32), f"{kind}_level_indices": index[None]}


def _with_noise(latent, seed):
    """Add noise to a conditioning latent as ComfyUI's model does; each latent starts from the same random sequence."""
    tokens = LATENT.tokens(latent)
    noise = torch.randn(tokens.shape[1:], generator=torch.Generator().manual_seed(seed))
    noise = LATENT.unpack(noise[None], latent).to(latent.device)
    return REFERENCE_TIME * latent.float() + (1 - REFERENCE_TIME) * noise


def rescale_audio(latents, timestep, arguments, options):
    """Components.rescale.

    From ComfyUI 0.31.0 on, the sampler has one schedule, the video's: the payload's audio_scale s makes the sampler's
    audio latent the model's times sigma_video / sigma_audio, and its velocity
    (1 - s) audio + (1 + (s - 1) sigma_audio) velocity. Without the key, the model's velocity is scaled by the slope
    between the two schedules (split_components).
    """
    scale = (arguments.get("minimax_payload") or {}).get("audio_scale")
    if scale is None or not isinstance(latents, list) or len(latents) != 2:
        return latents, options, lambda found: found
    options = options | {ONE_SCHEDULE: True}
    if float(scale) == 1:
        return latents, options, lambda found: found
    sigma = _sigma(timestep)
    sigma_audio = _shifted(_base(sigma, options), options)
    audio = latents[1] * (sigma_audio / sigma).to(latents[1].dtype)

    def finish(found):
        video, velocity = found
        return [video, (1 - scale) * audio + (1 + (scale - 1) * sigma_audio).to(velocity.dtype) * velocity]
    return [latents[0], audio], options, finish


def _sigma(times):
    return (times.flatten()[:1] / 1000).float().clamp(min=LEAST_SIGMA)


def _shifts(options):
    """Shifts of the video's schedule and of the audio's."""
    return (float(options.get(name, shift)) for name, shift in SHIFTS.items())


def _base(sigma, options):
    """Noise level before the video's shift."""
    of_video, _ = _shifts(options)
    return sigma / (of_video + sigma * (1 - of_video))


def _shifted(base, options):
    """Noise level of the audio."""
    _, of_audio = _shifts(options)
    return of_audio * base / (1 + (of_audio - 1) * base)


def split_components(latents, times, config, options):
    """Return the video, its timestep, and for this call the audio (B, C, 2, T), its timestep and the factor of its
    prediction, which follow a schedule of their own. options: ComfyUI's transformer_options, or rescale_audio's."""
    video, *audios = latents
    channels = config["audio_in_channels"]
    if len(audios) != 1 or any(audio.ndim != 4 or audio.shape[1:3] != (channels, 2) or 0 in audio.shape
                               for audio in audios):
        raise ConfigError("Make the latent with Empty MiniMax H3 AV Latent or the nodes for MiniMax H3's prompts: its "
                          f"components have the shapes {', '.join(str(tuple(part.shape)) for part in latents)}, and "
                          f"MiniMax H3 needs a video and audio of (batch, {channels}, 2, length).")
    times = times[0] if isinstance(times, tuple) else times
    of_video, of_audio = _shifts(options)
    base = _base(_sigma(times), options)
    slope = of_audio * (1 + (of_video - 1) * base) ** 2 / (of_video * (1 + (of_audio - 1) * base) ** 2)
    return video, times, {"audio": audios[0], "audio_time": 1 - _shifted(base, options),
                          "audio_slope": torch.ones_like(slope) if options.get(ONE_SCHEDULE) else slope}


def call_shapes(config, shape, length=None):
    """Shapes of what split_components returns, {name: shape}, for a video of this shape. length: of the audio; None:
    as long as the video."""
    if length is None:
        length = math.ceil(_frames(shape[2]) * FRAME_LENGTH)
    return {"audio": (shape[0], config["audio_in_channels"], 2, length), "audio_time": (1,), "audio_slope": (1,)}


def _frames(count):
    """Number of frames in `count` tokens along time: the first of each five tokens is one frame, the others are
    four."""
    groups, rest = divmod(count, FRAMES_A_GROUP)
    return groups * (1 + FRAMES_A_TOKEN * (FRAMES_A_GROUP - 1)) + (1 + FRAMES_A_TOKEN * (rest - 1) if rest else 0)


# --- what is in the sequence ---

def pack_audio(audio):
    """(B, C, 2, T) -> (B, 2 * T, C), one stereo channel after the other."""
    return audio.permute(0, 2, 3, 1).flatten(1, 2)


def unpack_audio(tokens):
    return tokens.unflatten(1, (2, -1)).permute(0, 3, 1, 2)


def _audio(conditioning):
    if "audio" not in conditioning:
        raise ConfigError("Use Empty MiniMax H3 AV Latent, or the nodes for MiniMax H3's prompts: the latent has only "
                          "a video, and MiniMax H3 needs video and audio together.")
    return conditioning["audio"]


def _references(conditioning):
    """[(video or None, audio or None)] of each reference, in order."""
    found = []
    for number in itertools.count():
        one = tuple(conditioning.get(f"{name}.{number}") for name in ("ref_videos", "ref_audios"))
        if one == (None, None):
            return found
        found.append(one)


def _keyframes(conditioning, kind):
    """Return [(latent, index of its first frame in the video)]. kind: "keyframe" or "keyframe_audio"."""
    found = []
    for number in itertools.count():
        latent = conditioning.get(f"{kind}s.{number}")
        if latent is None:
            return found
        found.append((latent, conditioning[f"{kind}_indices.{number}"].shape[0] - 1))


def _reference_videos(conditioning):
    """Latents of keyframes, then of references."""
    return [latent for latent, _ in _keyframes(conditioning, "keyframe")] + [
        video for video, _ in _references(conditioning) if video is not None]


def _reference_audios(conditioning):
    """Audio latents of keyframes, then of references."""
    return [latent for latent, _ in _keyframes(conditioning, "keyframe_audio")] + [
        audio for _, audio in _references(conditioning) if audio is not None]


def num_audio_tokens(conditioning):
    """Number of tokens of the generated audio."""
    return 2 * _audio(conditioning).shape[3]


def num_reference_tokens(conditioning):
    """Number of tokens of keyframes and references."""
    return (sum(LATENT.num_tokens(video.shape) for video in _reference_videos(conditioning))
            + sum(2 * audio.shape[3] for audio in _reference_audios(conditioning)))


def _lengths(call):
    """[(number of tokens, tag, row of TIMES)] of each stretch of the sequence."""
    videos, audios = _reference_videos(call.conditioning), _reference_audios(call.conditioning)
    return [(call.conditioning["context"].shape[1], TEXT_TAG, VIDEO),
            (sum(LATENT.num_tokens(video.shape) for video in videos), VIDEO_TAG, REFERENCE),
            (sum(2 * audio.shape[3] for audio in audios), AUDIO_TAG, REFERENCE_AUDIO),
            (num_audio_tokens(call.conditioning), AUDIO_TAG, AUDIO),
            (LATENT.num_tokens(call.latent.shape), VIDEO_TAG, VIDEO)]


def _expanded(call, tensor):
    return tensor.expand(len(call.latent), *tensor.shape[1:])


def video_tokens(call):
    """Tokens (B, T, C) of the video, then of keyframes and references."""
    references = [_expanded(call, LATENT.tokens(video)) for video in _reference_videos(call.conditioning)]
    return torch.cat([LATENT(call), *references], 1) if references else LATENT(call)


def audio_tokens(call):
    references = [_expanded(call, pack_audio(audio)) for audio in _reference_audios(call.conditioning)]
    return torch.cat([pack_audio(_audio(call.conditioning)), *references], 1)


def indices(kind):
    """Rule for the positions of a kind's tokens in the sequence, those that are predicted first."""
    def rule(call):
        ends = list(itertools.accumulate(length for length, *_ in _lengths(call)))
        text, references, reference_audio, audio, video = map(slice, [0, *ends], ends)
        wanted = {"text": (text,), "audio": (audio, reference_audio), "video": (video, references)}[kind]
        return torch.cat([torch.arange(each.start, each.stop, device=call.latent.device) for each in wanted])
    return rule


def _filled(call, index):
    return torch.cat([torch.full(each[:1], each[index], device=call.latent.device) for each in _lengths(call)])


def tags(call):
    """Kind of each token, (T,). Text tokens that an image produced have the video's kind."""
    filled, of_text = _filled(call, 1), call.conditioning.get("token_tags")
    return filled if of_text is None else torch.cat([of_text[0], filled[of_text.shape[1]:]])


def time_rows(call):
    """Row of `times` of each token, (T,)."""
    rows, first = list(_filled(call, 2).split([length for length, *_ in _lengths(call)])), len(TIMES)
    for kind, stretch in (("video", -1), ("audio", -2)):
        index = call.conditioning.get(f"{kind}_level_indices")
        if index is not None:
            rows[stretch] = first + (_own_rows(call, index[0]) if kind == "video" else index[0])
            first += call.conditioning[f"{kind}_levels"].shape[1]
    return torch.cat(rows)


def _full_counts(call):
    """(frames, rows, columns) of tokens of the full latent, the dim of the call's patch among them or None, and its
    first."""
    counts = LATENT.counts(call.latent.shape)
    if call.patch is None:
        return counts, None, 0
    dim = call.patch.dim - 2
    full = -(-call.patch.whole // LATENT.patch[dim])
    return [full if axis == dim else count for axis, count in enumerate(counts)], dim, (
        call.patch.start // LATENT.patch[dim])


def _own_rows(call, tensor):
    """Those of the call's patch, of a tensor with a row for each of the video's tokens."""
    counts, dim, start = _full_counts(call)
    if dim is None:
        return tensor
    return tensor.unflatten(0, counts).narrow(dim, start, LATENT.counts(call.latent.shape)[dim]).flatten(0, 2)


def times(call):
    """Timesteps of TIMES and of the masks' values, float32. ComfyUI's time runs from 0 (noise) to 1."""
    sigma = _sigma(call.timestep)
    video, audio = 1 - sigma, call.conditioning["audio_time"][:1].float()
    found = [video, audio, video.clamp(min=REFERENCE_TIME), audio.clamp(min=REFERENCE_AUDIO_TIME)]
    for kind, noise, last in (("video", sigma, found[REFERENCE]), ("audio", 1 - audio, found[REFERENCE_AUDIO])):
        levels = call.conditioning.get(f"{kind}_levels")
        if levels is not None:
            found.append(torch.minimum(1 - levels[0].view(torch.float32) * noise, last))
    return torch.cat(found)


# --- positions: time, row, column ---

def _axis(call, count, other):
    """Positions of token rows, or columns, (count,), scaled by the square root of the image's area."""
    ratio = _ratio(count, other)
    return (torch.arange(count, dtype=torch.float64, device=call.latent.device) * (ratio / count)
            + (1 - ratio) / 2) * EXTENT


def _ratio(count, other):
    return 2 * count / math.sqrt(4 * count * other)


def _ends(count, other):
    """The first and the last position of _axis, as numbers."""
    ratio = _ratio(count, other)
    return [(number * (ratio / count) + (1 - ratio) / 2) * EXTENT for number in (0, count - 1)]


def _frame_times(call, count, begin):
    """Positions of a video's tokens along time, (count,)."""
    numbers = torch.arange(count, device=call.latent.device)
    spans = FRAME_LENGTH * torch.where(numbers % FRAMES_A_GROUP == 0, 1, FRAMES_A_TOKEN).double()
    return begin + F.pad(spans[:-1].cumsum(0), (1, 0))


def _grid(call, counts, begin):
    """Positions (T, 3) of a video's tokens. begin: position of the first along time."""
    frames, rows, columns = counts
    return torch.cartesian_prod(_frame_times(call, frames, begin), _axis(call, rows, columns),
                                _axis(call, columns, rows))


def _audio_grid(call, length, begin, ends):
    """Positions (2 * length, 3) of audio tokens: the two channels are at the ends of the image's columns."""
    along_time = begin + torch.arange(length, dtype=torch.float64, device=call.latent.device)
    still = torch.zeros_like(along_time)
    return torch.cat([torch.stack([along_time, still, torch.full_like(along_time, end)], 1) for end in ends])


def positions(call):
    """Positions of all tokens, (T, 3) float64."""
    counts, *_ = _full_counts(call)
    num_text, ends = call.conditioning["context"].shape[1], _ends(counts[2], counts[1])
    text = torch.arange(num_text, dtype=torch.float64, device=call.latent.device)
    video_grids, audio_grids, cursor = [], [], float(num_text)
    for reference_video, audio in _references(call.conditioning):
        sizes = None if reference_video is None else LATENT.counts(reference_video.shape)
        if audio is not None:
            audio_grids.append(_audio_grid(call, audio.shape[3], cursor,
                                           ends if sizes is None else _ends(sizes[2], sizes[1])))
        if sizes is not None:
            video_grids.append(_grid(call, sizes, cursor))
        of_audio = 0.0 if audio is None else float(audio.shape[3])
        is_image = sizes is not None and sizes[0] == 1
        cursor += 1.0 if is_image else max(of_audio, 0.0 if sizes is None else FRAME_LENGTH * _frames(sizes[0]))
    # keyframes are at frames of the video, which begins after all references
    video_grids = [_grid(call, (LATENT.counts(latent.shape)[0], *counts[1:]), cursor + FRAME_LENGTH * index)
                   for latent, index in _keyframes(call.conditioning, "keyframe")] + video_grids
    audio_grids = [_audio_grid(call, latent.shape[3], cursor + FRAME_LENGTH * index, ends)
                   for latent, index in _keyframes(call.conditioning, "keyframe_audio")] + audio_grids
    audio = _audio_grid(call, num_audio_tokens(call.conditioning) // 2, cursor, ends)
    video = _own_rows(call, _grid(call, counts, cursor))
    return torch.cat([F.pad(text[:, None], (0, 2)), *video_grids, *audio_grids, audio, video])
