"""Detection of a checkpoint by ComfyUI: its model config, the dtypes that ComfyUI would choose, and its BaseModel on
the meta device.
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
from ..compatibility.weight_creation import weights_at_construction
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
FAST = "fp8_e4m3fn_fast"                   # matrix products in that dtype, with rounded inputs, if the GPU supports it


class Detection:
    """ComfyUI's model config for a checkpoint, and the checkpoint's tensors on the meta device under ComfyUI's names.

    Raises CheckpointError for files that ComfyUI does not recognise or would take for another model.
    """

    def __init__(self, checkpoint, load_device):
        self._checkpoint, self._load_device = checkpoint, load_device
        # _prediction: ModelType of a folder's scheduler; None for a file, and for a folder without one
        self._model_config, self._tensors, self._prediction = _detected(checkpoint)

    def dtypes(self, weight_dtype, is_quantised):
        """Return the (storage, compute) dtypes that ComfyUI's own loader would choose; for a quantised file, those of
        the weights that are not quantised."""
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
        """Return ComfyUI's BaseModel. Raises UnsupportedError for a compute dtype with too small a range."""
        family, device = self._checkpoint.family, self._load_device
        if dtype_name(compute_dtype) in family.unsupported_dtypes:
            raise UnsupportedError(f"Set weight_dtype to fp32, or to bf16 if the device supports it: values of "
                                   f"{family.name} exceed the range of {dtype_name(compute_dtype)}, in which {device} "
                                   "would compute.")
        self._model_config.set_inference_dtype(
            storage_dtype, None if storage_dtype == compute_dtype else compute_dtype, device=device)
        with weights_at_construction():
            if not family.computes_as_made:
                return self._model_config.get_model(self._tensors, "", device="meta")
            with init_empty_weights():
                return self._model_config.get_model(self._tensors, "", device="cpu")

    def refuse_ignored(self, base_model, weight_sources):
        """Raise CheckpointError for what ComfyUI would ignore: the scheduler's prediction type, and scales of weights
        outside its linear layers and embeddings, such as the gate of experts. weight_sources: see state_dict.py."""
        checkpoint, prediction = self._checkpoint, self._prediction
        if prediction is not None and base_model.model_type != prediction:
            raise CheckpointError(f"Use another model: {checkpoint.name} is a {checkpoint.family.name} model whose "
                                  f"scheduler has the prediction type {prediction.name}, and ComfyUI supports only "
                                  f"{base_model.model_type.name} for it.")
        for name, sources in weight_sources().items() if checkpoint.layers else ():
            scaled = [source for source, _ in sources if source in checkpoint.layers]
            if not scaled:                                     # a file may lack tensors of the diffusion model
                continue
            module = base_model.diffusion_model.get_submodule(name.rpartition(".")[0])
            if not all(_reads_scales(module, checkpoint.layers[source]) for source in scaled):
                raise CheckpointError("Use the bf16, fp16, plain fp8 or GGUF file of the same model: "
                                      f"{checkpoint.name} has a scale for {scaled[0]}, which ComfyUI ignores, so that "
                                      "the intended weights are not clear.")


def _reads_scales(module, layer):
    """Whether ComfyUI's module reads the scales of a quantised Layer (comfy.ops.mixed_precision_ops). Embeddings
    are looked up by row in int8, and in float8 with one scale."""
    if isinstance(module, torch.nn.Embedding):
        known = layer.format == "int8_tensorwise" or layer.format in FLOAT8.values() and layer.num_scales == 1
    else:
        known = isinstance(module, torch.nn.Linear)
    return known and isinstance(module, comfy.ops.CastWeightBiasOp)


def _detected(checkpoint):
    """Return Detection's fields. The first is an OwnConfig for a family that ComfyUI has no model of."""
    tensors = {name: torch.empty(shape, dtype=SAFETENSORS_DTYPES.get(checkpoint.dtypes[name], torch.bfloat16),
                                 device="meta")
               for name, shape in checkpoint.shapes.items()}
    family, name = checkpoint.family, checkpoint.name
    if family.sampled:
        return OwnConfig(family, checkpoint.config), tensors, None
    # a diffusers folder: rename to ComfyUI's names
    if checkpoint.folder_config is not None:
        tensors = under_comfyui_names(tensors, checkpoint) | marker_tensors_of(checkpoint)
        refuse_undetectable(tensors, checkpoint)
    tensors = tensors | read_values(checkpoint, family.detection.values)
    missing = [needed for needed in family.detection.needed_values if needed not in tensors]
    if missing:
        raise CheckpointError(f"Use the all-in-one checkpoint of {family.name} as published: {name} lacks "
                              f"{missing[0]}, with which ComfyUI encodes numbers for the model.")
    model_config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=checkpoint.model_metadata)
    if model_config is None:
        raise CheckpointError(f"Use another file of this model: ComfyUI does not recognise {name} as a {family.name} "
                              "model.")
    uses_metadata = (bool(family.detection.settings or family.detection.described)
             or model_config.unet_config == comfy.model_detection.model_config_from_unet(tensors, "").unet_config)
    if checkpoint.metadata and not uses_metadata:
        raise CheckpointError(f"Use Load Diffusion Model: the metadata of {name} describes a variant of {family.name} "
                              "that xDiT does not support.")
    return model_config, tensors, apply_scheduler_config(model_config, checkpoint)
