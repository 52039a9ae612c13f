"""Check of a MODEL before a run: Load xDiT Model's checks of the file, and those of the patches that a node makes, on
ComfyUI's model without workers or weights."""

import functools
import logging
from types import SimpleNamespace

import torch

import comfy.latent_formats
import comfy.sd
import comfy.utils

from ....xdit_backend.checkpoints.quantisation.quantise_on_load import quantisation_of
from ....xdit_backend.config import ParallelConfig
from ....xdit_backend.protocol.errors import XDiTError
from ....xdit_backend.protocol.shared_memory import dtype_name
from ..compatibility.block_patches import refuse_patches, refuse_random_merges
from ..compatibility.comfyui_version import check_model_type
from ..compatibility.forward_patches import ForwardPatches
from ..compatibility.model_options import any_family, refuse_described, refuse_model_options, refuse_patcher
from ..compatibility.proxy_modules import PULID_FLUX, remember_modules
from ..compatibility.refused_nodes import message_of_node
from ..workers.vram_accounting import load_device_of
from ..workers.worker_groups import check_packages, devices_of
from .checkpoint_cache import CHECKPOINTS
from .detection import WEIGHT_DTYPES, Detection
from .model_patcher import ProxyPatcher
from .state_dict import weight_sources

log = logging.getLogger(__name__)

# types of inputs whose nodes patch the model at each call -> description in the message of a run
REFUSED_INPUTS = {"GLIGEN": "model patches (middle_patch)", "PULIDFLUX": PULID_FLUX}
# the same of nodes that need another file to be executed
PATCHES = {"SUPIRApply": "model patches (middle_block_after_patch, output_block_patch, forward_timestep_embed_patch)"}
MODULES = "diffusion_model"                # object patches under this name depend on the real model


class CheckedModel:
    """ComfyUI's model of a file on the meta device, and checks of what nodes do to it.

    path: None for a file that is not on this machine; nodes then patch a model without blocks. weight_dtype: the
    loader's. Raises the errors of Load xDiT Model.
    """

    def __init__(self, path=None, weight_dtype="default"):
        self.checkpoint, self._device = None, torch.device("cpu")
        dtypes, self._model = (torch.float32, torch.float32), None
        if path is not None:
            dtypes = self._load(path, weight_dtype if weight_dtype in WEIGHT_DTYPES else "default")
        self._has_modules = self._model is not None
        self._model = self._model or _model_without_blocks()
        storage_dtype, compute_dtype = map(dtype_name, dtypes)
        self._model.remote = SimpleNamespace(
            family=self._family, load_device=self._device, bytes_on=lambda device: 0,
            modules=remember_modules(self._model.diffusion_model), forwards=ForwardPatches(),
            spec=SimpleNamespace(storage_dtype=storage_dtype, compute_dtype=compute_dtype, quantisation=""))

    def _load(self, path, weight_dtype):
        """Check the file as load_proxy does. Returns its (storage, compute) dtypes."""
        check_packages()
        self.checkpoint = checkpoint = CHECKPOINTS.open(path)
        family, quantisation = checkpoint.family, quantisation_of(weight_dtype, checkpoint)
        self._device = load_device_of(devices_of(ParallelConfig()))
        detection = Detection(checkpoint, self._device)
        dtypes = detection.dtypes(weight_dtype, bool(checkpoint.quantised or quantisation))
        if not family.computes_as_made:    # those are created with a change to all modules, also of a prompt that runs
            self._model = detection.base_model(*dtypes)
            detection.refuse_ignored(self._model, functools.partial(weight_sources, checkpoint, self._model))
            check_model_type(family, self._model)
        return dtypes

    @property
    def _family(self):
        return any_family() if self.checkpoint is None else self.checkpoint.family

    def patcher(self):
        return ProxyPatcher(self._model, self._device, self._device)

    def patched_by(self, node, values, name):
        """The MODEL that a node returns; None if it needs more than this model. node: its function, with the MODEL
        as the argument `name`. values: its other arguments."""
        try:
            with torch.inference_mode():
                result = node(**values, **{name: self.patcher()})
        except Exception as error:  # noqa: BLE001 - a node may raise anything on a model without weights
            log.debug("%s was not checked before the run: %s", node.__qualname__, error)
            return None
        patcher = (result if isinstance(result, tuple) else result.args)[0]
        depends = any(key.startswith(MODULES) for key in patcher.object_patches)
        return patcher if self._has_modules or not depends else None

    def refusal_of(self, patcher):
        """Message with which a run rejects a patched MODEL when it begins or, if the file is here, at its first call;
        None if it does not."""
        def check():
            options = patcher.model_options["transformer_options"]
            refuse_patcher(patcher)
            refuse_random_merges(options)
            if self.checkpoint is not None:
                refuse_patches(self.checkpoint.family, self.checkpoint.config, options)
        return message_of(check)

    def refusal_of_options(self, transformer_options):
        """Message with which a run rejects these options of a call, or None."""
        return message_of(refuse_model_options, {"transformer_options": transformer_options}, self._family)

    def refusal_of_lora(self, path, strength):
        """Message with which a run rejects a LoRA's file of which no tensor fits the model; None otherwise, also if one
        of the files is not here or the LoRA's cannot be read. path, strength: None if unknown."""
        if not (self._has_modules and path and strength):
            return None
        try:
            lora = comfy.utils.load_torch_file(path, safe_load=True)
        except Exception as error:  # noqa: BLE001 - safetensors and torch raise many for a damaged file
            log.debug("%s was not checked before the run: %s", path, error)
            return None
        return message_of(comfy.sd.load_lora_for_models, self.patcher(), None, lora, strength, 0)

    def is_changed(self, patcher):
        """Whether a node has changed the MODEL at all."""
        return _changes_of(patcher) != _changes_of(self.patcher())


def refusal_of_node(class_type):
    """Message with which a run rejects the patches of a node that the check does not execute, or None."""
    if class_type in PATCHES:
        return message_of(refuse_described, PATCHES[class_type])
    return message_of_node(class_type)


def refusal_of_input(type_):
    """Message with which a run rejects what a node with an input of this type does to a MODEL, or None."""
    return message_of(refuse_described, REFUSED_INPUTS[type_]) if type_ in REFUSED_INPUTS else None


def message_of(check, *args):
    """The message of an XDiTError that check(*args) raises, or None."""
    try:
        check(*args)
    except XDiTError as error:
        return str(error)


def _changes_of(patcher):
    return [getattr(patcher, name) for name in ("model_options", "object_patches", "patches", "wrappers", "callbacks",
                                                "injections", "attachments", "additional_models", "hook_patches")]


def _model_without_blocks():
    model = torch.nn.Module()
    model.diffusion_model = torch.nn.Module()
    model.model_config = SimpleNamespace(manual_cast_dtype=None, sampling_settings={}, unet_config={})
    model.latent_format, model.manual_cast_dtype = comfy.latent_formats.LatentFormat(), None
    return model
