"""MiniMax H3's one sequence of text, what a workflow gives (keyframes, references), sound and video: where each token
stands, of which kind it is and at which time.

Positions and times are those of ComfyUI's model (comfy.ldm.minimax), whose order of the tokens attention does not see.
"""

import itertools
import math

import torch
import torch.nn.functional as F

from ..protocol.errors import ConfigError
from .common.inputs import Packed

LATENT = Packed((1, 2, 2))
FRAMES_A_GROUP, FRAMES_A_TOKEN, FRAME_LENGTH, EXTENT = 5, 4, 5 / 3, 32.0
SHIFTS = {"minimax_h3_sigma_shift_video": 12.0, "minimax_h3_sigma_shift_audio": 3.0}         # of MiniMaxH3SigmaShift
GIVEN_TIME, GIVEN_SOUND_TIME, LEAST_SIGMA = 0.999, 1.0, 1e-6   # at which what is given stands, of times up to 1
VIDEO_TAG, TEXT_TAG, SOUND_TAG = range(3)
TIMES = VIDEO, SOUND, GIVEN, GIVEN_SOUND = range(4)            # rows of the table of times
KNOWN = {"layout", "seed", "frame_count", "keyframes", "refs", "cond_video_latents", "cond_audio_latents",
         "audio_scale"}
ONE_SCHEDULE = "xdit_one_schedule"         # key of transformer_options: see rescale_audio


def unfold(conditioning):
    """{name: tensor, or list of them} of what ComfyUI hands to its model, whose minimax_payload is a dict of many.

    Of keyframes and references, the latents with ComfyUI's own noise; a list has None where a reference has no picture
    or no sound. What is not known of the dict keeps a name that nobody knows.
    """
    payload = conditioning.get("minimax_payload")
    if payload is None:
        return conditioning
    rest = {name: value for name, value in conditioning.items() if name != "minimax_payload"}
    unknown = {f"minimax_payload.{name}": value for name, value in payload.items()
               if name not in KNOWN | {"text_token_tags"}}
    noisy = lambda latent: None if latent is None else _with_noise(latent, int(payload.get("seed", 0)))  # noqa: E731
    keyframes = {}
    for kind, name, convert in (("keyframe", "latent", noisy), ("keyframe_audio", "audio_latent", lambda audio: audio)):
        found = [each for each in payload.get("keyframes") or () if each.get(name) is not None]
        keyframes[f"{kind}s"] = [convert(each[name]) for each in found] or None
        # counts are lengths of tensors, which are not empty
        keyframes[f"{kind}_indices"] = [each["resolved_frame_index"] + 1 for each in found] or None
    references = payload.get("refs") or ()
    tags = payload.get("text_token_tags")
    return rest | unknown | keyframes | {
        "token_tags": None if tags is None else tags.view(1, -1).long(),
        "ref_videos": [noisy(each.get("latent")) for each in references] or None,
        "ref_sounds": [each.get("audio_latent") for each in references] or None}


def _with_noise(latent, seed):
    """A given latent as far from noise as ComfyUI's model has it; every one begins the same row of numbers."""
    tokens = LATENT.tokens(latent)
    noise = torch.randn(tokens.shape[1:], generator=torch.Generator().manual_seed(seed))
    noise = LATENT.unpack(noise[None], latent).to(latent.device)
    return GIVEN_TIME * latent.float() + (1 - GIVEN_TIME) * noise


def rescale_audio(latents, timestep, arguments, options):
    """Family.rescale_audio. From ComfyUI 0.31.0 on, the sampler has one schedule, the video's: the payload's
    audio_scale s says that the audio latent is sigma_video / sigma_audio of the model's, and the velocity of what the
    sampler has is (1 - s) audio + (1 + (s - 1) sigma_audio) velocity. Without the key, the model's velocity is scaled
    by the slope between the two schedules (split_parts)."""
    scale = (arguments.get("minimax_payload") or {}).get("audio_scale")  # of 0.31.0 on
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
    """The shifts of the video's schedule and the audio's."""
    return (float(options.get(name, shift)) for name, shift in SHIFTS.items())


def _base(sigma, options):
    """The noise level before the video's shift."""
    of_video, _ = _shifts(options)
    return sigma / (of_video + sigma * (1 - of_video))


def _shifted(base, options):
    """The audio's noise level."""
    _, of_audio = _shifts(options)
    return of_audio * base / (1 + (of_audio - 1) * base)


