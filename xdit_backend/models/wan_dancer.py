"""WanDancer, ComfyUI's own module: Wan that generates dance from music. After some blocks, each eighth of a frame
reads the music at its moment. Videos of other rates than 30 frames per second have their own embedding and head."""

import dataclasses
from types import MethodType

import torch
import torch.nn.functional as F

from .common.family import SmallConfig
from .common.forward_state import ForwardValue
from .common.inputs import blocks, config_of, from_conditioning, has, only_prefixes, optional_size
from .common.key_mapping import table
from .common.native_module import native_arguments
from .common.rope_scaling import moves
from .common.wan import ARGUMENTS, RULES, SMALL
from .wan import LATENT, MODULES
from .wan_camera import HEAD, WAN_CAMERA

NATIVE, LAYERS = "comfy.ldm.wan.model_wandancer:WanDancerModel", (0, 4, 8, 12, 16, 20, 24, 27)  # layers that read music
MORE = {"patch_embedding_global", "img_emb_refimage", "head_global", "music_injector", "music_projection",
        "music_encoder", "ref_conv"}
MOMENTS, RATE = 8, 30.0                    # moments per frame; frames per second
KEYS = table((r"\.self_attn\.in_proj_(weight|bias)$", tuple(rf".self_attn.{part}_proj.\1" for part in "qkv"),
              (1, 1, 1)))


def _unfold(conditioning):
    """Replace the frame rate by the number of frames at 30 per second that one frame lasts, if it is an integer, as
    ComfyUI's node sets it."""
    lasts = RATE / conditioning["fps"] if conditioning.get("fps") else 0.5
    if lasts % 1:
        return conditioning
    return {name: value for name, value in conditioning.items() if name != "fps"} | {"frame_lasts": int(lasts)}


def _rate(call):
    lasts = call.conditioning.get("frame_lasts")
    return RATE if lasts is None else RATE / lasts.shape[0]


def _scale(call):
    """Strength of the music, (B, 1, 1)."""
    scale = from_conditioning("audio_inject_scale")(call)
    return 1.0 if scale is None else scale.view(-1, 1, 1)


def _adapt(model, config):
    """Move code that ComfyUI's forward runs after some blocks into these blocks. A token reads a single moment,
    whatever its query: attention to one key returns its value."""
    music = ForwardValue(model)
    vars(model).update(music=music)
    vars(model.music_encoder[-1]).update(music=music, width=config["dim"])
    model.forward_orig = MethodType(_forward_orig, model)
    model.music_encoder[-1].forward = MethodType(_store_moments, model.music_encoder[-1])
    for block in model.blocks:
        block.forward = MethodType(_with_token_indices, block)
    for number, layer in enumerate(config["audio_inject_layers"]):
        if layer < len(model.blocks):
            block = model.blocks[layer]
            # vars(): not a submodule of the block, which would change its tensor names
            vars(block).update(reader=model.music_injector.injector[number], music=music)
            block.forward = MethodType(_with_music, block)
    model.music_injector.forward = lambda x, *args, **kwargs: x


def _forward_orig(self, x, t, context, audio_inject_scale=1.0, **others):
    self.music.set((x.shape[2], audio_inject_scale, None))
    return type(self).forward_orig(self, x, t, context, **others)


def _store_moments(self, x, freqs, num_frames=None):
    """The last layer of the music encoder, which stores the moments of all frames of the latent for the blocks."""
    encoded, (own_frames, scale, _) = type(self).forward(self, x, freqs), self.music.get()
    size = MOMENTS * (num_frames or own_frames), self.width
    self.music.set((own_frames, scale, F.interpolate(encoded[:, None], size, mode="bilinear")[:, 0]))
    return encoded


def _of_all_frames(module, forward, rows, tokens, args, kwargs):
    """For a patch, encode the music of the full video. A patch has rows instead of frames if there is only one
    frame."""
    return forward(*args, **kwargs, num_frames=rows.whole_rows if rows.axis == 0 else 1)


def _with_token_indices(self, x, e, freqs, context, context_img_len=257, transformer_options={}, token_indices=None):
    return type(self).forward(self, x, e, freqs, context, context_img_len, transformer_options)


def _with_music(self, x, e, freqs, context, context_img_len=257, transformer_options={}, token_indices=None):
    x = _with_token_indices(self, x, e, freqs, context, context_img_len, transformer_options)
    _, scale, moments = self.music.get()
    if moments is None:
        return x
    own, num_tokens = (torch.arange(x.shape[1], device=x.device),
                       x.shape[1]) if token_indices is None else token_indices
    read = self.reader.o(self.reader.v(moments))[:, own * moments.shape[1] // num_tokens]
    return x + (read * scale).to(x.dtype)


WAN_DANCER = dataclasses.replace(
    WAN_CAMERA, name="WanDancer", title="WanDancer", transformer=NATIVE, adapt_model=_adapt,
    keep_in_compute_dtype=("patch_embedding", "patch_embedding_global"),
    detection=dataclasses.replace(
        WAN_CAMERA.detection,
        convert=KEYS, recognise=has(HEAD, "head.modulation", "patch_embedding_global.weight"),
        refusals=(only_prefixes(MODULES | MORE),),
        config=config_of(**RULES, model_type="wandancer", in_dim_ref_conv=optional_size("ref_conv.weight", 1),
                         audio_inject_layers=lambda shapes: LAYERS[:blocks("music_injector.injector.")(shapes)],
                         _image_dim=optional_size("img_emb.proj.1.weight", 1))),
    inputs=dataclasses.replace(
        WAN_CAMERA.inputs,
        conditioning={"context": "text_dim", "rope_scales": None, "clip_fea": "_image_dim",
                      **dict.fromkeys(("clip_fea_ref", "audio_embed", "frame_lasts", "audio_inject_scale"))},
        counts=("frame_lasts",), unfold=_unfold, ignored=("denoise_mask",),
        arguments=native_arguments(LATENT, "context", "clip_fea", "clip_fea_ref", "audio_embed", fps=_rate,
                                   audio_inject_scale=_scale, transformer_options=moves)),
    plan=dataclasses.replace(
        WAN_CAMERA.plan, token_index_argument=("token_indices", ("image",)),
        positions={"rope_encode": WAN_CAMERA.plan.positions["rope_encode"], "music_encoder.1": _of_all_frames}),
    testing=SmallConfig(SMALL | {"model_type": "wandancer", "num_layers": 5, "audio_inject_layers": LAYERS[:2],
                                 "_image_dim": 1280}, NATIVE,
                        ARGUMENTS | {"model_type": "wandancer", "in_dim": 36, "num_layers": 5}, input_shapes={
                            "clip_fea_ref": lambda config, shape, tokens: (shape[0], 3, 1280),
                            "audio_embed": lambda config, shape, tokens: (shape[0], 7 * shape[2], 35),
                            "frame_lasts": lambda config, shape, tokens: (2,),
                            "audio_inject_scale": lambda config, shape, tokens: (1,)}))
