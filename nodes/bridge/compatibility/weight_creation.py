"""Construction of ComfyUI's model classes with weights, also where its layers would create them later."""

from contextlib import contextmanager

import comfy.memory_management


@contextmanager
def weights_at_construction():
    """Context in which ComfyUI's linears and embeddings have weights from their construction on.

    With DynamicVRAM, the default on NVIDIA GPUs, they have none until a file is loaded. Models of the pack, on the meta
    device or of a small size, need names and shapes before that.
    """
    before = comfy.memory_management.aimdo_enabled
    comfy.memory_management.aimdo_enabled = False
    try:
        yield
    finally:
        comfy.memory_management.aimdo_enabled = before
