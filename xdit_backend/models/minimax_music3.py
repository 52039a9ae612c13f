"""MiniMax Music 3, ComfyUI's own module (from 0.33 on): audio as one row of tokens after a token for the timestep.

Longer audio than 689 latent frames is computed in windows of that length, which begin every 344 frames; each is a pass
through all blocks, and overlapping predictions are averaged.
"""

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import PaddedByModel, blocks, config_of, has, size
from .common.native_module import native_arguments, same_names
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.stable_audio import ALL, TP_PLAN

LATENT, NATIVE = PaddedByModel((1,)), "comfy.ldm.minimax_music.dit:MiniMaxMusic3DiT"
LAYERS = "diffusion_transformer.transformer.layers."
QKV = f"{LAYERS}0.self_attn.to_qkv.weight"
CHANNELS, HEAD_SIZE = 128, 64
WINDOWS = ("each of its windows of 689 latent frames passes through all its blocks before the next one, and "
           "overlapping windows are averaged")


def _resize(model, config):
    """Create the parameters in the sizes of a config, without values, since the class takes no sizes. Buffers become
    the values that files have."""
    transformer = model.diffusion_transformer.transformer
    width, new_width = transformer.project_out.weight.shape[1], config["width"]
    sizes = {factor * width: factor * new_width for factor in (1, 3, 4, 8)}
    sizes[width + 2 * CHANNELS] = new_width + 2 * CHANNELS
    transformer.layers = transformer.layers[:config["depth"]]
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            empty = torch.empty([sizes.get(length, length) for length in tensor.shape], dtype=tensor.dtype)
            setattr(module, name, torch.nn.Parameter(empty, requires_grad=False) if name in module._parameters
                    else torch.zeros_like(empty))
        if isinstance(module, torch.nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    for layer in transformer.layers:
        layer.self_attn.num_heads = new_width // HEAD_SIZE
    rotary = transformer.rotary_pos_emb
    steps = torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq)
    rotary.inv_freq = (10000.0 ** -steps).to(rotary.inv_freq.dtype)


def _thin(model):
    if len(model.diffusion_transformer.transformer.layers) != SMALL["depth"]:
        _resize(model, SMALL)


SMALL = {"depth": 4, "width": 256, "context_dim": 32768}


class _Plan(ModelPlan):
    passes = "diffusion_transformer", lambda latent, *others: latent.shape[2]


class _MiniMaxMusic3(Family):
    def class_arguments(self, config):
        return {"device": "meta"}


MINIMAX_MUSIC3 = _MiniMaxMusic3(
    name="MiniMax Music 3", title="MiniMax Music 3", transformer=NATIVE, adapt_model=_resize,
    refused=dict.fromkeys(("pipefusion", "displaced"), WINDOWS),
    num_heads=lambda config: config["width"] // HEAD_SIZE, width=lambda config: config["width"],
    in_channels=lambda config: CHANNELS, num_channels=lambda config: CHANNELS, pixels=lambda config: (1, 32, 32),
    # the peak is while the conditioning is averaged over its eight layers, which every rank does for all of the audio
    activation_factors={"alone": 18.44, "residual": 18.44, "whole": 18.44, "outside": 18.44, "held": 9.0, "block": 2.0,
                        "exchange": 2.5},
    detection=Detection(
        recognise=has("cond_layer_logits", "latent_conditioners.0.weight", QKV),
        config=config_of(depth=blocks(LAYERS), width=size(QKV, 1), context_dim=32768), convert=same_names),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, lengths={"front": lambda conditioning: 1},
        conditioning={"context": "context_dim", "conditioning_scale": None},
        arguments=native_arguments(LATENT, "context", "conditioning_scale")),
    plan=_Plan(
        blocks=(BlockList(LAYERS.removesuffix("."), LAYERS, "depth", returns=(ALL,)),),
        streams={"x": ALL}, attention={"self_attn": ALL}, tokens={"rotation_matrix": TokenArgument(2, ALL)},
        tp_plan=TP_PLAN),
    testing=SmallConfig(SMALL, NATIVE, SMALL, thin=_thin, input_shapes={
        "conditioning_scale": lambda config, shape, tokens: (shape[0], 1, 1)}))
