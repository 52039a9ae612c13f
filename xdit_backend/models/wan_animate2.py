"""Wan-Animate 2, ComfyUI's own module (from 0.31 on): Wan that follows a video by a second stream of tokens, the pose.

Every block computes the pose first. Each frame of the video then attends to all frames and to its own frame of the
pose; the first frame, a reference image, has none.
"""

import dataclasses
from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F

from ..protocol.errors import ConfigError
from .common.family import Detection, SmallConfig, derived
from .common.forward_state import ForwardValue
from .common.inputs import config_of, from_conditioning, has, num_tokens_of, only_prefixes, optional_size
from .common.native_module import native_arguments
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.rope_scaling import moves
from .common.wan import ARGUMENTS, RULES, SMALL
from .wan import LATENT, MODULES
from .wan_camera import HEAD, WAN_CAMERA

NATIVE = "comfy.ldm.wan.model_animate2:WanAnimate2Model"
FRAMES = "each of its frames attends to its own frame of the pose, so that a device needs all tokens of some heads"
STRENGTHS = "pose_strength", "reference_strength"


def _adapt(model, config):
    """Have a block's forward compute the pose's stream and then the video's, which ComfyUI's forward computes with two
    calls of other methods."""
    model.why_uncompiled = "its frames attend to the pose one by one"
    vars(model).update(pose=ForwardValue(model), strengths=ForwardValue(model, (None, None)))
    model.forward_orig = MethodType(_with_strengths, model)
    for block in model.blocks:
        attention = block.self_attn
        vars(block).update(pose=model.pose, strengths=model.strengths)
        block.forward_pose, block.forward_gen = MethodType(_remember_pose, block), MethodType(_run_block, block)
        block.forward = MethodType(_both_streams, block)
        for name, forward in (("of_pose", _pose_attention), ("of_video", _video_attention)):
            setattr(attention, name, torch.nn.Module())
            getattr(attention, name).forward = MethodType(forward, getattr(attention, name))
        attention.forward_pose = MethodType(_attend_pose, attention)
        attention.forward_gen = MethodType(_attend_video, attention)
        attention.forward = MethodType(_attend, attention)


def _with_strengths(self, *args, pose_strength=None, reference_strength=None, **kwargs):
    """The class's forward, with the strengths as tensors of one number, which it would wait for."""
    with self.pose.holding(None), self.strengths.holding(tuple(
            None if strength is None else strength[0] for strength in (pose_strength, reference_strength))):
        return type(self).forward_orig(self, *args, **kwargs)


def _remember_pose(self, x, e, freqs, context, context_img_len=257, transformer_options={}):
    """Leave the pose to the block's forward: the first block's input, and what all blocks get."""
    if self.pose.get() is None:
        self.pose.set((x, {"pose_e": e, "pose_freqs": freqs, "pose_context": context,
                           "pose_img_len": context_img_len}))
    return x, None, None


def _run_block(self, x, e, freqs, context, k_pose, v_pose, f_gen, hw, buffers, ref_strength=1.0, context_img_len=257,
               transformer_options={}):
    pose, of_all_blocks = self.pose.get() or (x[:, :0], {})
    x, pose = self(x, pose, e, freqs, context, f_gen, hw, self.strengths.get(), context_img_len, transformer_options,
                   **of_all_blocks)
    self.pose.set((pose, of_all_blocks) if of_all_blocks else None)
    return x


def _both_streams(self, x, pose, e, freqs, context, num_frames, frame_size, strengths, context_img_len,
                  transformer_options, pose_e=None, pose_freqs=None, pose_context=None, pose_img_len=None,
                  token_indices=None):
    """A block. pose: (B, T, C); without a pose it has no tokens, and pose_e is None."""
    key = value = None
    if pose_e is not None:
        pose, key, value = type(self).forward_pose(self, pose, pose_e, pose_freqs, pose_context, pose_img_len,
                                                   transformer_options)
        value = value if strengths[0] is None else value * strengths[0]
    x = type(self).forward_gen(self, x, e, freqs, context, key, value, num_frames, frame_size, token_indices,
                               strengths[1], context_img_len, transformer_options)
    return x, pose


def _attend_pose(self, x, freqs, transformer_options={}):
    """(output, keys, values) of the pose's self-attention. Keys and values are (B, T, N, H)."""
    found = []
    return self(x, freqs, found), *found


def _attend_video(self, x, freqs, k_pose, v_pose, f_gen, hw, token_indices, ref_strength=None, transformer_options={}):
    return self(x, freqs, None, (k_pose, v_pose, f_gen, hw, token_indices, ref_strength))


def _attend(self, x, freqs, of_pose=None, video=()):
    """The attention's forward, whose output is summed over tensor ranks. of_pose: a list for keys and values if the
    tokens are those of the pose; else video has further arguments of _video_attention."""
    query, key, value = self.qkv(x, freqs)
    if of_pose is None:
        return self.o(self.of_video(query, key, value, *video))
    of_pose += key, value
    return self.o(self.of_pose(query, key, value))


def _pose_attention(self, *query_key_value):
    """(B, T, N, H) to (B, T, N * H)."""
    out = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in query_key_value))
    return out.transpose(1, 2).flatten(2)


