"""The half of a VAE that is on the workers, as ComfyUI's memory manager knows it: its size, how it comes and how it goes.

Used by autoencoder.py. The weights themselves stay in the VAE object, and are sent when the workers lack them.
"""

import uuid
import weakref

import torch

import comfy.model_management

from ...xdit_backend.protocol.segments import dtype_name
from .patcher import ShellPatcher

HALVES = weakref.WeakKeyDictionary()       # first-stage model -> {prefixes of the tensors' names: VaeHalf}


def half_of(vae, prefixes, settings):
    """The VaeHalf with the tensors whose names have these prefixes, made when it is first needed.

    settings: what the tensors do not tell of the VAE, see AutoencoderSpec.
    """
    halves = HALVES.setdefault(vae.first_stage_model, {})
    if prefixes not in halves:
        halves[prefixes] = VaeHalf(vae, prefixes, settings)
    return halves[prefixes]


class VaeHalf:
    """The decoder or encoder of a VAE. ShellPatcher asks it to load and unload."""

    def __init__(self, vae, prefixes, settings):
        self.name = f"vae-{uuid.uuid4().hex[:8]}"
        self.dtype, self.settings = dtype_name(vae.vae_dtype), settings
        self._model, self._prefixes, self._client = weakref.ref(vae.first_stage_model), prefixes, None
        self._patcher = ShellPatcher(Outline(self, vae.vae_dtype), comfy.model_management.get_torch_device(),
                                     comfy.model_management.unet_offload_device())

    def weights(self):
        """The tensors, where the VAE object has them."""
        return {key: tensor for key, tensor in self._model().state_dict().items() if key.startswith(self._prefixes)}

    def use_on(self, client, needed_bytes):
        """Have the workers hold this half, and ComfyUI unload what is in the way of it and of its work."""
        self._client = client
        known = {half.name for halves in HALVES.values() for half in halves.values()}
        for name in client.autoencoder_names:                  # of VAE objects that are gone
            if name not in known:
                client.drop(name)
        comfy.model_management.load_models_gpu([self._patcher], memory_required=needed_bytes)

    # --- what ShellPatcher asks ---

    def load(self, outline):
        self._client.load_autoencoder(self.name, self.dtype, self.weights, self.settings)

    def unload(self):
        self._client.drop(self.name)

    def end_run(self):
        pass


class Outline(torch.nn.Module):
    """Tensors without bytes, by which the memory manager sees how large a half is."""

    def __init__(self, half, dtype):
        super().__init__()
        self.remote = half
        for index, tensor in enumerate(half.weights().values()):
            self.register_buffer(f"tensor{index}", torch.empty(tensor.shape, dtype=dtype, device="meta"))

    def _apply(self, function, recurse=True):
        return self                                            # .to(device) of tensors without bytes would raise
