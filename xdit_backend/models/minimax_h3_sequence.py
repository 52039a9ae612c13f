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
KNOWN = {"layout", "seed", "frame_count", "keyframes", "refs", "cond_video_latents", "cond_audio_latents"}


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
    keyframes = {"last_frame" if each["resolved_frame_index"] else "first_frame": noisy(each["latent"])
                 for each in payload.get("keyframes") or ()}
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


def split_components(latents, times, config, options):
    """The video, its timestep, and of this call: the sound, (B, C, 2, T), its time and the factor of its prediction,
    which are of a schedule of its own. options: ComfyUI's transformer_options."""
    video, *sounds = latents
    channels = config["audio_in_channels"]
    if len(sounds) != 1 or any(sound.ndim != 4 or sound.shape[1:3] != (channels, 2) or 0 in sound.shape
                               for sound in sounds):
        raise ConfigError("Make it with Empty MiniMax H3 AV Latent or the nodes for MiniMax H3's prompts: the latent "
                          f"has parts of the shapes {', '.join(str(tuple(part.shape)) for part in latents)}, and "
                          f"MiniMax H3 works on a video and a sound of (batch, {channels}, 2, length).")
    times = times[0] if isinstance(times, tuple) else times
    of_video, of_sound = (float(options.get(name, shift)) for name, shift in SHIFTS.items())
    sigma = (times.flatten()[:1] / 1000).float().clamp(min=LEAST_SIGMA)
    base = sigma / (of_video + sigma * (1 - of_video))
    shifted = 1 + (of_sound - 1) * base
    slope = of_sound * (1 + (of_video - 1) * base) ** 2 / (of_video * shifted ** 2)
    return video, times, {"audio": sounds[0], "audio_time": 1 - of_sound * base / shifted, "audio_slope": slope}


def call_shapes(config, shape, length=None):
    """{name: shape} of what split_components makes, for a video of this shape. length: of the sound; None: as long as the
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


def _pictures(conditioning):
    """Latents that are given: keyframes, then references."""
    keyframes = (conditioning.get(name) for name in ("first_frame", "last_frame"))
    return [each for each in (*keyframes, *(picture for picture, _ in _references(conditioning))) if each is not None]


def _sounds(conditioning):
    return [sound for _, sound in _references(conditioning) if sound is not None]


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
    pictures, cursor = [], float(num_text)
    length = FRAME_LENGTH * _frames(counts[0])
    for name, begin in (("first_frame", cursor), ("last_frame", cursor + length - FRAME_LENGTH)):
        if name in call.conditioning:
            pictures.append(_grid(call, (1, *counts[1:]), begin))
    given_sounds = []
    for picture, sound in _references(call.conditioning):
        sizes = None if picture is None else LATENT.counts(picture.shape)
        if sound is not None:
            given_sounds.append(_sound_grid(call, sound.shape[3], cursor,
                                            ends if sizes is None else _ends(sizes[2], sizes[1])))
        if sizes is not None:
            pictures.append(_grid(call, sizes, cursor))
        of_sound = 0.0 if sound is None else float(sound.shape[3])
        is_picture = sizes is not None and sizes[0] == 1
        cursor += 1.0 if is_picture else max(of_sound, 0.0 if sizes is None else FRAME_LENGTH * _frames(sizes[0]))
    sound = _sound_grid(call, num_sounds(call.conditioning) // 2, cursor, ends)
    video = _grid(call, counts, cursor).unflatten(0, counts)
    if call.patch is not None:
        video = video.narrow(dim, start, own[dim])
    return torch.cat([F.pad(text[:, None], (0, 2)), *pictures, *given_sounds, sound, video.flatten(0, 2)])