def _video_attention(self, query, key, value, pose_key, pose_value, num_frames, frame_size, token_indices, strength):
    """The same for the video. pose_key, pose_value: None without a pose. token_indices: the plan's, or None if this
    rank has all tokens."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    pose = [None if each is None else each.transpose(1, 2) for each in (pose_key, pose_value)]
    within = partial(_by_frames, num_frames, frame_size, strength)
    if token_indices is None:
        out = within(F.scaled_dot_product_attention, query, key, value, *pose)
    else:
        # the pose's queries have no use: with them, all three are of the same tokens
        joint = [query, key, value] if pose_key is None else [
            torch.cat(pair, 2) for pair in zip((query, key, value), (pose[0], *pose))]
        out = F.scaled_dot_product_attention(*joint, within=partial(_of_all_tokens, within))[:, :, :query.shape[2]]
    return out.transpose(1, 2).flatten(2)


def _of_all_tokens(within, query, key, value):
    """The video's attention for all tokens of some heads, those of the pose last, (B, N, T, H) to the same shape."""
    count = within.args[0] * within.args[1]
    has_pose = key.shape[2] > count
    pose = [each[:, :, count:] if has_pose else None for each in (key, value)]
    out = within(F.scaled_dot_product_attention, *(each[:, :, :count] for each in (query, key, value)), *pose)
    return F.pad(out, (0, 0, 0, key.shape[2] - count))


def _by_frames(num_frames, size, strength, attend, query, key, value, pose_key, pose_value):
    """Attention of all of the video's tokens, (B, N, T, H), `size` a frame. strength: of the first frame's values."""
    if strength is not None:
        value = torch.cat([value[:, :, :size] * strength, value[:, :, size:]], 2)
    if pose_key is None:
        return attend(query, key, value)
    tokens, frames = key.shape[2], []
    keys, values = (torch.cat([video, pose[:, :, :size]], 2) for video, pose in ((key, pose_key), (value, pose_value)))
    for frame in range(num_frames):
        start = frame * size
        if frame:
            keys[:, :, tokens:] = pose_key[:, :, start - size:start]
            values[:, :, tokens:] = pose_value[:, :, start - size:start]
        frames.append(attend(query[:, :, start:start + size], *((keys, values) if frame else (key, value))))
    return torch.cat(frames, 2)


def _latent(call):
    """The latent. Raises ConfigError for a pose of another size."""
    pose = call.conditioning.get("pose_latents")
    needed = (call.latent.shape[2] - 1, *call.latent.shape[3:])
    if pose is not None and pose.shape[2:] != needed:
        size, needed = (" x ".join(map(str, each)) for each in (pose.shape[2:], needed))
        raise ConfigError("Use one WanAnimate2ToVideo for the pose video and the latent: this latent needs a pose of "
                          f"{needed} latent frames, rows and columns, and the pose has {size}.")
    return LATENT(call)


class _Detection(Detection):
    described = {"model_type": "animate2"}


WAN_ANIMATE2 = dataclasses.replace(
    WAN_CAMERA, name="Wan Animate 2", title="Wan-Animate 2", transformer=NATIVE, adapt_model=_adapt,
    refused=dict.fromkeys(("ring", "pipefusion", "displaced"), FRAMES),
    activation_factors=WAN_CAMERA.activation_factors | {"alone": 9.6, "residual": 4.2, "whole": 5.85},
    detection=derived(
        _Detection, WAN_CAMERA.detection,
        recognise=has(HEAD, "head.modulation", "patch_embedding.weight", "blocks.0.cross_attn.k_img.weight"),
        refusals=(only_prefixes(MODULES),),
        config=config_of(**RULES, flf_pos_embed_token_number=optional_size("img_emb.emb_pos", 1),
                         _image_dim=optional_size("img_emb.proj.1.weight", 1))),
    inputs=dataclasses.replace(
        WAN_CAMERA.inputs,
        conditioning={"context": "text_dim", "rope_scales": None, "clip_fea": "_image_dim", "pose_latents": None,
                      "clip_fea_pose": "_image_dim", "context_pose": "text_dim", **dict.fromkeys(STRENGTHS)},
        arguments=native_arguments(
            _latent, "context", "pose_latents", "context_pose", *STRENGTHS, transformer_options=moves, **{
                name: from_conditioning(name, where="_image_dim") for name in ("clip_fea", "clip_fea_pose")}),
        lengths={"pose": num_tokens_of(LATENT, "pose_latents")}),
    plan=ModelPlan(
        blocks=(BlockList("blocks", "blocks.", returns=("image", "pose")),),
        streams={"x": "image", "pose": "pose"},
        attention={"self_attn.of_video": ("image", "pose"), "self_attn.of_pose": ("pose",)},
        tokens={"freqs": TokenArgument(1, ("image",)), "pose_freqs": TokenArgument(1, ("pose",))},
        token_index_argument=("token_indices", ("image",)), tp_plan=WAN_CAMERA.plan.tp_plan),
    testing=SmallConfig(SMALL | {"in_dim": 12, "_image_dim": 1280}, NATIVE, ARGUMENTS | {"in_dim": 36},
                        input_shapes={
                            "pose_latents": lambda config, shape, tokens: (
                                shape[0], config["out_dim"], max(1, shape[2] - 1), *shape[3:]),
                            "context_pose": lambda config, shape, tokens: (shape[0], tokens, config["text_dim"]),
                            "clip_fea_pose": lambda config, shape, tokens: (shape[0], 5, config["_image_dim"]),
                            **dict.fromkeys(STRENGTHS, lambda config, shape, tokens: (1,))}))
