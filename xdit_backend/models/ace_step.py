"""ACE-Step 1.0, ComfyUI's own module: audio as one row of tokens, with linear attention (sums over all tokens),
feed-forwards that read neighbouring tokens, and cross-attention to tags and lyrics."""

from types import MethodType

import torch
import torch.nn.functional as F

from ..protocol.errors import ConfigError
from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import PaddedByModel, blocks, config_of, has, size
from .common.native_module import native_arguments, same_names
from .common.plan import BlockList, ModelPlan, TokenArgument

ROWS, HEAD_SIZE, LARGEST = 16, 128, 65504.0
LATENT, IMAGE = PaddedByModel((ROWS, 1)), ("image",)
NATIVE, POINTS = "comfy.ldm.ace.model:ACEStepTransformer2DModel", "transformer_blocks.0.ff.point_conv.conv.weight"
LYRICS, NUM_TERMS = "lyric_encoder.encoders.", 3
SUMS = ("its attention computes sums over all tokens, which have no part of one patch or rank that could be reused "
        "from the previous step")


def _rotated(tensor_BNTH, tables):
    """Rotate queries or keys by tables of positions (T, H), in float32 or wider."""
    wide = torch.promote_types(tensor_BNTH.dtype, torch.float32)
    even, odd = tensor_BNTH.unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([-odd, even], -1).flatten(-2)
    cos, sin = tables
    return (tensor_BNTH.to(wide) * cos + rotated.to(wide) * sin).to(tensor_BNTH.dtype)


def _attend(self, hidden_states, rotary_freqs_cis, total=lambda part: part, **others):
    """Linear attention in float32 or wider: (B, T, C) -> ((B, T, C), None). total: turns sums over this rank's
    tokens into sums over all tokens."""
    def heads(tensor):
        return tensor.unflatten(2, (self.heads, -1)).transpose(1, 2)                            # (B, N, T, H)

    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    query, key = (_rotated(heads(layer(hidden_states)), rotary_freqs_cis).relu().to(wide)
                  for layer in (self.to_q, self.to_k))
    # the last row of the sums is that of the keys
    value = F.pad(heads(self.to_v(hidden_states)).transpose(2, 3).to(wide), (0, 0, 0, 1), value=1.0)
    out = total(value @ key) @ query.transpose(2, 3)           # (B, N, H + 1, T)
    out = (out[:, :, :-1] / (out[:, :, -1:] + 1e-15)).flatten(1, 2).transpose(1, 2).to(hidden_states.dtype)
    return self.to_out[0](out).clip(-LARGEST, LARGEST), None


def _adapt(model, config):
    """Use attention that exposes its sums and rotates at float32 or wider (ComfyUI's always rotates in float32), and
    a lyric encoder with the file's sizes (ComfyUI's has fixed sizes)."""
    _set_lyric_encoder(model, config)
    for block in model.transformer_blocks:
        block.attn.forward = MethodType(_attend, block.attn)
        block.cross_attn.processor.apply_rotary_emb = _rotated


def _set_lyric_encoder(model, config):
    model.lyric_encoder = type(model.lyric_encoder)(
        config["lyric_hidden_size"], output_size=config["lyric_hidden_size"], attention_heads=config["_lyric_heads"],
        linear_units=config["_lyric_units"], num_blocks=config["_lyric_blocks"], static_chunk_size=0,
        dtype=model.lyric_proj.weight.dtype, operations=torch.nn).eval()


def _split_strength(arguments):
    """Split the strength of lyrics into terms that bfloat16 represents exactly, so that their sum keeps its
    precision."""
    strength = arguments.get("lyrics_strength")
    if strength is None or torch.is_tensor(strength):
        return arguments
    terms = []
    for _ in range(NUM_TERMS):
        terms.append(torch.tensor(float(strength) - sum(terms)).bfloat16().item())
    return arguments | {"lyrics_strength": torch.tensor(terms)}


def _strength(call):
    """Strength of the lyrics, a scalar in float32 or wider."""
    terms = call.conditioning.get("lyrics_strength")
    return 1.0 if terms is None else terms.to(torch.promote_types(call.latent.dtype, torch.float32)).sum()


def _widths(shapes):
    """Widths of the two self-supervised audio models' features, for which the class has projectors."""
    return [shapes[f"projectors.{number}.4.weight"][0] for number in range(blocks("projectors.")(shapes))]


