"""What code asks of a CUDA device, counted on tensors that pretend to be on one: they have shapes, and no numbers.
Needs no GPU."""

import collections
import os
import traceback
import weakref
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda:0")
NO_KERNELS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
              "split",
              "split_with_sizes", "as_strided", "detach", "alias", "unbind", "chunk", "unfold", "view_as_complex",
              "view_as_real",
              "_reshape_alias", "lift_fresh", "diagonal", "narrow", "empty", "new_empty", "empty_like", "empty_strided"}
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero"}             # of numbers, by the host


class DeviceWork(TorchDispatchMode):
    """Kernels, bytes that they read and write, bytes that are held at most, and `waits`:
    where the host waits for the device."""

    def __init__(self, others=()):
        """others: tensors whose bytes are not counted among those held."""
        super().__init__()
        self.kernels = self.moved_bytes = self.resident_bytes = self.peak_bytes = 0
        self.waits, self._storages, self._others = [], collections.Counter(), {
            tensor.untyped_storage()._cdata for tensor in others}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = _tensors((args, kwargs))
        if name in READS and any(tensor.is_cuda for tensor in given):
            self.waits.append(f"{name} at {_line()}")
            if name in ("_local_scalar_dense", "equal"):
                return 1
        made = func(*args, **kwargs)
        outputs = _tensors(made)
        is_copy = name in ("_to_copy", "copy_") and {tensor.is_cuda for tensor in (*given, *outputs)} == {True, False}
        if is_copy and not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
            self.waits.append(f"copy of {given[-1].nbytes} bytes at {_line()}")
        if any(tensor.is_cuda for tensor in outputs) and name not in NO_KERNELS and func.namespace == "aten":
            self.kernels += 1
            self.moved_bytes += sum(tensor.nbytes for tensor in {id(each): each for each in (*given, *outputs)}.values()
                                    if tensor.is_cuda)
        for tensor in outputs:
            self._hold(tensor)
        return made

    def _hold(self, tensor):
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not tensor.is_cuda or key in self._others:
            return
        if not self._storages[key]:
            self.resident_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        self._storages[key] += 1
        weakref.finalize(tensor, self._let_go, key, size).atexit = False

    def _let_go(self, key, size):
        self._storages[key] -= 1
        if not self._storages[key]:
            del self._storages[key]
            self.resident_bytes -= size


@contextmanager
def fake_cuda_device(monkeypatch):
    """A device without numbers, under no_grad. Gives a function that runs a call and returns its DeviceWork,
    without what it is given."""
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", property(lambda self: True, lambda self, value: None))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)

    def work_of(call, *args, **kwargs):
        work = DeviceWork(_tensors((args, kwargs)))
        with work:
            call(*args, **kwargs)
        return work
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        yield work_of


def _tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _line():
    """The innermost line of the pack, of diffusers or of ComfyUI's models."""
    frames = [frame for frame in traceback.extract_stack()
              if any(free_bytes in frame.filename for free_bytes in ("xdit_backend", "diffusers", "comfy/ldm"))]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].name}" if frames else "a test"


def move(model):
    """Have a model's parameters and buffers on the pretended device, under fake_cuda_device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(
                    torch.empty(parameter.shape, dtype=parameter.dtype, device=CUDA), False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)
