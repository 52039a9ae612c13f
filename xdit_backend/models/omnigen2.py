"""OmniGen 2, ComfyUI's own module: text, reference images and image are refined separately, then form one sequence;
grouped-query attention."""

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import Unpacked, blocks, check_mask, config_of, has, size
from .common.native_module import batched_references, native_arguments, num_reference_tokens, number, same_names
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut

NATIVE, NORM = "comfy.ldm.omnigen.omnigen2:OmniGen2Transformer2DModel", "layers.0.attn.norm_q.weight"
LATENT, IMAGES, ALL = Unpacked((2, 2)), ("reference", "image"), ("text", "reference", "image")


def full_positions(rows, args, kwargs):
    """The arguments of OmniGen 2's positions for the full latent."""
    batch_size, text, text_lengths, reference_lengths, lengths, references, sizes, device = args
    return [batch_size, text, text_lengths, reference_lengths, [rows.num_tokens] * len(lengths), references,
            [(rows.whole_rows, columns) for _, columns in sizes], device], kwargs


def _num_tokens(call):
    """Number of text tokens, from which ComfyUI's model computes positions. Raises UnsupportedError if it is not the
    mask's."""
    count = number("num_tokens")(call)
    if count is not None:
        check_mask(count, call.conditioning["context"].shape[1])
    return count


def of_heads(name, norm):
    """Config rule: number of heads of a layer, from the width of one head's norm."""
    return lambda shapes: shapes[name][0] // shapes[norm][0]


def inner(prefix):
    """Config rule: width of the feed-forwards, to which the class rounds up four times the width of the tokens."""
    return size(f"{prefix}0.feed_forward.linear_1.weight", 0)


POSITIONS = {"rope_embedder": Cut((None, None, TokenArgument(1, ("image",)), TokenArgument(1, ALL), None, None),
                                  full_positions)}
REFINED = BlockList("noise_refiner", "noise_refiner.", "num_refiner_layers", streams={"hidden_states": "image"},
                    attention={"attn": ("image",)}, tokens={"image_rotary_emb": TokenArgument(1, ("image",))})

SMALL = {"patch_size": 2, "in_channels": 4, "hidden_size": 48, "num_layers": 3, "num_refiner_layers": 2,
         "num_attention_heads": 4, "num_kv_heads": 2, "text_feat_dim": 24, "axes_dim_rope": (4, 4, 4),
         "multiple_of": 192, "timestep_scale": 1000.0}
# for files: half of the columns of each layer are a multiple of the block size of every quantised format
WIDE = {"hidden_size": 384, "axes_dim_rope": (32, 32, 32), "in_channels": 16}

OMNIGEN2 = Family(
    name="OmniGen 2", title="OmniGen 2", transformer=NATIVE, num_key_heads=lambda config: config["num_kv_heads"],
    width=lambda config: config["hidden_size"],
    activation_factors={"alone": 15.6, "outside": 5.35, "held": 1.55, "block": 12.9, "exchange": 14.8, "attends": 15.4,
                        "own": 0.0},
    detection=Detection(
        recognise=has("time_caption_embed.timestep_embedder.linear_1.bias", "ref_image_patch_embedder.weight",
                      NORM),
        config=config_of(
            patch_size=2, in_channels=size("x_embedder.weight", 1, 4), hidden_size=size("x_embedder.weight", 0),
            num_layers=blocks("layers."), num_refiner_layers=blocks("noise_refiner."),
            num_attention_heads=of_heads("layers.0.attn.to_q.weight", NORM),
            num_kv_heads=of_heads("layers.0.attn.to_k.weight", NORM),
            text_feat_dim=size("time_caption_embed.caption_embedder.1.weight", 1),
            multiple_of=inner("layers."), axes_dim_rope=lambda shapes: (shapes[NORM][0] // 3,) * 3,
            axes_lens=(1024, 1664, 1664), timestep_scale=1000.0),
        convert=same_names),
    inputs=Inputs(
        latent=LATENT, time_scale=1.0,
        conditioning={"context": "text_feat_dim", "num_tokens": None, "ref_latents": None}, counts=("num_tokens",),
        lengths={"reference": num_reference_tokens(LATENT)},
        arguments=native_arguments(LATENT, "context", times="timesteps", num_tokens=_num_tokens,
                                   ref_latents=batched_references)),
    plan=ModelPlan(
        blocks=(REFINED, BlockList("layers", "layers.", returns=(ALL,))),
        streams={"hidden_states": ALL}, attention={"attn": ALL}, tokens={"image_rotary_emb": TokenArgument(1, ALL)},
        positions=POSITIONS, cacheable_outside={"context_refiner": "run", "ref_image_refiner": "step"},
        unstaged_blocks=("context_refiner", "ref_image_refiner")),
    testing=SmallConfig(SMALL, NATIVE, SMALL | WIDE, detected="Omnigen2",
                        input_shapes={"num_tokens": lambda config, shape, tokens: (tokens,)}))