def _of_audio(call):
    """The latent. Raises ConfigError for other numbers of rows, for which ComfyUI's forward fails."""
    rows = call.latent.shape[-2]
    if rows % ROWS:
        raise ConfigError("Connect Empty Ace Step 1.0 Latent Audio, or audio encoded by the VAE of ACE-Step: its "
                          f"latents have {ROWS} rows, and this one has {rows}.")
    return LATENT(call)


SMALL = {"in_channels": 8, "out_channels": 8, "num_layers": 4, "inner_dim": 512, "attention_head_dim": HEAD_SIZE,
         "num_attention_heads": 4, "mlp_ratio": 2.5, "max_position": 512, "rope_theta": 1000000.0,
         "speaker_embedding_dim": 16, "text_embedding_dim": 24, "ssl_latent_dims": [8, 12],
         "lyric_encoder_vocab_size": 64, "lyric_hidden_size": 64, "patch_size": [ROWS, 1], "_lyric_heads": 4,
         "_lyric_units": 96, "_lyric_blocks": 1}

ACE_STEP = Family(
    name="ACE-Step 1.0", title="ACE-Step 1.0", transformer=NATIVE, unsupported_dtypes=("float16",), adapt_model=_adapt,
    computes_as_made=True, refused={"pipefusion": SUMS, "displaced": SUMS},
    num_heads=lambda config: config["num_attention_heads"], width=lambda config: config["inner_dim"],
    num_channels=lambda config: config["out_channels"], pixels=lambda config: (1, 64, 1),
    # the peak is while lyrics are encoded and audio is cut into tokens, which every rank does for all of it
    activation_factors={"alone": 17.59, "residual": 17.59, "held": 4.74, "block": 18.8, "exchange": 10.0,
                        "shared": 2.79},
    detection=Detection(
        recognise=has("genre_embedder.weight", "speaker_embedder.weight", POINTS, "lyric_embs.weight"),
        config=config_of(
            in_channels=size("proj_in.early_conv_layers.0.weight", 1),
            out_channels=size("final_layer.linear.weight", 0, ROWS), num_layers=blocks("transformer_blocks."),
            inner_dim=size("genre_embedder.weight", 0), attention_head_dim=HEAD_SIZE,
            num_attention_heads=size("genre_embedder.weight", 0, HEAD_SIZE), max_position=32768, rope_theta=1000000.0,
            mlp_ratio=lambda shapes: shapes[POINTS][1] / shapes[POINTS][0],
            speaker_embedding_dim=size("speaker_embedder.weight", 1),
            text_embedding_dim=size("genre_embedder.weight", 1),
            ssl_latent_dims=_widths, lyric_encoder_vocab_size=size("lyric_embs.weight", 0),
            lyric_hidden_size=size("lyric_embs.weight", 1), patch_size=[ROWS, 1],
            _lyric_heads=size(f"{LYRICS}0.self_attn.pos_bias_u", 0), _lyric_blocks=blocks(LYRICS),
            _lyric_units=size(f"{LYRICS}0.feed_forward.w_1.weight", 0)),
        convert=same_names),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0, unfold=_split_strength,
        conditioning={"context": "text_embedding_dim", "speaker_embeds": "speaker_embedding_dim",
                      "lyric_token_idx": None, "lyrics_strength": None},
        arguments=native_arguments(_of_audio, "context", "speaker_embeds", "lyric_token_idx",
                                   lyrics_strength=_strength)),
    plan=ModelPlan(
        blocks=(BlockList("transformer_blocks", "transformer_blocks."),), streams={"hidden_states": "image"},
        attention={}, token_reductions=("attn",), halos=("ff.depth_conv",),
        tokens={"rotary_freqs_cis": TokenArgument(0, IMAGE)}),
    testing=SmallConfig(
        SMALL, NATIVE, {name: value for name, value in SMALL.items() if not name.startswith("_")} | {
            "inner_dim": 256, "num_attention_heads": 2, "speaker_embedding_dim": 512, "max_position": 32768},
        rows=ROWS, detected="ACEStep", thin=lambda model: _set_lyric_encoder(model, SMALL), input_shapes={
            "speaker_embeds": lambda config, shape, tokens: (shape[0], config["speaker_embedding_dim"]),
            "lyric_token_idx": lambda config, shape, tokens: (shape[0], tokens + 2),
            "lyrics_strength": lambda config, shape, tokens: (NUM_TERMS,)}))
