"""Wan Camera (2.1, 2.2), ComfyUI's own module: Wan conditioned on a camera path. Base of further Wan variants."""

from .common.family import Detection, Family, Inputs, SmallConfig
from .common.inputs import config_of, from_conditioning, has, only_prefixes, optional_size, size
from .common.native_module import full_sizes, native_arguments, same_names
from .common.plan import BlockList, ModelPlan, TokenArgument
from .common.position_slicing import Cut
from .common.rope_scaling import moves
from .common.tp_plan import COLWISE, ROWWISE, styled
from .common.wan import ARGUMENTS, RULES, SMALL, even_with, tokens_of_patch
from .wan import LATENT, MODULES

NATIVE, HEAD = "comfy.ldm.wan.model:CameraWanModel", "blocks.0.self_attn.norm_q.weight"
TABLE = TokenArgument(1, ("image",))


TP_PLAN = (styled(COLWISE, *(f"*_attn.{name}" for name in ("q", "k", "v", "k_img", "v_img")), "ffn.0")
           | styled(ROWWISE, "*_attn.o", "ffn.2"))

WAN_CAMERA = Family(
    name="Wan Camera", title="Wan Camera (2.1, 2.2)", transformer=NATIVE, keep_in_compute_dtype=("patch_embedding",),
    num_heads=lambda config: config["num_heads"], width=lambda config: config["dim"],
    num_channels=lambda config: config["out_dim"], in_channels=lambda config: config["in_dim"],
    pixels=lambda config: (4, 8, 8),
    activation_factors={"alone": 8.55, "residual": 3.15, "whole": 4.95, "outside": 4.2, "held": 1.05, "block": 8.6,
                        "exchange": 14.25, "own": 0.0},
    detection=Detection(
        recognise=has(HEAD, "head.modulation", "control_adapter.conv.weight"),
        refusals=(only_prefixes(MODULES | {"control_adapter"}),),
        config=config_of(
            **RULES, model_type=lambda shapes: "camera" if has("img_emb.")(shapes) else "camera_2.2",
            flf_pos_embed_token_number=optional_size("img_emb.emb_pos", 1),
            in_dim_control_adapter=size("control_adapter.conv.weight", 1, 64),
            _image_dim=optional_size("img_emb.proj.1.weight", 1)),
        convert=same_names),
    inputs=Inputs(
        latent=LATENT,
        conditioning={"context": "text_dim", "rope_scales": None, "clip_fea": "_image_dim", "camera_conditions": None},
        ignored=("reference_latent", "denoise_mask"),
        arguments=native_arguments(even_with(LATENT, "Wan Camera", "camera_conditions", "camera path", 8, True),
                                   "context",
                                   clip_fea=from_conditioning("clip_fea", where="_image_dim"),
                                   camera_conditions=from_conditioning("camera_conditions"),
                                   transformer_options=moves)),
    plan=ModelPlan(
        blocks=(BlockList("blocks", "blocks.", patched="double"),), streams={"x": "image"},
        attention={"self_attn": ("image",)}, tokens={"freqs": TABLE}, tp_plan=TP_PLAN,
        positions={"rope_encode": Cut(TABLE, full_sizes), "control_adapter": tokens_of_patch},
        cacheable_outside={"text_embedding": "run"}),
    testing=SmallConfig(SMALL | {"model_type": "camera", "in_dim_control_adapter": 2, "_image_dim": 1280}, NATIVE,
                        ARGUMENTS | {"model_type": "camera", "in_dim": 32}, input_shapes={
                            "camera_conditions": lambda config, shape, tokens: (
                                shape[0], config["in_dim_control_adapter"], shape[2], 8 * shape[3], 8 * shape[4])}))
