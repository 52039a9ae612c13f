"""SeedVR2, ComfyUI's own module: video restoration and super-resolution. Two streams of tokens, which attend within
windows of the full video that shift from block to block."""

from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, blocks, config_of, even_sides, has, size
from .common.native_module import native_arguments, same_names
from .common.plan import BlockList, ModelPlan
from .common.tp_plan import COLWISE, QKV, ROWWISE

NAME, LATENT, NATIVE = "SeedVR2", Unpacked((1, 2, 2)), "comfy.ldm.seedvr.model:NaDiT"
CONDITIONINGS = "positive_conditioning", "negative_conditioning"
WINDOWS = ("it attends within windows of the full video that shift from block to block, so that no device can keep "
           "the same tokens")
PROJECTION = "blocks.0.attn.proj_qkv.vid.weight"


def _head_dim(shapes):
    return shapes["blocks.0.attn.norm_q.vid.weight"][0]


def _num_unshared(shapes):
    """Number of blocks whose text has its own weights; later ones share the video's."""
    return len([name for name in shapes if name.endswith(".attn.proj_qkv.vid.weight")])


def _rope_dim(shapes):
    """Rotary channels, a third for each dim, in pairs. The class computes the frequencies if a file lacks them."""
    freqs = shapes.get("blocks.0.attn.rope.rope.freqs")
    return 6 * freqs[0] if freqs else 128 if "vid_out_norm.weight" in shapes else 64


def _mlp_type(shapes):
    return "swiglu" if "blocks.0.mlp.vid.proj_in_gate.weight" in shapes else "normal"


def _condition(call):
    condition = call.conditioning.get("condition")
    if condition is None:
        raise ConfigError("Connect Apply SeedVR2 Conditioning to the sampler: the conditioning has no video for "
                          "SeedVR2 to restore.")
    if condition.shape[2:] != call.latent.shape[2:]:
        sizes = [" x ".join(map(str, tensor.shape[2:])) for tensor in (condition, call.latent)]
        raise ConfigError("Connect the same latent to Apply SeedVR2 Conditioning and to the sampler: their sizes are "
                          f"{sizes[0]} and {sizes[1]}.")
    return condition


class _Windows(nn.Module):
    """The class's windowed attention after its projections, for some of its heads: (all tokens, 3 N H) of video and
    text to (tokens, N H). Other attributes are the attention's."""

    def __init__(self, attention):
        super().__init__()
        object.__setattr__(self, "attention", attention)       # not a submodule
        self.forward = MethodType(type(attention).forward, self)

    def __getattr__(self, name):
        return getattr(vars(self)["attention"], name)

    @staticmethod
    def proj_qkv(vid, txt):
        return vid, txt

    proj_out = proj_qkv


def _adapt(model, config):
    """Keep the batch as a dim in the blocks, which ComfyUI's forward joins with the tokens, and attend to windows of
    all tokens where a rank has some of them."""
    model.why_uncompiled = "its blocks ask the device for the sizes of their windows"
    for block in model.blocks:
        block.forward = MethodType(_of_batch, block)
        block.register_forward_pre_hook(_apart, with_kwargs=True)
        block.register_forward_hook(_joined, with_kwargs=True)
        block.attn.windows = _Windows(block.attn)
        block.attn.forward = MethodType(_attend, block.attn)


def _apart(block, args, kwargs):
    return args, kwargs | {name: _in_batch(kwargs[name], kwargs["vid_shape"]) for name in ("vid", "txt")}


def _joined(block, args, kwargs, output):
    return *(tokens.flatten(0, 1) for tokens in output), kwargs["vid_shape"], kwargs["txt_shape"]


