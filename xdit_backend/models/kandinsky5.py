"""Kandinsky 5 for videos: one stream over frames, rows and columns; text by cross-attention, after text blocks; rotary
positions.

Conditioning frames replace the first frames of the latent.
"""

import torch

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import (
    Unpacked,
    blocks,
    compute_dtype_of,
    config_of,
    even_sides,
    from_conditioning,
    has,
    needs_diffusers,
    size,
    timestep,
)
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.rope_scaling import scaled_positions
from .common.tp_plan import COLWISE, GATHERED, ROWWISE, styled

LATENT, TABLE = Unpacked((1, 2, 2)), TokenArgument(1, ("image",))
AXES = {64: (16, 24, 24), 128: (32, 48, 48)}                   # head channels for frames, rows and columns
PRO_WIDTH, IMAGE_WIDTH, MANY_PIXELS = 4096, 2560, 14080      # ComfyUI distinguishes models by their widths
KEY, PIXELS = "visual_transformer_blocks.0.cross_attention.key_norm.weight", "visual_embeddings.in_layer.weight"


def _head_axes(shapes):
    return AXES[shapes[KEY][0]]


def _latent(call):
    first, latent = call.conditioning.get("time_dim_replace"), even_sides("Kandinsky 5", LATENT)(call)
    if first is None:
        return latent
    latent = latent.clone()
    if call.patch is not None:
        dim, start = call.patch.dim, min(call.patch.start, first.shape[call.patch.dim])
        first = first.narrow(dim, start, min(latent.shape[dim], first.shape[dim] - start))
    if first.shape[3:] != latent.shape[3:]:
        raise ConfigError("Use the latent that Kandinsky5ImageToVideo returns: its conditioning frames have "
                          f"{tuple(first.shape[3:])} rows and columns, and the latent has {tuple(latent.shape[3:])}.")
    latent[:, :first.shape[1], :first.shape[2]] = first
    return latent


def _positions(call):
    """Frames, rows and columns of the tokens, divided by a factor that depends on the size of the latent."""
    counts, starts, apart = LATENT.counts(call.latent.shape), [0, 0, 0], [1.0, 2.0, 2.0]
    rows, columns = call.latent.shape[3:]
    if call.patch is not None:
        starts[call.patch.dim - 2] = call.patch.start // LATENT.patch[call.patch.dim - 2]
        rows = call.patch.whole if call.patch.dim == 3 else rows
    if call.config["model_dim"] == PRO_WIDTH and rows * columns >= MANY_PIXELS:
        apart = [1.0, 3.16, 3.16]
    if call.config["model_dim"] == IMAGE_WIDTH:
        apart = [1.0, 1.0, 1.0]
    positions = [start + torch.arange(count, device=call.latent.device) for start, count in zip(starts, counts)]
    if "rope_scales" in call.conditioning:                     # in ComfyUI these replace the factors
        return scaled_positions(positions, call)
    return [position / scale for position, scale in zip(positions, apart)]


def _text_positions(call):
    return torch.arange(call.conditioning["context"].shape[1], device=call.latent.device)


def _sines(positions, size):
    """Angles (..., size / 2) of positions (...)."""
    return positions[..., None] / 10000.0 ** (torch.arange(0, size, 2, dtype=torch.float64,
                                                           device=positions.device) / size)


def _rotations(angles):
    """Rotary tables in diffusers' layout: (..., A) -> (..., 1, A, 2, 2)."""
    cos, sin = angles.cos().float(), angles.sin().float()
    return torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2)).unsqueeze(-4)


def _rotate_exactly(attention):
    """Rotate queries and keys in float32, after their norms; diffusers rounds them to bfloat16."""
    forward, table = attention.forward, []

    def rotated(norm):
        normed = norm.forward

        def both(heads):
            heads = normed(heads)
            return (table[0] * heads.unflatten(-1, (-1, 1, 2))).sum(-1).flatten(-2) if table else heads
        norm.forward = both

    def attend(hidden_states, encoder_hidden_states=None, sparse_params=None, rotary_emb=None):
        table[:] = [] if rotary_emb is None else [rotary_emb]
        return forward(hidden_states, encoder_hidden_states, sparse_params)
    attention.forward = attend
    rotated(attention.query_norm)
    rotated(attention.key_norm)


