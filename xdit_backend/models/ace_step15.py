"""ACE-Step 1.5, ComfyUI's own module: audio as one row of tokens, with sliding-window attention in every second
layer. Lyrics, timbre and text are encoded inside the model, and read by cross-attention."""

import torch

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import PaddedByModel, blocks, config_of, has, size
from .common.native_module import native_arguments, number, same_names
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut

LATENT, IMAGE = PaddedByModel((2,)), ("image",)
NATIVE = "comfy.ldm.ace.ace_step15:AceStepConditionGenerationModel"
LAYER, LYRICS = "decoder.layers.0.", "encoder.lyric_encoder.layers."
NORM = f"{LAYER}self_attn.q_norm.weight"


def _full_length(rows, args, kwargs):
    """The call's arguments with the number of tokens of the full audio."""
    return args, kwargs | {"seq_len": rows.num_tokens}


def _full_audio(module, forward, rows, tokens, args, kwargs):
    """Prepare the conditioning from the full audio, of which ComfyUI's forward only reads the length, and keep the
    additional channels of the patch's frames."""
    *others, latent, masks, is_cover = args
    full = latent.new_ones(len(latent), rows.patch.whole, latent.shape[2])
    text, mask, channels = forward(*others, full, full, is_cover, **kwargs)
    return text, mask, channels.narrow(1, rows.patch.start, latent.shape[1])


def _adapt(model, config):
    """Compute tables of positions and codes in float32, to be rounded like the latent; the class computes them in
    the dtype that it is created in."""
    for module in model.modules():
        if type(module).__name__ == "RotaryEmbedding":
            module._set_cos_sin_cache(module.max_position_embeddings, module.inv_freq.device, torch.float32)
    model.encoder.timbre_encoder.unpack_timbre_embeddings = _all_to_the_first
    quantizer = model.tokenizer.quantizer
    quantizer.soft_clamp_input_value = 1 + 1 / (quantizer.layers[0]._levels.float() - 1)
    for layer in quantizer.layers:
        indices = torch.arange(layer.codebook_size, device=layer._levels.device)
        layer.implicit_codebook = layer._indices_to_codes(indices)


def _all_to_the_first(embeddings, order):
    """Result of the class's unpack_timbre_embeddings for an order of zeros, the only one that its forward passes:
    (B, B, C), of which the first has all embeddings. The class counts on the host, which waits for the device."""
    unpacked = embeddings.new_zeros(len(embeddings), *embeddings.shape)
    unpacked[0] = embeddings
    return unpacked, None


def _flag(name):
    """Rule for a boolean conditioning; None without it."""
    def rule(call):
        count = number(name)(call)
        return None if count is None else bool(count)
    return rule


def _heads(layer):
    return lambda shapes: shapes[f"{layer}.weight"][0] // shapes[NORM][0]


SMALL = {"in_channels": 192, "hidden_size": 64, "text_hidden_dim": 24, "num_dit_layers": 4, "num_lyric_layers": 1,
         "num_timbre_layers": 1, "num_tokenizer_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
         "intermediate_size": 64, "sliding_window": 3, "fsq_dim": 32, "encoder_hidden_size": 32,
         "encoder_intermediate_size": 48, "encoder_num_heads": 4, "audio_acoustic_hidden_dim": 64}


class _Plan(ModelPlan):
    def window(self, attention):
        return (attention.sliding_window,) * 2 if attention.sliding_window else None


ACE_STEP15 = Family(
    name="ACE-Step 1.5", title="ACE-Step 1.5", transformer=NATIVE, unsupported_dtypes=("float16",), adapt_model=_adapt,
    computes_as_made=True,
    refused={"data": "ComfyUI's model applies the timbres of all images of a batch to the first one"},
    num_heads=lambda config: config["num_heads"], num_key_heads=lambda config: config["num_kv_heads"],
    width=lambda config: config["hidden_size"], in_channels=lambda config: config["audio_acoustic_hidden_dim"],
    num_channels=lambda config: config["audio_acoustic_hidden_dim"], pixels=lambda config: (1, 32, 32),
    # the peak is while audio is encoded, which every rank does for all of it
    activation_factors={"alone": 31.5, "residual": 31.5, "whole": 20.0, "outside": 31.5, "late": 16.0},
    detection=Detection(
        recognise=has(NORM, f"{LYRICS}0.input_layernorm.weight", "null_condition_emb"),
        config=config_of(
            in_channels=size("decoder.proj_in.1.weight", 1), hidden_size=size(f"{LAYER}self_attn_norm.weight", 0),
            text_hidden_dim=size("encoder.text_projector.weight", 1), num_dit_layers=blocks("decoder.layers."),
            num_lyric_layers=blocks(LYRICS), num_timbre_layers=blocks("encoder.timbre_encoder.layers."),
            num_tokenizer_layers=blocks("tokenizer.attention_pooler.layers."), head_dim=size(NORM, 0),
            num_heads=_heads(f"{LAYER}self_attn.q_proj"), num_kv_heads=_heads(f"{LAYER}self_attn.k_proj"),
            intermediate_size=size(f"{LAYER}mlp.gate_proj.weight", 0), sliding_window=128,
            fsq_dim=size("tokenizer.quantizer.project_in.weight", 1),
            encoder_hidden_size=size(f"{LYRICS}0.input_layernorm.weight", 0),
            encoder_intermediate_size=size(f"{LYRICS}0.mlp.gate_proj.weight", 0),
            encoder_num_heads=_heads(f"{LYRICS}0.self_attn.q_proj"),
            audio_acoustic_hidden_dim=size("decoder.proj_out.1.weight", 1)),
        convert=same_names),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0,
        conditioning={"context": "text_hidden_dim", "lyric_embed": "text_hidden_dim", "refer_audio": None,
                      "audio_codes": None, "is_covers": None, "replace_with_null_embeds": None},
        counts=("is_covers", "replace_with_null_embeds"),
        arguments=native_arguments(
            LATENT, "context", "lyric_embed", "refer_audio", "audio_codes", is_covers=_flag("is_covers"),
            replace_with_null_embeds=_flag("replace_with_null_embeds"))),
    plan=_Plan(
        blocks=(BlockList("decoder.layers", "decoder.layers.", "num_dit_layers"),),
        streams={"hidden_states": "image"}, attention={"self_attn": IMAGE},
        tokens={"position_embeddings": TokenArgument(0, IMAGE)},
        positions={"decoder.rotary_emb": Cut(TokenArgument(0, IMAGE), _full_length), "prepare_condition": _full_audio},
        cacheable={"cross_attn.k_proj": "run", "cross_attn.v_proj": "run"},
        cacheable_outside={"decoder.condition_embedder": "run", "encoder": "run", "tokenizer": "run",
                           "detokenizer": "run"}),
    testing=SmallConfig(SMALL, NATIVE, SMALL | {"sliding_window": 128}, detected="ACEStep15", input_shapes={
        "lyric_embed": lambda config, shape, tokens: (shape[0], tokens + 2, config["text_hidden_dim"]),
        "refer_audio": lambda config, shape, tokens: (shape[0], config["audio_acoustic_hidden_dim"], shape[2])}))