def split_parts(latents, times, config, options):
    """The video, its timestep, and of this call: the sound, (B, C, 2, T), its time and the factor of its prediction,
    which are of a schedule of its own. options: ComfyUI's transformer_options, or those of rescale_audio."""
    video, *sounds = latents
    channels = config["audio_in_channels"]
    if len(sounds) != 1 or any(sound.ndim != 4 or sound.shape[1:3] != (channels, 2) or 0 in sound.shape
                               for sound in sounds):
        raise ConfigError("Make it with Empty MiniMax H3 AV Latent or the nodes for MiniMax H3's prompts: the latent "
                          f"has parts of the shapes {', '.join(str(tuple(part.shape)) for part in latents)}, and "
                          f"MiniMax H3 works on a video and a sound of (batch, {channels}, 2, length).")
    times = times[0] if isinstance(times, tuple) else times
    of_video, of_audio = _shifts(options)
    base = _base(_sigma(times), options)
    slope = of_audio * (1 + (of_video - 1) * base) ** 2 / (of_video * (1 + (of_audio - 1) * base) ** 2)
    return video, times, {"audio": sounds[0], "audio_time": 1 - _shifted(base, options),
                          "audio_slope": torch.ones_like(slope) if options.get(ONE_SCHEDULE) else slope}


def call_shapes(config, shape, length=None):
    """{name: shape} of what split_parts makes, for a video of this shape. length: of the sound; None: as long as the
    video."""
    if length is None:
        length = math.ceil(_frames(shape[2]) * FRAME_LENGTH)
    return {"audio": (shape[0], config["audio_in_channels"], 2, length), "audio_time": (1,), "audio_slope": (1,)}


def _frames(count):
    """Of a picture, before so many tokens of time: the first of five is one frame, others are four."""
    groups, rest = divmod(count, FRAMES_A_GROUP)
    return groups * (1 + FRAMES_A_TOKEN * (FRAMES_A_GROUP - 1)) + (1 + FRAMES_A_TOKEN * (rest - 1) if rest else 0)


# --- what is in the sequence ---

def pack_sound(sound):
    """(B, C, 2, T) -> (B, 2 * T, C), one channel of the ears after the other."""
    return sound.permute(0, 2, 3, 1).flatten(1, 2)


def unpack_sound(tokens):
    return tokens.unflatten(1, (2, -1)).permute(0, 3, 1, 2)


def _sound(conditioning):
    if "audio" not in conditioning:
        raise ConfigError("Use Empty MiniMax H3 AV Latent, or the nodes for MiniMax H3's prompts: the latent is a "
                          "video alone, and MiniMax H3 works on video and sound together.")
    return conditioning["audio"]


def _references(conditioning):
    """[(picture or None, sound or None)] of each reference, in order."""
    found = []
    for number in itertools.count():
        one = tuple(conditioning.get(f"{name}.{number}") for name in ("ref_videos", "ref_sounds"))
        if one == (None, None):
            return found
        found.append(one)


def _keyframes(conditioning, kind):
    """[(latent, index of its first frame in the video)]. kind: "keyframe", or "keyframe_audio"."""
    found = []
    for number in itertools.count():
        latent = conditioning.get(f"{kind}s.{number}")
        if latent is None:
            return found
        found.append((latent, conditioning[f"{kind}_indices.{number}"].shape[0] - 1))


def _pictures(conditioning):
    """Latents that are given: keyframes, then references."""
    return [latent for latent, _ in _keyframes(conditioning, "keyframe")] + [
        picture for picture, _ in _references(conditioning) if picture is not None]


def _sounds(conditioning):
    """Audio latents that are given: those of keyframes, then of references."""
    return [latent for latent, _ in _keyframes(conditioning, "keyframe_audio")] + [
        sound for _, sound in _references(conditioning) if sound is not None]


def num_sounds(conditioning):
    """Tokens of the sound that is made."""
    return 2 * _sound(conditioning).shape[3]


def num_given(conditioning):
    """Tokens of keyframes and references."""
    return (sum(LATENT.num_tokens(picture.shape) for picture in _pictures(conditioning))
            + sum(2 * sound.shape[3] for sound in _sounds(conditioning)))


def _lengths(call):
    """[(number of tokens, tag, time)] of each stretch of the sequence."""
    pictures, sounds = _pictures(call.conditioning), _sounds(call.conditioning)
    return [(call.conditioning["context"].shape[1], TEXT_TAG, VIDEO),
            (sum(LATENT.num_tokens(picture.shape) for picture in pictures), VIDEO_TAG, GIVEN),
            (sum(2 * sound.shape[3] for sound in sounds), SOUND_TAG, GIVEN_SOUND),
            (num_sounds(call.conditioning), SOUND_TAG, SOUND),
            (LATENT.num_tokens(call.latent.shape), VIDEO_TAG, VIDEO)]


def _everyones(call, tensor):
    return tensor.expand(len(call.latent), *tensor.shape[1:])


def video_tokens(call):
    """(B, T, C): of the video, then of what is given."""
    given = [_everyones(call, LATENT.tokens(picture)) for picture in _pictures(call.conditioning)]
    return torch.cat([LATENT(call), *given], 1) if given else LATENT(call)


def sound_tokens(call):
    given = [_everyones(call, pack_sound(sound)) for sound in _sounds(call.conditioning)]
    return torch.cat([pack_sound(_sound(call.conditioning)), *given], 1)


