"""Upscaler patcher: presents an UPSCALE_MODEL on the workers to ComfyUI's memory manager."""

import weakref

import torch

from ....xdit_backend.checkpoints.build_upscaler import NODE, facts_of
from ....xdit_backend.protocol.errors import UnsupportedError
from ..workers.remote_module import RemoteModule

CACHE = weakref.WeakKeyDictionary()        # module of an UPSCALE_MODEL -> {devices: RemoteUpscaler}


def remote_upscaler(upscale_model, client):
    """Return the cached RemoteUpscaler of an UPSCALE_MODEL on a group's workers. Raises like check_upscale_model."""
    check_upscale_model(upscale_model)
    cached = CACHE.setdefault(upscale_model.model, {})
    remote, facts = cached.get(client.devices), facts_of(upscale_model)
    if remote is None or remote.client is not client or remote.facts != facts:
        remote = cached[client.devices] = RemoteUpscaler(upscale_model.model, facts, client)
    return remote


def check_upscale_model(upscale_model):
    """Raise UnsupportedError for an UPSCALE_MODEL that ComfyUI's loader did not load, or that a node patches."""
    try:
        from spandrel import ImageModelDescriptor
    except ImportError as error:
        raise UnsupportedError(f"Install spandrel in ComfyUI's Python, which loads upscale models: {error}.") from error
    if not isinstance(upscale_model, ImageModelDescriptor) or not isinstance(upscale_model.model, torch.nn.Module):
        raise UnsupportedError(f"Use {NODE} for this upscale model, or connect Load Upscale Model: this is a "
                               f"{type(upscale_model).__name__}, and Distributed Upscale Image takes the image models "
                               "that spandrel loads.")
    patcher = getattr(upscale_model, "patcher", None)
    patched = [name for name in ("patches", "object_patches", "weight_wrapper_patches", "injections")
               if getattr(patcher, name, None)]
    if patched:
        raise UnsupportedError(f"Use {NODE} for this upscale model, or connect Load Upscale Model directly: a node "
                               f"patches it ({', '.join(patched)}), which Distributed Upscale Image does not support.")


class RemoteUpscaler(RemoteModule):
    """An upscale model on the workers of a group. facts: see build_upscaler."""

    def __init__(self, module, facts, client):
        self.facts = facts
        super().__init__("upscaler", module, client, torch.float32)

    def load(self, meta):
        self.hold()
        self.client.upscalers.load(self)
