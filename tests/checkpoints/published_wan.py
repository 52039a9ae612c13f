"""Names and shapes of published files of Wan's kinds that ComfyUI's own modules take, by what they have beside those of
published_comfyui.py. Used by test_header.py."""

from tests.checkpoints.published_comfyui import WAN_CAMERA

# of 14 billion, from a picture
I2V = {name: shape for name, shape in WAN_CAMERA.items() if not name.startswith("control_adapter.")}
WAN_SCAIL = I2V | {"patch_embedding.weight": (5120, 20, 1, 2, 2), "patch_embedding_pose.weight": (5120, 20, 1, 2, 2),
                   "patch_embedding_pose.bias": (5120,)}
WAN_SCAIL2 = WAN_SCAIL | {"patch_embedding_mask.weight": (5120, 28, 1, 2, 2), "patch_embedding_mask.bias": (5120,)}