def indices(kind):
    """Where in the sequence the tokens of a kind are, those that are predicted first."""
    def rule(call):
        ends = list(itertools.accumulate(length for length, *_ in _lengths(call)))
        text, given, given_sound, sound, video = map(slice, [0, *ends], ends)
        wanted = {"text": (text,), "sound": (sound, given_sound), "video": (video, given)}[kind]
        return torch.cat([torch.arange(each.start, each.stop, device=call.latent.device) for each in wanted])
    return rule


def _filled(call, place):
    return torch.cat([torch.full(each[:1], each[place], device=call.latent.device) for each in _lengths(call)])


def tags(call):
    """(T,): of which kind each token is. Of the text, parts that a picture has made are the video's."""
    filled, of_text = _filled(call, 1), call.conditioning.get("token_tags")
    return filled if of_text is None else torch.cat([of_text[0], filled[of_text.shape[1]:]])


def time_rows(call):
    """(T,): which of the times each token is at."""
    return _filled(call, 2)


def times(call):
    """(4,), float32, of TIMES: ComfyUI's time runs from 0, noise, to 1."""
    video = 1 - (call.timestep.flatten()[:1] / 1000).float().clamp(min=LEAST_SIGMA)
    sound = call.conditioning["audio_time"][:1].float()
    return torch.cat([video, sound, video.clamp(min=GIVEN_TIME), sound.clamp(min=GIVEN_SOUND_TIME)])


# --- positions: time, row, column ---

def _axis(call, count, other):
    """(count,) places of token rows, or columns, by the square root of the picture's area."""
    ratio = _ratio(count, other)
    return (torch.arange(count, dtype=torch.float64, device=call.latent.device) * (ratio / count)
            + (1 - ratio) / 2) * EXTENT


def _ratio(count, other):
    return 2 * count / math.sqrt(4 * count * other)


def _ends(count, other):
    """The first and the last place of _axis, as numbers."""
    ratio = _ratio(count, other)
    return [(number * (ratio / count) + (1 - ratio) / 2) * EXTENT for number in (0, count - 1)]


def _frame_times(call, count, begin):
    """(count,) places in time of a video's tokens."""
    numbers = torch.arange(count, device=call.latent.device)
    spans = FRAME_LENGTH * torch.where(numbers % FRAMES_A_GROUP == 0, 1, FRAMES_A_TOKEN).double()
    return begin + F.pad(spans[:-1].cumsum(0), (1, 0))


def _grid(call, counts, begin):
    """(T, 3) of a video's tokens. begin: its place in time."""
    frames, rows, columns = counts
    return torch.cartesian_prod(_frame_times(call, frames, begin), _axis(call, rows, columns),
                                _axis(call, columns, rows))


def _sound_grid(call, length, begin, ends):
    """(2 * length, 3): the two channels stand at the ends of the picture's columns."""
    places = begin + torch.arange(length, dtype=torch.float64, device=call.latent.device)
    still = torch.zeros_like(places)
    return torch.cat([torch.stack([places, still, torch.full_like(places, end)], 1) for end in ends])


def positions(call):
    """(T, 3), float64, of all tokens."""
    counts, start, whole = LATENT.counts(call.latent.shape), 0, None
    if call.patch is not None:
        dim = call.patch.dim - 2
        start, whole = call.patch.start // LATENT.patch[dim], -(-call.patch.whole // LATENT.patch[dim])
    own, counts = counts, [whole if call.patch is not None and axis == dim else count
                           for axis, count in enumerate(counts)]
    num_text, ends = call.conditioning["context"].shape[1], _ends(counts[2], counts[1])
    text = torch.arange(num_text, dtype=torch.float64, device=call.latent.device)
    videos, audios, cursor = [], [], float(num_text)
    for picture, sound in _references(call.conditioning):
        sizes = None if picture is None else LATENT.counts(picture.shape)
        if sound is not None:
            audios.append(_sound_grid(call, sound.shape[3], cursor,
                                            ends if sizes is None else _ends(sizes[2], sizes[1])))
        if sizes is not None:
            videos.append(_grid(call, sizes, cursor))
        of_sound = 0.0 if sound is None else float(sound.shape[3])
        is_picture = sizes is not None and sizes[0] == 1
        cursor += 1.0 if is_picture else max(of_sound, 0.0 if sizes is None else FRAME_LENGTH * _frames(sizes[0]))
    # keyframes are at frames of the video, which begins after all references
    videos = [_grid(call, (LATENT.counts(latent.shape)[0], *counts[1:]), cursor + FRAME_LENGTH * index)
                for latent, index in _keyframes(call.conditioning, "keyframe")] + videos
    audios = [_sound_grid(call, latent.shape[3], cursor + FRAME_LENGTH * index, ends)
                    for latent, index in _keyframes(call.conditioning, "keyframe_audio")] + audios
    sound = _sound_grid(call, num_sounds(call.conditioning) // 2, cursor, ends)
    video = _grid(call, counts, cursor).unflatten(0, counts)
    if call.patch is not None:
        video = video.narrow(dim, start, own[dim])
    return torch.cat([F.pad(text[:, None], (0, 2)), *videos, *audios, sound, video.flatten(0, 2)])
