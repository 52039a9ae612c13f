"""VAE patcher: presents the encoder or decoder of a VAE on the workers to ComfyUI's memory manager."""

import dataclasses
import weakref

import comfy.model_management

from ....xdit_backend.planner.vae_cost import choose_ranks
from ....xdit_backend.protocol.shared_memory import dtype_name
from ..workers.remote_module import RemoteModule

CACHE = weakref.WeakKeyDictionary()        # first-stage model -> {(prefixes of its tensors' names, devices): VaeHalf}


def half_of(vae, prefixes, settings, client):
    """Return the cached VaeHalf with the tensors whose names have these prefixes, on a group's workers.
    settings: see AutoencoderSpec."""
    cached = CACHE.setdefault(vae.first_stage_model, {})
    half = cached.get((prefixes, client.devices))
    if half is None or half.client is not client:
        half = cached[prefixes, client.devices] = VaeHalf(vae, prefixes, settings, client)
    return half


class VaeHalf(RemoteModule):
    """Decoder or encoder of a VAE on the workers of a group."""

    def __init__(self, vae, prefixes, settings, client):
        self.dtype, self.settings, self._prefixes = dtype_name(vae.vae_dtype), settings, prefixes
        self.from_host = False                                 # whether weights are streamed from system RAM by layer
        super().__init__("vae", vae.first_stage_model, client, vae.vae_dtype)

    def weights(self):
        return {key: tensor for key, tensor in super().weights().items() if key.startswith(self._prefixes)}

    def make_ready(self, shape, scale, machine_for=lambda work: None):
        """Load this half on the workers, and have ComfyUI free memory for it and for the minimum of its activations.
        Returns the number of workers to split the work across, and the first of them.

        shape: of the tensor to decode (scale 1) or encode. The workers estimate memory with a model without weights, so
        the half must be loaded first. machine_for(Work of all items): Machine for estimating whether fewer workers, if
        they have the memory, are as fast as all; None: use all.
        """
        comfy.model_management.load_models_gpu([self.patcher])
        count, first = self._choose_ranks(shape, scale, machine_for)
        sharing = self.client.devices[first:first + count].count(str(self.patcher.load_device))
        needed_bytes = self.client.autoencoders.estimate(self.name, shape, scale, count)
        comfy.model_management.load_models_gpu([self.patcher], memory_required=needed_bytes * sharing)
        self._update_offload(needed_bytes, count, first)
        return count, first

    def _update_offload(self, needed_bytes, count, first):
        """Offload the weights to system RAM if they leave these workers too little memory, else make them resident."""
        free_bytes = self.client.autoencoders.free_bytes(count, first)
        if self.from_host == (needed_bytes + self.from_host * self._num_bytes > free_bytes):
            return
        self.unload()
        self.from_host = not self.from_host
        self.client.autoencoders.load(self)

    def _choose_ranks(self, shape, scale, machine_for):
        most = len(self.client.devices)
        if most == 1:
            return 1, 0
        work = self.client.autoencoders.work_of(self.name, shape, scale)
        machine = machine_for(dataclasses.replace(work, **{name: shape[0] * value
                                                           for name, value in vars(work).items()}))
        near = {} if machine is None else choose_ranks(work, machine, most)
        fits_unblocked = self.client.autoencoders.fits_unblocked
        return next((choice for choice in near if choice[0] == most
                     or fits_unblocked(self.name, shape, scale, *choice)),
                    (most, 0))

    # --- called by vram_accounting.py ---

    def load(self, meta_vae):
        self.hold()
        self.from_host = self._num_bytes > self.client.autoencoders.free_bytes(len(self.client.devices))
        self.client.autoencoders.load(self)
