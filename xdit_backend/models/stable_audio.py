"""Stable Audio Open 1.0, ComfyUI's own module: audio as one row of tokens after a token for timestep and duration;
text by cross-attention with fewer key heads than query heads."""

from dataclasses import replace

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import because, blocks, config_of, has, size
from .common.native_module import native_arguments
from .common.stable_audio import (
        CONVERT,
        LATENT,
        LAYER,
        NATIVE,
        PLAN,
        ROTARY,
        SHARED,
        adapt_model,
        projects_text,
        seconds,
)
from .common.tp_plan import REPLICATED, styled

HEAD_SIZE, SECONDS = 64, (*seconds("seconds_start"), *seconds("seconds_total"))
# with other numbers of heads than the self-attention
UNSPLIT = tuple(f"cross_attn.{name}" for name in ("to_q", "to_kv", "to_out"))
SMALL = {"io_channels": 8, "embed_dim": 256, "cond_token_dim": 128, "project_cond_tokens": False, "global_cond_dim": 24,
         "depth": 4, "num_heads": 4}


class _Detection(Detection):
    needed_values = SECONDS


STABLE_AUDIO = Family(
    name="Stable Audio Open", title="Stable Audio Open 1.0", transformer=NATIVE, adapt_model=adapt_model,
    num_heads=lambda config: config["num_heads"], width=lambda config: config["embed_dim"],
    in_channels=lambda config: config["io_channels"], num_channels=lambda config: config["io_channels"],
    pixels=lambda config: (1, 32, 32),
    activation_factors={"alone": 19.07, "residual": 3.46, "held": 1.43, "whole": 7.0, "block": 19.0, "exchange": 16.0,
                        "own": 0.0, "keys": 1.93},
    detection=_Detection(
        recognise=lambda shapes: has(ROTARY, "to_cond_embed.0.weight")(shapes) and SHARED not in shapes,
        refusals=(because("its attention processes the mean over all tokens separately (Stable Audio Open Small), and "
                          "no device has all tokens", has(f"{LAYER}self_attn.q_norm.weight")),),
        config=config_of(
            io_channels=size("postprocess_conv.weight", 0), embed_dim=size("to_timestep_embed.0.weight", 0),
            cond_token_dim=size("to_cond_embed.0.weight", 1), project_cond_tokens=projects_text,
            global_cond_dim=size("to_global_embed.0.weight", 1), depth=blocks("transformer.layers."),
            num_heads=size("to_timestep_embed.0.weight", 0, HEAD_SIZE)),
        convert=CONVERT, values=SECONDS),
    inputs=Inputs(
        latent=LATENT, time_scale=0.5, lengths={"front": lambda conditioning: 1},
        conditioning={"context": "cond_token_dim", "global_embed": "global_cond_dim"},
        arguments=native_arguments(LATENT, "context", "global_embed")),
    plan=replace(PLAN, tp_plan=PLAN.tp_plan | styled(REPLICATED, *UNSPLIT)),
    testing=SmallConfig(SMALL, NATIVE, SMALL | {
        "io_channels": 64, "cond_token_dim": 768, "project_cond_tokens": True, "global_cond_dim": 1536},
        detected="StableAudio",
        input_shapes={"global_embed": lambda config, shape, tokens: (shape[0], config["global_cond_dim"])}))