def _in_batch(tokens, shape):
    """(B T, C) -> (B, T, C). shape: one row for each image of the batch."""
    return tokens.unflatten(0, (len(shape), len(tokens) // len(shape)))


def _of_batch(self, vid, txt, vid_shape, txt_shape, emb, cache, token_indices=None):
    """The block's forward for (B, T, C) of the video and of the text, of which a rank may have some tokens."""
    known, is_part = cache, token_indices is not None and len(token_indices[0]) < token_indices[1]
    if is_part:  # timestep modulations are repeated for the rank's own tokens
        known = cache.namespace("own")
        for name, tokens in (("vid_len", vid), ("txt_len", txt)):
            known(name, lambda count=tokens.shape[1]: vid_shape.new_full((len(vid),), count))
    if token_indices is not None:
        known.of_all, known.num_image = cache, token_indices[1]
    vid_out, txt_out, *_ = type(self).forward(self, vid.flatten(0, 1), txt.flatten(0, 1), vid_shape, txt_shape, emb,
                                              known)
    if is_part and self.is_last_layer:  # the class's forward reads this cache entry, for all tokens
        ada = self.ada.all if self.ada.shared_weights else self.ada.vid
        ada(vid.new_empty(len(vid) * token_indices[1], vid.shape[2]), emb, "attn", "out", cache, "vid",
            cache("vid_len", lambda: vid_shape.prod(-1)))
    return vid_out.unflatten(0, vid.shape[:2]), txt_out.unflatten(0, txt.shape[:2])


def _attend(self, vid, txt, vid_shape, txt_shape, cache):
    """Attention within windows of all tokens, for some of the heads if a rank has some of the tokens."""
    vid, txt = self.proj_qkv(vid, txt)
    if not hasattr(cache, "of_all"):
        return self.proj_out(*_windowed(self, self.heads, vid, txt, vid_shape, txt_shape, cache))
    # (B, T, 3 N H) -> (3, B, N, T, H)
    joint = [_in_batch(tokens, vid_shape).unflatten(2, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4)
             for tokens in (txt, vid)]
    lengths = [part.shape[3] for part in joint]
    within = partial(_within_windows, self, vid_shape, txt_shape, cache)
    out = F.scaled_dot_product_attention(*torch.cat(joint, 3), within=within).transpose(1, 2).flatten(2)
    return self.proj_out(*(tokens.flatten(0, 1) for tokens in reversed(out.split(lengths, 1))))


def _windowed(attention, num_heads, *inputs):
    """Run _Windows for this number of heads, which differs between layouts."""
    attention.windows.__dict__["heads"] = num_heads
    return attention.windows(*inputs)


def _within_windows(self, vid_shape, txt_shape, cache, *of_heads):
    """Attention of all tokens, the text's first, for some heads: queries, keys and values (B, N, T, H); returns the
    same shape."""
    _, count, total, size = of_heads[0].shape
    tokens = torch.stack(of_heads, 1).permute(0, 3, 1, 2, 4).flatten(2)                    # (B, T, 3 N H)
    txt, vid = (part.flatten(0, 1) for part in tokens.split((total - cache.num_image, cache.num_image), 1))
    vid, txt = _windowed(self, count, vid, txt, vid_shape, txt_shape, cache.of_all)
    out = torch.cat([_in_batch(txt, vid_shape), _in_batch(vid, vid_shape)], 1)
    return out.unflatten(2, (count, size)).transpose(1, 2)


SMALL = {"norm_eps": 1e-5, "num_layers": 4, "mlp_type": "swiglu", "vid_in_channels": 33, "vid_out_channels": 16,
         "vid_dim": 64, "txt_in_dim": 5120, "heads": 4, "head_dim": 16, "mm_layers": 2, "expand_ratio": 4,
         "rope_dim": 12, "rope_type": "mmrope3d", "vid_out_norm": True}


class _SeedVR2(Family):
    branches_apart = True
    read_by_nodes = CONDITIONINGS


SEEDVR2 = _SeedVR2(
    name=NAME, title="SeedVR2", transformer=NATIVE, adapt_model=_adapt,
    refused={"data": "ComfyUI's model uses the first text's queries and keys for all videos of a batch",
             **dict.fromkeys(("ring", "pipefusion", "displaced"), WINDOWS)},
    num_heads=lambda config: config["heads"], width=lambda config: config["vid_dim"],
    pixels=lambda config: (4, 8, 8), num_channels=lambda config: config["vid_out_channels"],
    in_channels=lambda config: config["vid_out_channels"],
    activation_factors={"alone": 22.5, "residual": 8.4, "held": 0.4, "block": 22.1, "exchange": 34.15, "entered": 8.0,
                        "own": 2.6},
    detection=Detection(
        recognise=has(*CONDITIONINGS, "vid_in.proj.weight", "emb_in.proj_hid.weight", PROJECTION),
        config=config_of(
            norm_eps=1e-5, num_layers=blocks("blocks."), mlp_type=_mlp_type,
            vid_in_channels=size("vid_in.proj.weight", 1, 4), vid_out_channels=size("vid_out.proj.weight", 0, 4),
            vid_dim=size("vid_in.proj.weight", 0), txt_in_dim=size("txt_in.weight", 1),
            heads=lambda shapes: shapes[PROJECTION][0] // 3 // _head_dim(shapes), head_dim=_head_dim,
            mm_layers=_num_unshared, expand_ratio=4, rope_dim=_rope_dim,
            rope_type=lambda shapes: "mmrope3d" if "vid_out_norm.weight" in shapes else "rope3d",
            vid_out_norm=lambda shapes: "vid_out_norm.weight" in shapes or None),
        convert=same_names),
    inputs=Inputs(
        latent=LATENT, conditioning={"context": "txt_in_dim", "condition": None},
        # each call has one branch, so that ComfyUI's forward does not swap branches
        arguments=native_arguments(LATENT, "context", condition=_condition) | {
            "x": even_sides(NAME, LATENT), "transformer_options": lambda call: {"cond_or_uncond": [0]}}),
    plan=ModelPlan(
        blocks=(BlockList("blocks", "blocks.", returns=("image", "text")),),
        streams={"vid": "image", "txt": "text"}, attention={"attn": ("text", "image")},
        token_index_argument=("token_indices", ("image",)),
        tp_plan={"attn.proj_qkv.*": QKV, "attn.proj_out.*": ROWWISE, "mlp.*.proj_in": COLWISE,
                 "mlp.*.proj_in_gate": COLWISE, "mlp.*.proj_out": ROWWISE}),
    testing=SmallConfig(SMALL, NATIVE, SMALL, detected="SeedVR2", input_shapes={
        "condition": lambda config, shape, tokens: (
            shape[0], config["vid_in_channels"] - config["vid_out_channels"], *shape[2:])}))
