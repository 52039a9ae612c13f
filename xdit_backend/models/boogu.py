"""Boogu-Image, ComfyUI's own module: OmniGen 2 with additional two-stream blocks, in which images also attend to
themselves alone."""

import dataclasses

from .common.family import SmallConfig
from .common.inputs import blocks, config_of, has, size
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.tp_plan import COLWISE, REPLICATED, ROWWISE
from .omnigen2 import ALL, IMAGES, OMNIGEN2, POSITIONS, REFINED, WIDE, inner, of_heads

NATIVE = "comfy.ldm.boogu.model:BooguTransformer2DModel"
NORM = "single_stream_layers.0.attn.norm_q.weight"
SMALL = OMNIGEN2.testing.config | {"num_double_stream_layers": 2, "instruction_feat_dim": 24}
del SMALL["text_feat_dim"]

BOOGU = dataclasses.replace(
    OMNIGEN2, name="Boogu-Image", title="Boogu-Image", transformer=NATIVE,
    activation_factors={"alone": 17.65, "outside": 5.35, "held": 2.25, "block": 14.75, "exchange": 9.5, "keys": 2.36,
                        "own": 0.9, "late": 15.3, "early": 0.24},
    detection=dataclasses.replace(
        OMNIGEN2.detection,
        recognise=has("double_stream_layers.0.img_instruct_attn.processor.img_to_q.weight", "x_embedder.weight", NORM),
        config=config_of(
            patch_size=2, in_channels=size("x_embedder.weight", 1, 4), hidden_size=size("x_embedder.weight", 0),
            num_layers=blocks("single_stream_layers."), num_double_stream_layers=blocks("double_stream_layers."),
            num_refiner_layers=blocks("noise_refiner."),
            num_attention_heads=of_heads("single_stream_layers.0.attn.to_q.weight", NORM),
            num_kv_heads=of_heads("single_stream_layers.0.attn.to_k.weight", NORM),
            instruction_feat_dim=size("time_caption_embed.caption_embedder.1.weight", 1),
            multiple_of=inner("single_stream_layers."), axes_dim_rope=lambda shapes: (shapes[NORM][0] // 3,) * 3,
            axes_lens=(2048, 1664, 1664), timestep_scale=1000.0)),
    inputs=dataclasses.replace(
        OMNIGEN2.inputs,
        conditioning=OMNIGEN2.inputs.conditioning | {"context": "instruction_feat_dim"}),
    plan=ModelPlan(
        blocks=(REFINED,
                BlockList("double_stream_layers", "double_stream_layers.", "num_double_stream_layers",
                          returns=(IMAGES, "text"), image_fraction=0.6,
                          streams={"img_hidden_states": IMAGES, "instruct_hidden_states": "text"},
                          attention={"img_instruct_attn": ALL, "img_self_attn": IMAGES},
                          tokens={"joint_rotary_emb": TokenArgument(1, ALL),
                                  "img_rotary_emb": TokenArgument(1, IMAGES)}),
                BlockList("single_stream_layers", "single_stream_layers.", returns=(ALL,))),
        streams={"hidden_states": ALL}, attention={"attn": ALL}, tokens={"image_rotary_emb": TokenArgument(1, ALL)},
        positions=POSITIONS, cacheable_outside=OMNIGEN2.plan.cacheable_outside,
        tp_plan={"img_instruct_attn.to_out.0": REPLICATED, "img_instruct_attn.processor.*_to_*": COLWISE,
                 "img_instruct_attn.processor.*_out": ROWWISE},
        unstaged_blocks=OMNIGEN2.plan.unstaged_blocks),
    testing=SmallConfig(SMALL, NATIVE, SMALL | WIDE, detected="Boogu",
                        input_shapes=OMNIGEN2.testing.input_shapes))
