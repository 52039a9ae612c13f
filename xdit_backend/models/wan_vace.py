"""Wan VACE: Wan with a second hidden state for each token, computed from a control video; some blocks have an
additional block for it.

diffusers evaluates the additional blocks first and for all tokens. Here both states pass through the blocks
concatenated, as one twice as wide, so that every method applies; results are the same.
"""

import dataclasses
import types

import torch

from ..protocol.errors import ConfigError
from .common.family import SmallConfig, derived
from .common.forward_state import ForwardValue
from .common.inputs import blocks, config_of, has, only_prefixes, size
from .common.plan import ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.tp_plan import REPLICATED, styled
from .wan import MODULES, WAN

TABLE, TIMES = TokenArgument(1, ("image",)), TokenArgument(1, ("image",), ndim=4)
NUM_VACE = blocks("vace_blocks.")


def _layers(shapes):
    num_blocks = blocks("blocks.")(shapes)
    return list(range(0, num_blocks, num_blocks // NUM_VACE(shapes)))


def _latent(call):
    """The latent, with its patch of the control video concatenated to the channels."""
    latent, control = call.latent, call.conditioning["vace_context"][:, 0]
    if any(side % 2 for side in latent.shape[3:]):
        raise ConfigError("Use a width and a height that are multiples of 16 pixels: Wan VACE takes latents with even "
                          f"sides, and this one has {latent.shape[3]} x {latent.shape[4]}.")
    if call.patch is not None:
        control = control.narrow(call.patch.dim, call.patch.start, latent.shape[call.patch.dim])
    if control.shape[2:] != latent.shape[2:]:
        raise ConfigError("Use the latent that WanVaceToVideo returns: its control video has "
                          f"{tuple(control.shape[2:])} frames, rows and columns, and the latent has "
                          f"{tuple(latent.shape[2:])}.")
    return torch.cat([latent, control.expand(len(latent), *control.shape[1:])], 1)


def _strength(call):
    strength = call.conditioning.get("vace_strength.0")
    return call.latent.new_ones(1) if strength is None else strength


def _several(arguments):
    control = arguments.get("vace_context")
    return "several control videos" if control is not None and control.shape[1] > 1 else None


def _adapt(model, config):
    """Use the forward of diffusers' Wan; hidden states are those of video and control, concatenated."""
    from diffusers import WanTransformer3DModel
    model.forward = types.MethodType(WanTransformer3DModel.forward, model)
    WAN.adapt_model(model, config)
    run, strength = model.forward, ForwardValue(model)
    embed, norm, channels = model.patch_embedding.forward, model.norm_out.forward, config["in_channels"]

    def forward(vace_strength, **arguments):
        with strength.holding(vace_strength):
            return run(**arguments)

    def block_forward(block, vace):
        plain = block.forward

        def both(hidden_states, encoder_hidden_states, temb, rotary_emb):
            video, control = hidden_states.chunk(2, -1)
            made = plain(video, encoder_hidden_states, temb, rotary_emb)
            if vace is not None:
                hint, control = vace(video, encoder_hidden_states, control, temb, rotary_emb)
                made = made + hint * strength.get()
            return torch.cat([made, control], -1)
        return both

    model.forward = forward
    model.patch_embedding.forward = lambda latent: torch.cat([embed(latent[:, :channels]),
                                                              model.vace_patch_embedding(latent[:, channels:])], 1)
    model.norm_out.forward = lambda hidden_states: norm(hidden_states[..., :hidden_states.shape[-1] // 2])
    of_block = dict(zip(config["vace_layers"], model.vace_blocks))
    for index, block in enumerate(model.blocks):
        block.forward = block_forward(block, of_block.get(index))
        # not a submodule of the block, since it is one of the model
        if index in of_block:
            object.__setattr__(block, "vace_attn1", of_block[index].attn1)


class _Plan(ModelPlan):
    text_attention = WAN.plan.text_attention


WAN_VACE = dataclasses.replace(
    WAN, name="Wan VACE", title="Wan VACE (2.1, 2.2)", transformer="WanVACETransformer3DModel", adapt_model=_adapt,
    keep_in_compute_dtype=("patch_embedding", "vace_patch_embedding"),
    activation_factors={"alone": 6.65, "residual": 5.1, "whole": 6.65, "outside": 4.2, "held": 1.3, "block": 7.35,
                        "exchange": 6.2, "keys": 1.2, "own": 0.55},
    width=lambda config: 2 * config["num_attention_heads"] * config["attention_head_dim"],
    detection=dataclasses.replace(
        WAN.detection,
        recognise=has("vace_patch_embedding.weight", "vace_blocks.0.before_proj.weight", "head.modulation"),
        refusals=(only_prefixes(MODULES | {"vace_patch_embedding", "vace_blocks"}),),
        config=config_of(**WAN.detection.config.rules, vace_layers=_layers,
                         vace_in_channels=size("vace_patch_embedding.weight", 1))),
    inputs=dataclasses.replace(
        WAN.inputs,
        unsupported=_several,
        conditioning={"context": "text_dim", "vace_context": None, "vace_strength": None, "rope_scales": None},
        ignored=("clip_fea", "reference_latent"),
        arguments={**{name: rule for name, rule in WAN.inputs.arguments.items()
                      if name not in ("encoder_hidden_states_image", "context_latents")},
                   "hidden_states": _latent, "vace_strength": _strength},
        lengths={}),
    plan=derived(
        _Plan, WAN.plan, streams={"hidden_states": "image"}, attention={"attn1": ("image",), "vace_attn1": ("image",)},
        tokens={"rotary_emb": TABLE, "temb": TIMES}, positions={"rope": Cut(TABLE)}, unstaged_blocks=("vace_blocks",),
        tp_plan=styled(REPLICATED, "proj_in", "proj_out"),
        # a block here is two of ComfyUI's blocks
        blocks=(dataclasses.replace(WAN.plan.blocks[0], patched=None, returns=("image",)),)),
    testing=SmallConfig(
        {"patch_size": (1, 2, 2), "num_attention_heads": 4, "attention_head_dim": 12, "in_channels": 4,
         "out_channels": 4, "text_dim": 24, "freq_dim": 256, "ffn_dim": 32, "num_layers": 4, "vace_layers": [0, 2],
         "vace_in_channels": 6},
        "comfy.ldm.wan.model:VaceWanModel",
        {"model_type": "vace", "in_dim": 16, "dim": 256, "ffn_dim": 512, "freq_dim": 256, "text_dim": 4096,
         "out_dim": 16, "num_heads": 2, "num_layers": 4, "text_len": 512, "vace_layers": 2, "vace_in_dim": 96}))
