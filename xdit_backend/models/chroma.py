"""Chroma: Flux.1's blocks, two streams, then one sequence. A small network computes the modulations of all blocks
from timestep and guidance."""

import functools

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Packed, blocks, config_of, from_conditioning, has, size, text_positions, timestep
from .common.key_mapping import table
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.tp_plan import PARALLEL_MLP
from .flux import KEYS as FLUX_KEYS

LATENT, BOTH, NUM_MODULATIONS = Packed((2, 2)), ("text", "image"), 344
TENSORS = has("distilled_guidance_layer.in_proj.weight", "double_blocks.0.img_attn.qkv.weight")

# other names are as in Flux.1
KEYS = table((r"^(distilled_guidance_layer\.norms\.\d+)\.scale$", r"\1.weight"))


def _adapt(model, config):
    """As in ComfyUI, use the guidance, do not round timesteps, and compute as many modulations as the published
    models' blocks need."""
    from diffusers.models.embeddings import get_timestep_embedding
    embed, forward, now = model.time_text_embed, model.forward, []
    width = config["approximator_num_channels"] // 2

    @functools.cache
    def modulation_indices(device):
        return get_timestep_embedding(torch.arange(NUM_MODULATIONS, device=device) * 1000, width, True, 0)

    def guided(*, timestep, guidance, **inputs):
        now[:] = [embed.time_proj(1000 * timestep), embed.guidance_proj(1000 * guidance)]
        return forward(timestep=timestep, **inputs)

    def embedded(rounded):
        of_time = torch.cat(now, 1).to(rounded.dtype)[:, None].expand(-1, NUM_MODULATIONS, -1)
        return torch.cat([of_time, modulation_indices(rounded.device).to(rounded.dtype).expand(len(of_time), -1, -1)],
                         2)
    embed.forward, model.forward = embedded, guided


def _guidance(call):
    guidance = from_conditioning("guidance")(call)
    return call.timestep.new_zeros(len(call.latent)) if guidance is None else guidance


CHROMA = Family(
    name="Chroma", title="Chroma", transformer="ChromaTransformer2DModel", adapt_model=_adapt,
    num_channels=lambda config: (config.get("out_channels") or config["in_channels"]) // 4,
    activation_factors={"alone": 16.6, "residual": 2.6, "whole": 7.0, "outside": 3.6, "held": 1.55, "block": 16.2,
                        "exchange": 18.2, "own": 0.0},
    detection=Detection(
        recognise=lambda shapes: TENSORS(shapes) and not has("nerf_blocks.")(shapes),
        config=config_of(
            patch_size=1, in_channels=size("img_in.weight", 1), out_channels=size("final_layer.linear.weight", 0),
            num_layers=blocks("double_blocks."), num_single_layers=blocks("single_blocks."), attention_head_dim=128,
            num_attention_heads=size("img_in.weight", 0, 128), joint_attention_dim=size("txt_in.weight", 1),
            axes_dims_rope=(16, 56, 56), approximator_num_channels=size("distilled_guidance_layer.in_proj.weight", 1),
            approximator_hidden_dim=size("distilled_guidance_layer.in_proj.weight", 0),
            approximator_layers=blocks("distilled_guidance_layer.norms.")),
        convert=lambda tensors, config: FLUX_KEYS(KEYS(tensors, config), config)),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, conditioning={"context": "joint_attention_dim", "guidance": None},
        ignored=("y", "ref_latents", "ref_latents_method"),
        arguments={"hidden_states": LATENT, "timestep": timestep(),
                   "encoder_hidden_states": from_conditioning("context"),
                   "guidance": _guidance, "img_ids": LATENT.positions, "txt_ids": text_positions}),
    plan=ModelPlan(
        tp_plan=PARALLEL_MLP, takes_output_patches=True,
        blocks=(BlockList("transformer_blocks", "double_blocks.", returns=BOTH, image_fraction=0.5, control="input",
                          patched="double", streams={"hidden_states": "image", "encoder_hidden_states": "text"}),
                BlockList("single_transformer_blocks", "single_blocks.", "num_single_layers", returns=(BOTH,),
                          control="output", patched="single")),
        streams={"hidden_states": BOTH}, attention={"attn": BOTH}, tokens={"image_rotary_emb": TokenArgument(0, BOTH)},
        cacheable_outside={"context_embedder": "run", "distilled_guidance_layer": "step"}),
    testing=SmallConfig(
        {"patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 4, "joint_attention_dim": 24, "axes_dims_rope": (4, 4, 8),
         "approximator_num_channels": 16, "approximator_hidden_dim": 24, "approximator_layers": 2},
        "comfy.ldm.chroma.model:Chroma",
        {"in_channels": 64, "out_channels": 64, "context_in_dim": 64, "hidden_size": 256, "mlp_ratio": 4.0,
         "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "axes_dim": [16, 56, 56], "theta": 10000,
         "patch_size": 2, "qkv_bias": True, "in_dim": 64, "out_dim": 256, "hidden_dim": 96, "n_layers": 2,
         "txt_ids_dims": [], "vec_in_dim": None}, detected="Chroma"))
