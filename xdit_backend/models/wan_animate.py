"""Wan 2.2 Animate, ComfyUI's own module: Wan with a pose added to the latent, and face motion that some blocks read
frame by frame."""

import dataclasses
from types import MethodType

import torch

from .common.family import SmallConfig
from .common.forward_state import ForwardValue
from .common.inputs import config_of, frame_times, from_conditioning, has, only_prefixes, optional_size
from .common.native_module import native_arguments
from .common.rope_scaling import moves
from .common.wan import ARGUMENTS, RULES, SMALL, even_with, read_own_frame
from .wan import LATENT, MODULES
from .wan_camera import HEAD, WAN_CAMERA

NATIVE = "comfy.ldm.wan.model_animate:AnimateWanModel"
FACE = {"pose_patch_embedding", "motion_encoder", "face_adapter", "face_encoder"}
EACH = 5                                   # one of this many blocks reads the face


def _pose_of_patch(module, forward, rows, tokens, args, kwargs):
    """Embed a patch with its rows of the full pose, and the motion of all frames."""
    patch, shape, axis = args[0], list(args[0].shape), 2 + rows.axis
    shape[axis] = rows.whole_token_rows
    pose, motion = forward(patch.new_zeros(shape), *args[1:], **kwargs)
    return patch + pose.narrow(axis, rows.first_token * rows.whole_token_rows // rows.num_tokens,
                               patch.shape[axis]), motion


def _adapt(model, config):
    """Move code that ComfyUI's forward runs after some blocks into these blocks, so that each pipeline stage runs
    its own."""
    embed, motions = model.after_patch_embedding, ForwardValue(model)

    def embedded(tokens, pose_latents, face_pixel_values):
        with tokens.device:  # so that ComfyUI's code creates zeros on the device instead of the host
            tokens, motion = embed(tokens, pose_latents, face_pixel_values)
        motions.set(motion)
        return tokens, motion

    model.after_patch_embedding = embedded
    for number, block in enumerate(model.blocks):
        block.forward = MethodType(_with_token_indices, block)
        if number % EACH == 0:
            fuser = model.face_adapter.fuser_blocks[number // EACH]
            # vars(): not a submodule of the block, which would change its tensor names
            vars(block).update(fuser=fuser, motions=motions)
            block.forward = MethodType(_with_face, block)
            fuser.forward = lambda tokens, motion: 0


def _with_token_indices(self, x, e, freqs, context, context_img_len=257, transformer_options={}, token_indices=None):
    return type(self).forward(self, x, e, freqs, context, context_img_len, transformer_options)


def _with_face(self, x, e, freqs, context, context_img_len=257, transformer_options={}, token_indices=None):
    x, motion = _with_token_indices(self, x, e, freqs, context, context_img_len,
                                    transformer_options), self.motions.get()
    if motion is None:
        return x
    return x + (type(self.fuser).forward(self.fuser, x, motion) if token_indices is None
                else _of_frames(self.fuser, x, motion, *token_indices))


def _of_frames(fuser, x, motion_BFNC, token_indices, num_tokens):
    """A block of the face adapter for tokens that are not full frames: each reads the motion of its own frame."""
    _, num_frames, num_motions, _ = motion_BFNC.shape
    key, value = fuser.linear1_kv(fuser.pre_norm_motion(motion_BFNC)).flatten(1, 2).unflatten(
        2, (2, fuser.heads_num, -1)).unbind(2)
    query = fuser.q_norm(fuser.linear1_q(fuser.pre_norm_feat(x)).unflatten(2, (fuser.heads_num, -1))).to(value.dtype)
    query, key, value = (each.transpose(1, 2) for each in (query, fuser.k_norm(key).to(value.dtype), value))
    read = read_own_frame(query, key, value, token_indices // (num_tokens // num_frames), num_motions)
    return fuser.linear2(read.transpose(1, 2).flatten(2))


def _thin(model):
    """Use a face's first pixels as motion, in place of a network for 512 x 512 pixels."""
    model.motion_encoder = torch.nn.Module()
    model.motion_encoder.get_motion = lambda faces: faces.flatten(1)[:, :512]


WAN_ANIMATE = dataclasses.replace(
    WAN_CAMERA, name="Wan Animate", title="Wan 2.2 Animate", transformer=NATIVE, adapt_model=_adapt,
    activation_factors={"alone": 8.55, "residual": 3.15, "whole": 4.95, "outside": 4.55, "held": 1.15, "block": 8.25,
                        "exchange": 14.05, "own": 0.0},
    detection=dataclasses.replace(
        WAN_CAMERA.detection,
        recognise=has(HEAD, "head.modulation", "face_adapter.fuser_blocks.0.k_norm.weight"),
        refusals=(only_prefixes(MODULES | FACE),),
        config=config_of(**RULES, model_type="animate", flf_pos_embed_token_number=optional_size("img_emb.emb_pos", 1),
                         _image_dim=optional_size("img_emb.proj.1.weight", 1))),
    inputs=dataclasses.replace(
        WAN_CAMERA.inputs,
        conditioning={"context": "text_dim", "rope_scales": None, "clip_fea": "_image_dim", "pose_latents": None,
                      "face_pixel_values": None},
        arguments=native_arguments(even_with(LATENT, "Wan Animate", "pose_latents", "pose"), "context",
                                   "pose_latents", "face_pixel_values", timestep=frame_times,
                                   clip_fea=from_conditioning("clip_fea", where="_image_dim"),
                                   transformer_options=moves)),
    plan=dataclasses.replace(
        WAN_CAMERA.plan, token_index_argument=("token_indices", ("image",)),
        positions={"rope_encode": WAN_CAMERA.plan.positions["rope_encode"], "after_patch_embedding": _pose_of_patch}),
    testing=SmallConfig(SMALL | {"model_type": "animate", "num_layers": 10, "_image_dim": 1280}, NATIVE,
                        ARGUMENTS | {"model_type": "animate", "num_layers": 5}, thin=_thin, input_shapes={
                            "pose_latents": lambda config, shape, tokens: (
                                shape[0], 16, max(1, shape[2] - 1), *shape[3:]),
                            "face_pixel_values": lambda config, shape, tokens: (
                                shape[0], 3, 4 * shape[2] - 4, 14, 14)}))
