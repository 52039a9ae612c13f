"""Names and shapes of published files of Wan's kinds that ComfyUI's own modules take, by what they have beside those of
published_comfyui.py. Used by test_header.py."""

from tests.unit.checkpoints.published_comfyui import WAN_CAMERA, WAN_HUMO, blocks

# of 14 billion, from a picture
I2V = {name: shape for name, shape in WAN_CAMERA.items() if not name.startswith("control_adapter.")}
WAN_SCAIL = I2V | {"patch_embedding.weight": (5120, 20, 1, 2, 2), "patch_embedding_pose.weight": (5120, 20, 1, 2, 2),
                   "patch_embedding_pose.bias": (5120,)}
WAN_SCAIL2 = WAN_SCAIL | {"patch_embedding_mask.weight": (5120, 28, 1, 2, 2), "patch_embedding_mask.bias": (5120,)}

T2V = {name: shape for name, shape in WAN_HUMO.items() if "audio" not in name}
ATTENTION = {name.removeprefix("blocks.0.self_attn."): shape for name, shape in T2V.items()
             if name.startswith("blocks.0.self_attn.")}
WAN_S2V = T2V | {
    "patch_embedding.weight": (5120, 16, 1, 2, 2), "trainable_cond_mask.weight": (3, 5120),
    "casual_audio_encoder.weights": (1, 25, 1, 1), "casual_audio_encoder.encoder.padding_tokens": (1, 1, 1, 5120),
    "casual_audio_encoder.encoder.conv1_local.conv.weight": (5120, 1024, 3),
    "casual_audio_encoder.encoder.conv1_local.conv.bias": (5120,),
    "casual_audio_encoder.encoder.conv1_global.conv.weight": (1280, 1024, 3),
    "casual_audio_encoder.encoder.conv1_global.conv.bias": (1280,),
    "casual_audio_encoder.encoder.conv2.conv.weight": (2560, 1280, 3),
    "casual_audio_encoder.encoder.conv2.conv.bias": (2560,),
    "casual_audio_encoder.encoder.conv3.conv.weight": (5120, 2560, 3),
    "casual_audio_encoder.encoder.conv3.conv.bias": (5120,),
    "casual_audio_encoder.encoder.final_linear.weight": (5120, 5120),
    "casual_audio_encoder.encoder.final_linear.bias": (5120,),
    "cond_encoder.weight": (5120, 16, 1, 2, 2), "cond_encoder.bias": (5120,),
    "frame_packer.proj.weight": (5120, 16, 1, 2, 2), "frame_packer.proj.bias": (5120,),
    "frame_packer.proj_2x.weight": (5120, 16, 2, 4, 4), "frame_packer.proj_2x.bias": (5120,),
    "frame_packer.proj_4x.weight": (5120, 16, 4, 8, 8), "frame_packer.proj_4x.bias": (5120,),
    **blocks("audio_injector.injector.", 12, ATTENTION),
    **blocks("audio_injector.injector_adain_layers.", 12, {"linear.weight": (10240, 5120), "linear.bias": (10240,)})}

FUSED = {"self_attn.in_proj_weight": (768, 256), "self_attn.in_proj_bias": (768,),
         "self_attn.out_proj.weight": (256, 256), "self_attn.out_proj.bias": (256,),
         "linear1.weight": (1024, 256), "linear1.bias": (1024,),
         "linear2.weight": (256, 1024), "linear2.bias": (256,), "norm1.weight": (256,), "norm1.bias": (256,),
         "norm2.weight": (256,), "norm2.bias": (256,)}
WAN_DANCER = I2V | {
    "patch_embedding.weight": (5120, 36, 1, 2, 2), "patch_embedding_global.weight": (5120, 36, 1, 2, 2),
    "patch_embedding_global.bias": (5120,), "head_global.modulation": (1, 2, 5120),
    "head_global.head.weight": (64, 5120), "head_global.head.bias": (64,),
    **{name.replace("img_emb.", "img_emb_refimage."): shape for name, shape in I2V.items()
       if name.startswith("img_emb.")},
    "music_projection.weight": (256, 35), "music_projection.bias": (256,), **blocks("music_encoder.", 2, FUSED),
    "ref_conv.weight": (5120, 16, 2, 2), "ref_conv.bias": (5120,), **blocks("music_injector.injector.", 8, ATTENTION)}
WAN_FUN = I2V | {"patch_embedding.weight": (5120, 48, 1, 2, 2), "ref_conv.weight": (5120, 16, 2, 2),
                 "ref_conv.bias": (5120,)}