def _adapt(model, config):
    """Use ComfyUI's rotations, unlimited positions, and dtypes of sinusoids and weights; channels precede frames."""
    axes, forward, dtype = config["axes_dims"], model.forward, compute_dtype_of(model)
    model._keep_in_fp32_modules = []
    for block in (*model.text_transformer_blocks, *model.visual_transformer_blocks):
        _rotate_exactly(block.self_attention)
    model.time_embeddings.register_forward_pre_hook(           # its frequencies are not a buffer
        lambda module, times: setattr(module, "freqs", module.freqs.to(times[0].device)))
    model.time_embeddings.in_layer.register_forward_pre_hook(lambda module, sines: sines[0].to(dtype()))
    model.text_rope_embeddings.forward = lambda positions: _rotations(_sines(positions, sum(axes)))

    def of_video(shape, positions, scale):
        angles = [_sines(each, size).view(*(-1 if axis == own else 1 for own in range(3)),
                                          size // 2).expand(*shape[1:], -1)
                  for axis, (each, size) in enumerate(zip(positions, axes))]
        return _rotations(torch.cat(angles, -1))[None]
    model.visual_rope_embeddings.forward = of_video
    model.forward = lambda *, hidden_states, **inputs: (
        forward(hidden_states=hidden_states.movedim(1, -1), **inputs).movedim(-1, 1),)


KANDINSKY5 = Family(
    name="Kandinsky 5", title="Kandinsky 5 text- and image-to-video", transformer="Kandinsky5Transformer3DModel",
    adapt_model=_adapt, pixels=lambda config: (4, 8, 8),
    activation_factors={"alone": 15.2, "residual": 3.45, "whole": 9.25, "outside": 5.25, "held": 1.2, "block": 14.5,
                        "exchange": 13.55, "own": 0.55},
    num_heads=lambda config: config["model_dim"] // sum(config["axes_dims"]), width=lambda config: config["model_dim"],
    num_channels=lambda config: config["out_visual_dim"],
    in_channels=lambda config: config["in_visual_dim"] * 2 + 1 if config["visual_cond"] else config["in_visual_dim"],
    detection=Detection(
        recognise=lambda shapes: has(KEY, PIXELS)(shapes) and shapes[PIXELS][1] != 64,
        refusals=(needs_diffusers("0.36"),),
        config=config_of(
            in_visual_dim=lambda shapes: (shapes[PIXELS][1] // 4 - 1) // 2, visual_cond=True,
            out_visual_dim=size("out_layer.out_layer.weight", 0, 4),
            in_text_dim=size("text_embeddings.in_layer.weight", 1),
            in_text_dim2=size("pooled_text_embeddings.in_layer.weight", 1),
            time_dim=size("time_embeddings.in_layer.weight", 0),
            patch_size=(1, 2, 2), model_dim=size(PIXELS, 0), axes_dims=_head_axes,
            ff_dim=size("visual_transformer_blocks.0.feed_forward.in_layer.weight", 0),
            num_text_blocks=blocks("text_transformer_blocks."), num_visual_blocks=blocks("visual_transformer_blocks.")),
        convert=lambda tensors, config: dict(tensors)),
    inputs=Inputs(
        latent=LATENT,
        conditioning={"context": "in_text_dim", "y": "in_text_dim2", "time_dim_replace": None, "rope_scales": None},
        ignored=("attention_mask", "denoise_mask"),
        arguments={"hidden_states": _latent, "encoder_hidden_states": from_conditioning("context"),
                   "timestep": timestep(), "pooled_projections": from_conditioning("y"), "visual_rope_pos": _positions,
                   "text_rope_pos": _text_positions}),
    plan=ModelPlan(
        blocks=(BlockList("visual_transformer_blocks", "visual_transformer_blocks.", "num_visual_blocks"),),
        streams={"visual_embed": "image"}, attention={"self_attention": ("image",)}, tokens={"rope": TABLE},
        tp_plan=styled(COLWISE, "*_attention.to_query", "*_attention.to_key", "*_attention.to_value",
                       "feed_forward.in_layer")
        | styled(ROWWISE, "*_attention.out_layer", "feed_forward.out_layer") | {"*_modulation.out_layer": GATHERED},
        cacheable={"visual_modulation": "step", "cross_attention.to_key": "step", "cross_attention.to_value": "step"},
        cacheable_outside={"text_embeddings": "run", "pooled_text_embeddings": "run",
                           "text_transformer_blocks": "step"}),
    testing=SmallConfig(
        {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 24, "in_text_dim2": 12, "time_dim": 20,
         "model_dim": 64, "ff_dim": 48, "num_text_blocks": 1, "num_visual_blocks": 4, "axes_dims": (4, 6, 6),
         "visual_cond": True},
        "comfy.ldm.kandinsky5.model:Kandinsky5",
        {"in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 48, "in_text_dim2": 20, "time_dim": 32,
         "model_dim": 256, "ff_dim": 96, "visual_embed_dim": 132, "num_text_blocks": 1,
         "num_visual_blocks": 3}, detected="Kandinsky5"))
