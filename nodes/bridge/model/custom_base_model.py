"""Custom BaseModel for a family that ComfyUI has no model of, as the family's file describes it."""

import torch

import comfy.conds
import comfy.latent_formats
import comfy.model_base
import comfy.model_management
from comfy.supported_models_base import BASE

from ....xdit_backend.checkpoints.build_transformer import build


class OwnModel(comfy.model_base.HiDream):
    """BaseModel that is a HiDream by class only, so that ComfyUI's LoRA loader accepts diffusers' tensor names
    ("transformer."...)."""

    encode_adm = comfy.model_base.BaseModel.encode_adm

    def __init__(self, *arguments):
        comfy.model_base.BaseModel.__init__(self, *arguments)

    def extra_conds(self, **inputs):
        """BaseModel's extra_conds, with the text's attention mask if its text encoder provides one and the family
        reads it."""
        made, mask = comfy.model_base.BaseModel.extra_conds(self, **inputs), inputs.get("attention_mask")
        if mask is not None and "attention_mask" in self.remote.family.inputs.conditioning:
            made["attention_mask"] = comfy.conds.CONDRegular(mask)
        return made


class OwnConfig(BASE):
    """Counterpart of the config that ComfyUI's detection returns for the families that it knows.
    transformer_config: arguments of the diffusers class."""

    def __init__(self, family, transformer_config):
        self._family, self._transformer_config = family, transformer_config
        sampled = family.sampled
        self.sampling_settings, self.memory_usage_factor = sampled.settings, sampled.memory
        self.latent_format = type(family.name, (getattr(comfy.latent_formats, sampled.latent_format),), sampled.latent)
        super().__init__({"image_model": family.name, "disable_unet_model_creation": True})

    def get_model(self, state_dict, prefix="", device=None):
        """Return the BaseModel with diffusers' model as its diffusion model, without weights."""
        base_model = OwnModel(self, comfy.model_base.ModelType[self._family.sampled.prediction], device)
        with torch.device("meta"):
            module = build(self._family, self._transformer_config)
        torch.nn.Module.to(module, self.unet_config["dtype"])  # diffusers' own method logs a warning
        base_model.diffusion_model = module.requires_grad_(False).eval()
        comfy.model_management.archive_model_dtypes(module)
        return base_model
