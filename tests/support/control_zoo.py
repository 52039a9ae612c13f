"""Small random ControlNets for the tiny models of the tests, as files of the formats that are published.

Those of U-Nets are written from ComfyUI's class, in the format of their publisher; those of transformers from
diffusers' classes, whose names the published files have.
"""

import importlib

import torch
from safetensors.torch import save_file

from tests.support.tiny_checkpoints import SEED, families, fill

# name: kind of the model, "module:class", its arguments; a function of those of the model's class where they are like
# these
CONTROLNETS = {
    "sd15": ("sd15", "comfy.cldm.cldm:ControlNet",
             lambda model: _without(model, "out_channels") | {"hint_channels": 3}),
    "sdxl": ("sdxl", "comfy.cldm.cldm:ControlNet",
             lambda model: _without(model, "out_channels") | {"hint_channels": 3}),
    "sdxl-lora": ("sdxl", "comfy.cldm.cldm:ControlNet",
                  lambda model: _without(model, "out_channels") | {"hint_channels": 3}),
    "sd15-t2i": ("sd15-blocks", "comfy.t2i_adapter.adapter:Adapter", {
        "channels": [32, 64, 128, 128], "nums_rb": 2, "cin": 192, "ksize": 1, "sk": True, "use_conv": False,
        "xl": False}),
    "sdxl-t2i": ("sdxl-blocks", "comfy.t2i_adapter.adapter:Adapter", {
        "channels": [32, 64, 128, 128], "nums_rb": 2, "cin": 768, "ksize": 1, "sk": True, "use_conv": False,
        "xl": True}),
    "sd3-instantx": ("sd3", "diffusers:SD3ControlNetModel", {
        "patch_size": 2, "in_channels": 16, "num_layers": 3, "attention_head_dim": 64, "num_attention_heads": 4,
        "joint_attention_dim": 96,
        "caption_projection_dim": 256, "pooled_projection_dim": 64, "out_channels": 16, "pos_embed_max_size": 64,
        "extra_conditioning_channels": 0}),
    "sd35-stability": ("sd35-large", "comfy.cldm.dit_embedder:ControlNetEmbedder", {
        "img_size": None, "patch_size": 2, "in_chans": 16, "num_layers": 2, "main_model_double": 4,
        "double_y_emb": False, "attention_head_dim": 64, "num_attention_heads": 4, "adm_in_channels": 2048}),
    "flux-instantx": ("flux", "diffusers:FluxControlNetModel", {
        "patch_size": 1, "in_channels": 64, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128,
        "num_attention_heads": 2,
        "joint_attention_dim": 64, "pooled_projection_dim": 32, "guidance_embeds": True, "axes_dims_rope": [16, 56, 56],
        "num_mode": 3}),
    "flux-xlabs": ("flux", "comfy.ldm.flux.controlnet:ControlNetFlux",
                   lambda model: model | {"depth": 2, "depth_single_blocks": 0}),
    "qwen-instantx": ("qwen-image", "diffusers:QwenImageControlNetModel", {
        "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 3, "attention_head_dim": 32,
        "num_attention_heads": 4, "joint_attention_dim": 64, "axes_dims_rope": (4, 14, 14)}),
    "qwen-inpaint": ("qwen-image", "diffusers:QwenImageControlNetModel", {
        "patch_size": 2, "in_channels": 64, "out_channels": 16, "num_layers": 3, "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 64, "axes_dims_rope": (4, 14, 14), "extra_condition_channels": 4}),
    "qwen-fun": ("qwen-image", "comfy.ldm.qwen_image.controlnet:QwenImageFunControlNetModel", {
        "inner_dim": 128, "num_attention_heads": 4, "attention_head_dim": 32})}


def save_controlnet(name, path):
    """Write a ControlNet's file."""
    kind, place, arguments = CONTROLNETS[name]
    module, _, cls = place.partition(":")
    if callable(arguments):
        arguments = arguments(families()[kind].testing.arguments)
    if module not in ("diffusers", "comfy.t2i_adapter.adapter"):
        import comfy.ops
        arguments = arguments | {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}
    net = getattr(importlib.import_module(module), cls)(**arguments)
    with torch.no_grad():
        fill(net, torch.Generator().manual_seed(SEED))
    tensors = {key: tensor.contiguous() for key, tensor in net.state_dict().items()}
    if name == "flux-xlabs":                                   # files say .scale where ComfyUI's module says .weight
        tensors = {key.replace("_norm.weight", "_norm.scale") if "norm." in key else key: tensor
                   for key, tensor in tensors.items()}
    if name == "sd35-stability":                               # which has the model's own
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith("x_embedder.")}
    if name == "sdxl-lora":
        tensors = _as_lora(tensors)
    save_file(tensors, str(path))


def _as_lora(tensors, rank=4):
    """A Control-LoRA's: of what the U-Net has too, the matrices as two factors, of the others every second one."""
    own, generator = ("zero_convs.", "input_hint_block.", "middle_block_out."), torch.Generator().manual_seed(SEED)
    found = {"lora_controlnet": torch.zeros(0)}
    for number, (key, tensor) in enumerate(tensors.items()):
        if key.startswith(own) or tensor.dim() < 2 and number % 2:
            found[key] = tensor
        elif tensor.dim() >= 2:
            place = key.removesuffix(".weight")
            found[f"{place}.up"] = 0.1 * torch.randn(len(tensor), rank, *[1] * (tensor.dim() - 2), generator=generator)
            found[f"{place}.down"] = 0.1 * torch.randn(rank, *tensor.shape[1:], generator=generator)
    return found


def _without(arguments, name):
    return {key: value for key, value in arguments.items() if key != name}


def residuals(family, config, seed=3, strength=0.3):
    """A ControlNet, as ComfyUI's samplers take one, that adds to every block of a family: of each noise level and
    latent something else.

    Some places have nothing, and two have the same.
    """
    from comfy.controlnet import ControlBase

    class Residuals(ControlBase):
        def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
            lists, generator = {"input": [], "middle": [], "output": []}, torch.Generator().manual_seed(seed)
            scale = strength * (1 + x_noisy.flatten(1).mean(1))
            for place, shape in family.control_shapes(config, x_noisy.shape).items():
                name, _, number = place.partition(".")
                added = torch.randn(1, *shape, generator=generator) * scale.view(-1, *[1] * len(shape))
                lists[name].append(None if number == "2" else lists[name][0] if number == "3"
                                   and family.plan.is_unet is False else added)
            if family.plan.is_unet:                                 # which takes them from the end
                lists["input"].reverse()
            previous = self.previous_controlnet
            return self.control_merge(lists, previous
                                      and previous.get_control(x_noisy, t, cond, batched_number, transformer_options),
                                      None)
    return Residuals()
