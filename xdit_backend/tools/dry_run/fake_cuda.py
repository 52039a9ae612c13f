"""A fake CUDA device and fake process groups: tensors have the shapes of a real device's and no values. For processes
that run no worker."""

import contextlib
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.testing._internal.distributed.fake_pg import FakeStore

from ...autoencoders.vae_family import replaced
from ...distributed import mesh

CUDA = torch.device("cuda:0")
CAPABILITY = 8, 9                          # of an RTX 4090; attention backends are chosen by it
aten = torch.ops.aten


@contextmanager
def fake_cuda_device(free_bytes=0, capability=None):
    """Context in which tensors on CUDA are fake, without values, and gradients are off.

    free_bytes: of the device's memory. capability: of the device; None: CAPABILITY. Functions of torch are patched for
    the whole process until it exits.
    """
    with contextlib.ExitStack() as stack:
        for change in (
                # real tensors on the host can move to the device although there is none
                replaced(FakeTensorMode, avoid_device_init=property(lambda self: True, lambda self, value: None)),
                replaced(torch.Tensor, pin_memory=lambda self, *_: self),
                replaced(torch.cuda, Event=Event, get_device_capability=lambda device=None: capability or CAPABILITY,
                         mem_get_info=lambda device=None: (free_bytes, free_bytes)),
                replaced(torch.nn.functional, scaled_dot_product_attention=attention),
                torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True), CudaFunctions()):
            stack.enter_context(change)
        yield


@contextmanager
def fake_group(rank, world_size):
    """Context in which this process is one rank of world_size in NCCL groups. Received tensors have no values, and
    sends complete at once."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with (replaced(dist, get_backend=lambda group=None: "nccl"),
              replaced(mesh, group_options=lambda *_: None, can_split=lambda: False),
              replaced(torch.cuda, synchronize=lambda device=None: None),
              replaced(dist.Work, is_completed=lambda self: True)):
            yield
    finally:
        dist.destroy_process_group()


class Event:
    """torch.cuda.Event on a device that has finished all of its work."""

    def __init__(self, **_):
        pass

    def record(self, *_):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class CudaFunctions(TorchFunctionMode):
    """Replaces functions of torch that would query a real device, or have no fake implementation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (attention, ATTENTION):
            return _attention(*args, **(kwargs or {}))
        if func is torch.batch_norm_stats:
            return tuple(args[0].new_empty(args[0].shape[1], dtype=torch.float32) for _ in range(2))
        if getattr(func, "__name__", "") == "pad":             # torch looks it up again where a VAE replaces it
            func = torch._C._nn.pad
        return func(*args, **(kwargs or {}))


ATTENTION = torch.nn.functional.scaled_dot_product_attention


def attention(query, *args, **kwargs):
    """scaled_dot_product_attention that dispatches even where torch's function cannot be replaced."""
    if has_torch_function_unary(query):
        return handle_torch_function(attention, (query,), query, *args, **kwargs)
    return _attention(query, *args, **kwargs)


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **more):
    """Attention by the backend that torch chooses on such a device: FlashAttention in 16 bits without a mask, otherwise
    the memory-efficient kernel."""
    scale, repeats = more.get("scale"), query.shape[-3] // key.shape[-3]
    if more.get("enable_gqa") and repeats > 1:
        key, value = (each.repeat_interleave(repeats, -3) for each in (key, value))
    if query.ndim == 3:
        return _attention(query[None], key[None], value[None], attn_mask, scale=scale)[0]
    if attn_mask is None and query.dtype.itemsize == 2 and query.shape[-1] <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, is_causal=is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(query, key, value, attn_mask, False, is_causal=is_causal,
                                                        scale=scale)[0]
