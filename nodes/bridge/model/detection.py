"""What ComfyUI takes a checkpoint for: its model config, the dtypes that it would choose, and its own BaseModel, on the
meta device. Made by proxy_model.py.
"""

import torch
from accelerate import init_empty_weights

import comfy.model_detection
import comfy.model_management
import comfy.ops
import comfy.utils

from ....xdit_backend.checkpoints.quantisation.layer_formats import FLOAT8
from ....xdit_backend.checkpoints.quantisation.quantise_on_load import TYPES
from ....xdit_backend.protocol.errors import CheckpointError, UnsupportedError
from ....xdit_backend.protocol.shared_memory import dtype_name
from .custom_base_model import OwnConfig
from .diffusers_keys import marker_tensors_of, refuse_undetectable, under_comfyui_names
from .scheduler_config import apply_scheduler_config
from .state_dict import read_values

SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
                      "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
                      "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
WEIGHT_DTYPES = {"default": None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
                 "fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e4m3fn_fast": torch.float8_e4m3fn,
                 "fp8_e5m2": torch.float8_e5m2, **dict.fromkeys(TYPES)}
FAST = "fp8_e4m3fn_fast"                   # multiplied in that type, with inputs that are rounded, where a card can


class Detection:
    """ComfyUI's model config for a checkpoint, and the checkpoint's tensors on the meta device under ComfyUI's names.

    Raises CheckpointError for files that ComfyUI does not recognise, or takes for another model than they are.
    """

    def __init__(self, checkpoint, load_device):
        self._checkpoint, self._load_device = checkpoint, load_device
        # the last: the ModelType of a folder's scheduler; None of a file, and of a folder without one
        self._model_config, self._tensors, self._prediction = _detected(checkpoint)

    def dtypes(self, weight_dtype, is_quantised):
        """(storage, compute) dtypes as ComfyUI's own loader chooses them. In a quantised file, those of the weights
        that are not quantised."""
        supported, device = self._model_config.supported_inference_dtypes, self._load_device
        storage = WEIGHT_DTYPES[weight_dtype]
        if storage is None and is_quantised:
            storage = comfy.model_management.unet_manual_cast(None, device, supported)
            return storage, storage
        if storage is None:
            storage = comfy.model_management.unet_dtype(
                model_params=comfy.utils.calculate_parameters(self._tensors), supported_dtypes=list(supported),
                weight_dtype=comfy.utils.weight_dtype(self._tensors))
        return storage, comfy.model_management.unet_manual_cast(storage, device, supported) or storage

    def base_model(self, storage_dtype, compute_dtype):
        """ComfyUI's BaseModel. Raises UnsupportedError for a dtype that cannot hold the model's numbers."""
        family, device = self._checkpoint.family, self._load_device
        if dtype_name(compute_dtype) in family.unsupported_dtypes:
            raise UnsupportedError(f"Set weight_dtype to fp32, or to bf16 where the device has it: {family.name} has "
                                   f"numbers that {dtype_name(compute_dtype)} cannot hold, and {device} would "
                                   "compute in it.")
        self._model_config.set_inference_dtype(
            storage_dtype, None if storage_dtype == compute_dtype else compute_dtype, device=device)
        if not family.computes_as_made:
            return self._model_config.get_model(self._tensors, "", device="meta")
        with init_empty_weights():
            return self._model_config.get_model(self._tensors, "", device="cpu")

    def refuse_ignored(self, base_model, weight_sources):
        """Refuse what ComfyUI would ignore: the scheduler's prediction type, and scales of weights that belong to none
        of its linear layers and embeddings, such as the gate of experts. weight_sources: see state_dict.py."""
        checkpoint, prediction = self._checkpoint, self._prediction
        if prediction is not None and base_model.model_type != prediction:
            raise CheckpointError(f"Use another model: {checkpoint.name} is a model of {checkpoint.family.name} "
                                  f"whose scheduler says {prediction.name}, and ComfyUI samples such a model by "
                                  f"{base_model.model_type.name} only.")
        for name, sources in weight_sources().items() if checkpoint.layers else ():
            scaled = [source for source, _ in sources if source in checkpoint.layers]
            if not scaled:                                     # nor is all that a file has of the diffusion model
                continue
            module = base_model.diffusion_model.get_submodule(name.rpartition(".")[0])
            if not all(_heeds(module, checkpoint.layers[source]) for source in scaled):
                raise CheckpointError("Use the bf16, fp16, plain fp8 or GGUF file of the same model: "
                                      f"{checkpoint.name} has a scale for {scaled[0]}, which ComfyUI does not heed, "
                                      "so that what this file should draw is not clear.")


def _heeds(module, layer):
    """Does ComfyUI read the scales of a Layer that this module of its holds (comfy.ops.mixed_precision_ops)? Of an
    embedding it looks up numbers by row, and float8 by one scale."""
    if isinstance(module, torch.nn.Embedding):
        known = layer.format == "int8_tensorwise" or layer.format in FLOAT8.values() and layer.num_scales == 1
    else:
        known = isinstance(module, torch.nn.Linear)
    return known and isinstance(module, comfy.ops.CastWeightBiasOp)


def _detected(checkpoint):
    """See Detection's fields. The first is an OwnConfig of a family that ComfyUI has no model of."""
    tensors = {name: torch.empty(shape, dtype=SAFETENSORS_DTYPES.get(checkpoint.dtypes[name], torch.bfloat16),
                                 device="meta")
               for name, shape in checkpoint.shapes.items()}
    family, name = checkpoint.family, checkpoint.name
    if family.sampled:
        return OwnConfig(family, checkpoint.config), tensors, None
    # a diffusers folder: to the names that ComfyUI knows
    if checkpoint.folder_config is not None:
        tensors = under_comfyui_names(tensors, checkpoint) | marker_tensors_of(checkpoint)
        refuse_undetectable(tensors, checkpoint)
    tensors = tensors | read_values(checkpoint, family.values)
    missing = [needed for needed in family.needed_values if needed not in tensors]
    if missing:
        raise CheckpointError(f"Use the all-in-one checkpoint of {family.name}, as it is published: {name} lacks "
                              f"{missing[0]}, with which ComfyUI tells the model numbers.")
    model_config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=checkpoint.model_metadata)
    if model_config is None:
        raise CheckpointError(f"Use another file of this model: ComfyUI does not recognise {name} as a {family.name} "
                              "model.")
    uses_metadata = (bool(family.settings)
             or model_config.unet_config == comfy.model_detection.model_config_from_unet(tensors, "").unet_config)
    if checkpoint.metadata and not uses_metadata:
        raise CheckpointError(f"Use Load Diffusion Model: {name} says in its metadata that it differs from other "
                              f"{family.name} models, which xDiT would not heed.")
    return model_config, tensors, apply_scheduler_config(model_config, checkpoint)
