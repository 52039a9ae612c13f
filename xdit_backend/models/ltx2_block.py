"""Video-to-audio attention of LTX-2's block in ComfyUI 0.31 and newer, which reads the video after audio-to-video
attention has been added. In older versions, and in diffusers, both directions read the video from before.

# B batch, T video tokens of this rank, C channels
"""

import functools

AGAIN = "video_is_normed_again"            # conditioning of a call of such a ComfyUI, whatever its value


def update_context(block, is_updated):
    """Hook modules of diffusers' LTX2VideoTransformerBlock so that its video-to-audio attention receives the updated
    video. is_updated() -> as ComfyUI 0.31 and newer?

    `seen`, from the norm on: the video (B, T, C), then what get_mod_params returns: scale and shift of audio-to-video
    attention and of video-to-audio attention, the gate, those of the audio. Another forward may run the block during
    the all-reduces of audio-to-video attention, for which `running` has (its input, *seen) of each forward in it.
    """
    norm, to_video, to_audio, modulation = (block.audio_to_video_norm, block.audio_to_video_attn,
                                            block.video_to_audio_attn, block.get_mod_params)
    normalise, seen, running = norm.forward, [], []

    def before_norm(_, args):
        seen[:] = args if is_updated() else []

    @functools.wraps(modulation)
    def recorded(*args):
        found = modulation(*args)
        if seen:
            seen.append(found)
        return found

    def before_attention(_, args):
        if seen:
            running.append((args[0], *seen))

    def after_attention(_, args, found_BTC):
        for normed, video_BTC, scales_shifts, gate, *_ in running:
            if normed is args[0]:
                seen[:] = video_BTC + gate[0] * found_BTC, scales_shifts
        running[:] = [each for each in running if each[0] is not args[0]]

    def with_updated_context(_, args, kwargs):
        if not seen:
            return args, kwargs
        video_BTC, (*_, scale, shift) = seen[:2]
        seen.clear()
        return args, kwargs | {"encoder_hidden_states": normalise(video_BTC) * (1 + scale) + shift}

    block.get_mod_params = recorded
    norm.register_forward_pre_hook(before_norm)
    to_video.register_forward_pre_hook(before_attention)
    to_video.register_forward_hook(after_attention)
    to_audio.register_forward_pre_hook(with_updated_context, with_kwargs=True)
