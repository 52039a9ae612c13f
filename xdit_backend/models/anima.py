"""Anima: Cosmos-Predict2's model, with a small network that computes the text conditioning from T5's tokens and
Qwen3's hidden states."""

import dataclasses
from types import SimpleNamespace

import torch.nn.functional as F

from .common.family import Detection, FolderRules, SmallConfig, derived
from .common.inputs import because, config_of, from_conditioning, has, needs_diffusers
from .common.key_mapping import table
from .cosmos import COSMOS, is_cosmos
from .cosmos import KEYS as COSMOS_KEYS

ADAPTER, NUM_HEADS = "llm_adapter.", 16                        # number of heads in ComfyUI's class for any width

KEYS = table((r"^llm_adapter\.(?!rotary_emb\.)", "text_conditioner."), (r"^llm_adapter\.rotary_emb\.", None))


def _conditioner(shapes):
    """Arguments of diffusers' text conditioner."""
    of = {name.removeprefix(ADAPTER): shape for name, shape in shapes.items() if name.startswith(ADAPTER)}
    (num_entries, target), width = of["embed.weight"], of["out_proj.weight"][1]
    return {"source_dim": of["blocks.0.cross_attn.k_proj.weight"][1], "target_dim": target, "model_dim": width,
            "num_layers": len({name.split(".")[1] for name in of if name.startswith("blocks.")}),
            "num_attention_heads": NUM_HEADS, "target_vocab_size": num_entries,
            "use_self_attention": "blocks.0.self_attn.q_proj.weight" in of}


def _convert(tensors, config):
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(ADAPTER)}
    return COSMOS_KEYS({name: tensor for name, tensor in tensors.items() if name not in own},
                       config) | KEYS(own, config)


def _adapt(model, config):
    """Make the text conditioner a submodule, as in the file. Text without T5 ids is used as it is."""
    from diffusers import AnimaTextConditioner
    COSMOS.adapt_model(model, config)
    model.text_conditioner, forward = AnimaTextConditioner(**config["_conditioner"]), model.forward

    def conditioned(*, encoder_hidden_states, ids, weights, **inputs):
        if ids is not None:
            encoder_hidden_states = model.text_conditioner(encoder_hidden_states, ids)
            if weights is not None:  # weights of the first tokens; padding after them has weight zero
                padding = encoder_hidden_states.shape[1] - weights.shape[1]
                encoder_hidden_states = encoder_hidden_states * F.pad(weights, (0, 0, 0, padding))
        return forward(encoder_hidden_states=encoder_hidden_states, **inputs)
    model.forward = conditioned


def _thin(model):
    """Narrow the text network of ComfyUI's class, whose widths it fixes."""
    wide = getattr(model, ADAPTER.strip("."), None)
    if wide is not None:
        layers = SimpleNamespace(**{type(module).__name__: type(module) for module in wide.modules()})
        model.llm_adapter = type(wide)(**THIN, device=wide.embed.weight.device, dtype=wide.embed.weight.dtype,
                                       operations=layers)


SMALL = COSMOS.testing
THIN = {"source_dim": 64, "target_dim": 64, "model_dim": 96, "num_layers": 2}
WIDTHS = {"source_dim": 24, "target_dim": 24, "model_dim": 32, "num_layers": 2, "num_attention_heads": 4,
          "target_vocab_size": 64}


class _Detection(Detection):
    text_prefixes = (ADAPTER,)


ANIMA = dataclasses.replace(
    COSMOS, name="Anima", title="Anima", adapt_model=_adapt,
    detection=derived(
        _Detection, COSMOS.detection,
        recognise=lambda shapes: is_cosmos(shapes) and has(ADAPTER)(shapes),
        refusals=(because("it adds learned positions in every block", has("extra_pos_embedder.")),
                  needs_diffusers("0.39")),
        config=config_of(**COSMOS.detection.config.rules, _conditioner=_conditioner), convert=_convert,
        config_from_tensors=(*COSMOS.detection.config_from_tensors, "_conditioner"),
        folder=FolderRules(extra_parts={"text_conditioner": lambda name: ADAPTER + name})),
    inputs=dataclasses.replace(
        COSMOS.inputs,
        conditioning={"context": "text_embed_dim", "t5xxl_ids": None, "t5xxl_weights": None},
        arguments=COSMOS.inputs.arguments | {"ids": from_conditioning("t5xxl_ids"),
                                             "weights": from_conditioning("t5xxl_weights")}),
    plan=dataclasses.replace(COSMOS.plan, cacheable_outside={"text_conditioner": "run"}),
    testing=SmallConfig(SMALL.config | {"_conditioner": WIDTHS}, "comfy.ldm.anima.model:Anima", SMALL.arguments,
                        detected="Anima", thin=_thin))
