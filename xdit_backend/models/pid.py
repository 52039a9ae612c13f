"""PiD and PiD 1.5, ComfyUI's own module: PixelDiT that decodes another model's latent to pixels, four times as large
as its image. Before its blocks, features of that latent are added to each token."""

import dataclasses
from types import MethodType

import torch

from ..protocol.errors import ConfigError
from .common.family import SmallConfig
from .common.forward_state import ForwardValue
from .common.inputs import blocks, config_of, from_conditioning, has, size
from .common.native_module import native_arguments
from .common.pixel_blocks import adapt_model, in_file, run_pixel_block, with_token_indices
from .common.rope_scaling import moves
from .pixeldit import LATENT, PIXELDIT, RULES, SMALL

NATIVE, LQ = "comfy.ldm.pixeldit.pid:PidNet", "lq_proj.latent_proj.0.weight"
PER_TOKEN, IS_NEWER = "lq_proj.gate_modules.0.content_proj.weight", has("lq_proj.pit_head.weight")
PIXELS = 32  # pixels of the image per pixel of the decoded latent, of which a VAE would make 8


def _adapt(model, config):
    """Move code that ComfyUI's forward runs before a block into the block, where a rank has its own tokens."""
    features, gates = ForwardValue(model), model.lq_proj.gate_modules

    def remember(s, i, pid_lq_features, pid_degrade_sigma, pid_pit_lq_feature=None, **_):
        if i == 0:
            features.set((pid_lq_features, pid_pit_lq_feature, pid_degrade_sigma))
        return s

    model._pre_patch_block, model._pre_pixel_blocks = remember, lambda s, **_: s
    adapt_model(model, config)
    for number, block in enumerate(model.patch_blocks):
        index = model.lq_proj.output_index(number)
        if model.lq_proj.is_gate_active(number) and index < len(gates):
            # vars(): not a submodule of the block, which would change its tensor names
            vars(block).update(gate=gates[index], index=index, features=features)
            block.forward = MethodType(_with_gate, block)
    if model.pit_lq_inject:
        first = model.pixel_blocks[0]
        vars(first).update(gate=model.pit_lq_gate, features=features)
        first.forward = MethodType(_run_first_pixel_block, first)


def _with_gate(self, x, y, c, pos_img, pos_txt=None, token_indices=None, transformer_options={}):
    low_quality, _, sigma = self.features.get()
    x = self.gate(x, _own(low_quality[self.index], token_indices), sigma)
    return with_token_indices(self, x, y, c, pos_img, pos_txt, None, transformer_options)


def _run_first_pixel_block(self, x, s_cond, image_height, image_width, patch_size, token_indices=None, **others):
    _, feature, sigma = self.features.get()
    condition, pixels = x.split([self.context_dim, x.shape[2] - self.context_dim], 2)
    condition = self.gate(condition, _own(feature, token_indices), sigma)
    return run_pixel_block(self, torch.cat([condition, pixels], 2), s_cond, image_height, image_width, patch_size,
                           token_indices, **others)


def _own(feature_BTC, token_indices):
    return feature_BTC if token_indices is None else feature_BTC[:, token_indices[0]]


def _for_full_image(module, forward, rows, tokens, args, kwargs):
    """Features of the latent for each token of the full image."""
    return forward(**kwargs | {"target_pH": rows.whole_token_rows})


def _low(call):
    """The latent to decode. Raises ConfigError without one, or for another number of channels."""
    latent, channels = from_conditioning("lq_latent")(call), call.config["lq_latent_channels"]
    if latent is None or latent.shape[1] != channels:
        found = 0 if latent is None else latent.shape[1]
        raise ConfigError(f"Put PiD Conditioning after both prompts, with a latent of {channels} channels, which this "
                          f"PiD file decodes: the latent there has {found}.")
    return latent


def _channels(shapes):
    """Channels of the latent. PiD 1.5 reads Flux.2's as a quarter of its channels at four positions."""
    return shapes[LQ][1] * (4 if IS_NEWER(shapes) and shapes[LQ][1] == 32 else 1)


def _interval(shapes):
    depth, gates = blocks("patch_blocks.")(shapes), blocks("lq_proj.gate_modules.")(shapes)
    return -(-depth // gates)


def _of_latent(config, shape, tokens):
    return shape[0], config["lq_latent_channels"], *(-(-side // PIXELS) for side in shape[-2:])


NEWER = {"lq_conv_padding_mode": "replicate", "lq_gate_per_token": True, "pit_lq_inject": True, "rope_ref_h": 2048,
         "rope_ref_w": 2048}
OWN = {"lq_latent_channels": 4, "lq_hidden_dim": 32, "lq_num_res_blocks": 2, "lq_interval": 2,
       "latent_spatial_down_factor": 8, "lq_latent_unpatchify_factor": 1}

PID = dataclasses.replace(
    PIXELDIT, name="PiD", title="PiD, PiD 1.5 (pixels of a latent)", transformer=NATIVE, adapt_model=_adapt,
    activation_factors={"alone": 38.7, "residual": 38.66, "held": 13.15, "block": 25.5, "own": 3.5, "outside": 25.55,
                        "once": 10.5, "keys": 1.94, "shared": 0.28},
    detection=dataclasses.replace(
        PIXELDIT.detection,
        recognise=has(LQ, "pixel_embedder.proj.weight", "patch_blocks.0.attn.qkv_x.weight"),
        config=config_of(
            **RULES, lq_latent_channels=_channels, lq_hidden_dim=size(LQ, 0), lq_interval=_interval,
            lq_num_res_blocks=lambda shapes: blocks("lq_proj.latent_proj.")(shapes) - 2,
            latent_spatial_down_factor=lambda shapes: 16 if _channels(shapes) >= 64 else 8,
            lq_latent_unpatchify_factor=lambda shapes: 2 if _channels(shapes) != shapes[LQ][1] else 1,
            lq_gate_per_token=lambda shapes: shapes[PER_TOKEN][0] == 1, pit_lq_inject=IS_NEWER,
            lq_conv_padding_mode=lambda shapes: "replicate" if IS_NEWER(shapes) else "zeros",
            rope_ref_h=lambda shapes: 2048 if IS_NEWER(shapes) else 1024,
            rope_ref_w=lambda shapes: 2048 if IS_NEWER(shapes) else 1024)),
    inputs=dataclasses.replace(
        PIXELDIT.inputs,
        conditioning=PIXELDIT.inputs.conditioning | {"lq_latent": None, "degrade_sigma": None},
        arguments=native_arguments(LATENT, "context", "degrade_sigma", times="timesteps", lq_latent=_low,
                                   transformer_options=moves)),
    plan=dataclasses.replace(
        PIXELDIT.plan, blocks=tuple(
            dataclasses.replace(list_, file_prefix=f"{list_.name}.") for list_ in PIXELDIT.plan.blocks),
        positions=PIXELDIT.plan.positions | {"lq_proj": _for_full_image},
        cacheable_outside=PIXELDIT.plan.cacheable_outside | {"lq_proj.latent_proj": "run"}),
    testing=SmallConfig(SMALL | OWN | NEWER, NATIVE,
                        PIXELDIT.testing.arguments | OWN | NEWER | {"lq_latent_channels": 16},
                        in_file=lambda tensors: in_file(tensors, prefix=""),
                        detected="PiD", input_shapes={"lq_latent": _of_latent,
                                                      "degrade_sigma": lambda config, shape, tokens: shape[:1]}))
