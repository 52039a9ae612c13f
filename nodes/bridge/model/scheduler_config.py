"""Scheduler config of a diffusers folder's U-Net, applied to ComfyUI's sampling."""

import re

import comfy.latent_formats
import comfy.supported_models
from comfy.model_base import ModelType

from ....xdit_backend.protocol.errors import CheckpointError

# ComfyUI's sampling of U-Nets, in the terms of diffusers' schedulers
DISCRETE = {"prediction_type": ("epsilon", "v_prediction"), "beta_schedule": ("scaled_linear",),
            "num_train_timesteps": (1000,), "trained_betas": (None,)}
CONTINUOUS = {"prediction_type": ("epsilon", "v_prediction")}


def apply_scheduler_config(model_config, checkpoint):
    """Have ComfyUI sample a folder's U-Net according to its scheduler config; single files are detected by tensors.

    Returns the ModelType, or None if the folder has no scheduler. Raises CheckpointError for a scheduler that ComfyUI
    does not have.
    """
    config = checkpoint.folder and checkpoint.folder_config is None and checkpoint.folder.other_configs.get("scheduler")
    if not config:
        return None
    scheduler, settings = str(config.get("_class_name")), model_config.sampling_settings
    is_edm = "EDM" in scheduler and isinstance(model_config, comfy.supported_models.SDXL)
    discrete = DISCRETE | {f"beta_{end}": (settings.get(f"linear_{end}", usual),)
                           for end, usual in (("start", 0.00085), ("end", 0.012))}
    for key, values in (CONTINUOUS if is_edm else discrete).items():
        if config.get(key, values[0]) not in values or not is_edm and re.search("EDM|Flow", scheduler):
            raise CheckpointError(f"Use another model: {checkpoint.name} needs the sampling of its "
                                  f"scheduler_config.json ({scheduler}, {key} = {config.get(key)!r}), which ComfyUI "
                                  "does not have for such models.")
    is_velocity = config.get("prediction_type") == "v_prediction"
    if is_edm:
        settings |= {"sigma_data": 1.0 if is_velocity else 0.5, "sigma_max": config.get("sigma_max", 80.0),
                     "sigma_min": config.get("sigma_min", 0.002)}
        type_ = ModelType.V_PREDICTION_EDM if is_velocity else ModelType.EDM
        if not is_velocity:                                    # Playground 2.5, whose latent format ComfyUI has
            model_config.latent_format = comfy.latent_formats.SDXL_Playground_2_5()
    else:
        settings["zsnr"] = bool(config.get("rescale_betas_zero_snr"))
        type_ = ModelType.V_PREDICTION if is_velocity else ModelType.EPS
    model_config.model_type = lambda state_dict, prefix="": type_
    return type_
