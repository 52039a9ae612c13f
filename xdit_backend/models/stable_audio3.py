"""Stable Audio 3, ComfyUI's own module: as Stable Audio Open, after memory tokens. Attention may be differential,
and every block reads the audio to keep when inpainting."""

from dataclasses import replace

from .common.family import Detection, SmallConfig, derived
from .common.inputs import because, config_of, from_conditioning, has, size
from .common.plan import TokenArgument
from .common.stable_audio import CONDITIONERS, LAYER, NATIVE, PLAN, ROTARY, SHARED, seconds
from .common.tp_plan import COLWISE, ROWWISE
from .stable_audio import SMALL, STABLE_AUDIO

NUM_MEMORY, NORM = 64, f"{LAYER}self_attn.q_norm.gamma"        # learned memory tokens
TOTAL = seconds("seconds_total")


def _is_differential(shapes):
    """Whether self-attention has two sets of queries and keys, of which the second is subtracted."""
    outputs, width = shapes[f"{LAYER}self_attn.to_qkv.weight"]
    return outputs == 5 * width


def _local(call):
    """The audio to keep and its mask, for the frames of the latent or patch: (B, C, T)."""
    tensor = from_conditioning("local_add_cond")(call)
    return tensor if tensor is None or call.patch is None else tensor.narrow(2, call.patch.start, call.latent.shape[2])


SMALL3 = SMALL | {"embed_dim": 128, "cond_token_dim": 24, "project_cond_tokens": True, "num_memory_tokens": NUM_MEMORY,
                  "norm_type": "rms_norm", "attn_kwargs": {"qk_norm": "rms", "differential": True},
                  "local_add_cond_dim": 9, "timestep_features_type": "expo", "global_cond_shared_embed": True,
                  "global_cond_type": "adaLN"}


class _Detection(Detection):
    needed_values = TOTAL[1:]


STABLE_AUDIO3 = replace(
    STABLE_AUDIO, name="Stable Audio 3", title="Stable Audio 3",
    activation_factors={"alone": 21.94, "residual": 2.84, "whole": 7.9, "held": 1.39, "block": 22.0, "exchange": 22.08,
                        "entered": 3.0, "own": 0.0, "keys": 4.14},
    detection=derived(
        _Detection, STABLE_AUDIO.detection,
        recognise=has(ROTARY, SHARED),
        refusals=(because(f"it does not have {NUM_MEMORY} memory tokens, as published ones do",
                          lambda shapes: shapes["transformer.memory_tokens"][0] != NUM_MEMORY),),
        config=config_of(
            **STABLE_AUDIO.detection.config.rules | {
                "num_heads": lambda shapes: shapes["to_timestep_embed.0.weight"][0] // shapes[NORM][0]},
            num_memory_tokens=NUM_MEMORY, norm_type="rms_norm", global_cond_shared_embed=True, global_cond_type="adaLN",
            attn_kwargs=lambda shapes: {"qk_norm": "rms", "differential": _is_differential(shapes)},
            local_add_cond_dim=size(f"{LAYER}to_local_embed.0.weight", 1),
            timestep_features_type=lambda shapes: "learned" if "timestep_features.weight" in shapes else "expo"),
        values=(*TOTAL, f"{CONDITIONERS}prompt.padding_embedding")),
    inputs=replace(
        STABLE_AUDIO.inputs,
        time_scale=1.0, lengths={"front": lambda conditioning: NUM_MEMORY},
        conditioning=STABLE_AUDIO.inputs.conditioning | {"local_add_cond": None},
        arguments=STABLE_AUDIO.inputs.arguments | {"local_add_cond": _local}),
    plan=replace(PLAN, tokens=PLAN.tokens | {"local_add_cond": TokenArgument(1, ("image",))},
                 tp_plan=PLAN.tp_plan | {"to_local_embed.0": COLWISE, "to_local_embed.2": ROWWISE},
                 cacheable_outside=PLAN.cacheable_outside | {"transformer.global_cond_embedder": "step"}),
    testing=SmallConfig(SMALL3, NATIVE, SMALL3 | {"io_channels": 256, "cond_token_dim": 768, "global_cond_dim": 768,
                                                  "local_add_cond_dim": 257}, detected="StableAudio3",
                        input_shapes=STABLE_AUDIO.testing.input_shapes | {
                            "local_add_cond": lambda config, shape, tokens: (
                                shape[0], config["local_add_cond_dim"], shape[2])}))
