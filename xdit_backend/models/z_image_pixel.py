"""Z-Image on pixels (Zeta-Chroma), ComfyUI's own module: Z-Image's blocks over patches of pixels. After them, a
small network decodes each patch from its token and its noisy pixels."""

from functools import partial
from types import MethodType

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, because, blocks, config_of, has, size, stored_dtype
from .common.key_mapping import table
from .common.native_module import native_arguments
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.rope_scaling import moves, with_first_row
from .common.tp_plan import QKV, ROWWISE

NATIVE = "comfy.ldm.lumina.model:NextDiTPixelSpace"
SIDE, CHANNELS, GROUP = 32, 3, 32          # pixels of a patch's side; channels; tokens are padded to a multiple of this
LATENT, IMAGE, ALL = Unpacked((SIDE, SIDE)), ("image", "pad"), ("text", "image", "pad")
NORM, DECODER, EMBEDDER = ("layers.0.attention.q_norm.weight", "dec_net.final_layer.linear.weight",
                           "dec_net.input_embedder.embedder.0.weight")


def _of_patch(module, forward, rows, tokens, args, kwargs):
    """The class's embed_all for a patch: its rows have their positions in the full image, followed by the full
    image's padding, which the blocks take with a step's first patch."""
    options = with_first_row(kwargs["transformer_options"], rows.patch.start // module.patch_size)
    embeds, positions, length = forward(*args, **kwargs | {"transformer_options": options})
    count, num_pads = tokens.counts["image"], -rows.num_tokens % module.pad_tokens_multiple
    image, own = embeds[-1][:, :count], positions[-1][:, :count]
    pads = module.x_pad_token.to(image).expand(len(image), num_pads, -1)
    nowhere = module.rope_embedder(torch.zeros(1, num_pads, 3, device=image.device)).movedim(1, 2)
    return ((*embeds[:-1], torch.cat([image, pads], 1)), (*positions[:-1], torch.cat([own, nowhere], 1)), length)


def _adapt(model, config):
    """Make the decoder and its embedder compute in the dtype of their first layer's weights, or the compute dtype
    where files store these in fewer bits. Compute pixel positions without the class's cache, which would keep the
    last models alive."""
    decoder, embedder = model.dec_net, model.dec_net.input_embedder
    for module, first in ((decoder, decoder.cond_embed), (embedder, embedder.embedder[0])):
        module.register_forward_pre_hook(partial(_set_dtype, first))
    decoder.cond_embed = torch.nn.Sequential(decoder.cond_embed)
    embedder.fetch_pos = MethodType(type(embedder).fetch_pos.__wrapped__, embedder)


def _set_dtype(first, module, args):
    module.dtype = stored_dtype(first, args[0].dtype)


def _num_heads(shapes):
    return shapes["x_embedder.weight"][0] // shapes[NORM][0]


SMALL = {"patch_size": SIDE, "in_channels": CHANNELS, "dim": 256, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 4,
         "n_kv_heads": 4, "multiple_of": 256, "ffn_dim_multiplier": 1.0, "qk_norm": True, "cap_feat_dim": 24,
         "axes_dims": (16, 24, 24), "rope_theta": 256.0, "z_image_modulation": True, "time_scale": 1000.0,
         "pad_tokens_multiple": GROUP, "decoder_hidden_size": 32, "decoder_num_res_blocks": 2, "decoder_max_freqs": 4}

Z_IMAGE_PIXEL = Family(
    name="Z-Image pixel", title="Z-Image on pixels (Zeta-Chroma)", transformer=NATIVE, unsupported_dtypes=("float16",),
    adapt_model=_adapt, num_heads=lambda config: config["n_heads"], width=lambda config: config["dim"],
    num_channels=lambda config: CHANNELS, pixels=lambda config: (1, 1, 1),
    activation_factors={"alone": 16.85, "whole": 11.46, "held": 1.79, "outside": 11.1, "exchange": 17.2, "own": 0.0,
                        "keys": 1.9},
    detection=Detection(
        recognise=has("dec_net.cond_embed.", DECODER, "cap_embedder.1.weight", "x_pad_token"),
        refusals=(because("it takes reference images too (Z-Image-Omni)", has("siglip_embedder.")),
                  because(f"its patches are not {SIDE} x {SIDE} pixels, the only size that xDiT supports",
                          lambda shapes: shapes["x_embedder.weight"][1] != SIDE ** 2 * CHANNELS)),
        config=config_of(
            patch_size=SIDE, in_channels=CHANNELS, dim=size("x_embedder.weight", 0), n_layers=blocks("layers."),
            n_refiner_layers=blocks("noise_refiner."), n_heads=_num_heads, n_kv_heads=_num_heads,
            multiple_of=size("layers.0.feed_forward.w1.weight", 0), ffn_dim_multiplier=1.0, qk_norm=True,
            cap_feat_dim=size("cap_embedder.1.weight", 1),
            axes_dims=lambda shapes: (shapes[NORM][0] // 4, *(shapes[NORM][0] * 3 // 8,) * 2), rope_theta=256.0,
            z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=GROUP,
            decoder_hidden_size=size(EMBEDDER, 0), decoder_num_res_blocks=blocks("dec_net.res_blocks."),
            decoder_max_freqs=lambda shapes: round((shapes[EMBEDDER][1] - shapes[DECODER][0]) ** 0.5)),
        convert=table((r"^__x0__$", None), (r"^dec_net\.cond_embed\.([wb])", r"dec_net.cond_embed.0.\1"))),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, multiple=GROUP, conditioning={"context": "cap_feat_dim", "rope_scales": None},
        ignored=("num_tokens", "attention_mask", "clip_text_pooled"),
        lengths={"text": lambda conditioning: -(-conditioning["context"].shape[1] // GROUP) * GROUP},
        arguments=native_arguments(LATENT, "context", times="timesteps", num_tokens=None, transformer_options=moves)),
    plan=ModelPlan(
        blocks=(BlockList("noise_refiner", "noise_refiner.", "n_refiner_layers", returns=(IMAGE,),
                          streams={"x": IMAGE}, attention={"attention": IMAGE},
                          tokens={"freqs_cis": TokenArgument(1, IMAGE)}),
                BlockList("layers", "layers.", "n_layers", returns=(ALL,))),
        streams={"x": ALL}, attention={"attention": ALL}, tokens={"freqs_cis": TokenArgument(1, ALL)},
        positions={"embed_all": _of_patch}, rereads_latent=True, unstaged_blocks=("context_refiner",),
        tp_plan={"attention.qkv": QKV, "attention.out": ROWWISE},
        cacheable={"adaLN_modulation": "step"}, cacheable_outside={"cap_embedder": "run", "context_refiner": "run"}),
    testing=SmallConfig(SMALL, NATIVE, SMALL | {"dim": 512, "axes_dims": (32, 48, 48)},
                        detected="ZImagePixelSpace"))
