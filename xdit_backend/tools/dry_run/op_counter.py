"""Counts of kernels, floating-point operations, memory, communication and host waits of code on a CUDA device, taken at
torch's operators."""

import collections
import math
import os
import traceback
import weakref

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ...checkpoints.quantisation import kitchen_layers
from .host_scalars import KnownNumbers

# operators that launch no kernel: views, and uninitialised memory
NO_KERNELS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
              "split", "split_with_sizes", "as_strided", "detach", "alias", "unbind", "chunk", "unfold",
              "view_as_complex", "view_as_real", "_reshape_alias", "lift_fresh", "diagonal", "narrow", "empty",
              "new_empty", "empty_like", "empty_strided"}
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "_unique2", "unique_dim"}
# those of READS that return a number to the host, which a fake device does not have
ANSWERED = {"_local_scalar_dense", "equal", "is_nonzero"}
NEGATIONS = {"bitwise_not", "logical_not"}
ATTENTIONS = {"_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
              "_scaled_dot_product_cudnn_attention"}
PRODUCTS = {"_int_mm", "_scaled_mm_v2"}                   # 8-bit products, which torch's flop counter omits
INSIDE = {"int8_linear", "matmul"}                        # products inside comfy-kitchen, of inputs (..., in)
AS_NEEDED = {"to", "contiguous", "reshape", "numpy_T"}    # which may do nothing
BY_INDEX = {"index", "index_put", "index_put_"}          # which read a mask to count its true elements
# packages whose lines are reported: the pack, diffusers, and ComfyUI's models
OURS = f"{os.sep}xdit_backend{os.sep}", f"{os.sep}diffusers{os.sep}", f"{os.sep}comfy{os.sep}ldm{os.sep}"
HERE = os.path.dirname(os.path.abspath(__file__))
# torch's error messages for operands on different devices
MIXED = "two different devices", "at least two devices", "Device Propagation"


class DeviceWork(TorchDispatchMode):
    """While active, counts kernels, operations, bytes that kernels read and write, and allocated bytes.

    `resident_bytes` are those of tensors that exist, `peak_bytes` their maximum since `start_over`. Workspaces inside
    an operator and fragmentation are not counted. `flops` are of matrix products, convolutions and attention;
    `attention_flops` of attention alone. `sent_bytes` are sent by collectives, by the process groups' arguments.
    `waits`: lines at which the host waits for the device, by reading a value or by a synchronous copy. `mixed`: lines
    at which an operator gets tensors on different devices. Both are {text: count}.
    """

    def __init__(self, others=(), answer=1, num_experts=0):
        """others: tensors that do not count as allocated, such as weights. answer: the number that the host reads from
        a fake device if it does not follow from the host's values, such as the number of unmasked text tokens.
        num_experts: if a model routes tokens to experts, each of this many gets the same number of tokens."""
        super().__init__()
        self._answer, self._num_experts = answer, num_experts
        self.resident_bytes = 0
        self._num_users, self._users, self._known = collections.Counter(), {}, KnownNumbers()
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self.start_over()

    def start_over(self):
        """Reset the counts. Allocated tensors stay counted."""
        self.kernels = self.moved_bytes = self.flops = self.attention_flops = self.sent_bytes = 0
        self.peak_bytes = self.resident_bytes
        self.waits, self.mixed = collections.Counter(), collections.Counter()
        self.names = collections.Counter()                     # operators counted as kernels

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        inputs = tensors_in((args, kwargs))
        if any(map(is_traceable_wrapper_subclass, inputs)):     # comfy-kitchen's: count the operators on its components
            return NotImplemented
        if name in AS_NEEDED:
            with self:
                return func.decompose(*args, **kwargs)
        # packages wrap fake tensors in tensor subclasses of their own, which are on CUDA too
        is_fake = any(isinstance(tensor, FakeTensor) or tensor.is_cuda for tensor in inputs)
        if not is_fake and not _goes_to_cuda(kwargs):
            with unset_fake_temporarily():                     # tensors on the host keep their values
                return func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
        reads = name in READS or (name in BY_INDEX and any(_is_mask(index) for index in args[1]))
        if reads and any(tensor.is_cuda for tensor in inputs):
            self.waits[f"{name} at {line_at()}"] += 1
            if name in ANSWERED:
                return self._known.number(inputs, self._answer)
            func, args, kwargs = _as_if_all_were_true(func, args, kwargs)
        if name == "bincount" and self._num_experts:
            return self._even_counts(inputs[0])
        if name == "int8_linear" and not kitchen_layers.has_kernels():
            with self:
                return _int8_linear(*args, **kwargs)
        if name == "int8_linear":                              # its kernels allocate rounded inputs
            rounded = torch.empty_like(args[0], dtype=torch.int8)
            self._hold(rounded)
        made = self._known.follow(func, args, kwargs, lambda: self._run(func, args, kwargs, inputs))
        outputs = tensors_in(made)
        if name in ("_to_copy", "copy_"):
            self._note_copy(inputs, outputs, kwargs.get("non_blocking") or (name == "copy_" and args[2:] and args[2]))
        if name not in NO_KERNELS and func.namespace != "c10d" and any(tensor.is_cuda for tensor in outputs):
            self._note_kernel(func, args, kwargs, made, [*inputs, *outputs])
        if func.namespace == "c10d":
            self.sent_bytes += sent_bytes(name, args)
        for tensor in outputs:
            self._hold(tensor)
            if name in NEGATIONS:                              # of masks that are assumed to be true everywhere
                tensor.is_false = True
        return made

    def _even_counts(self, experts):
        """Tokens per expert, in equal numbers. The host waits for this copy. experts: the expert of each token."""
        self.kernels += 1
        self.waits[f"copy of {8 * self._num_experts} bytes at {line_at()}"] += 1
        ends = [experts.numel() * expert // self._num_experts for expert in range(self._num_experts + 1)]
        with unset_fake_temporarily():
            return torch.tensor(ends).diff()

    def _run(self, func, args, kwargs, inputs):
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not any(message in str(error) for message in MIXED):
                raise
        devices = " and ".join(sorted({str(tensor.device) for tensor in inputs}))
        self.mixed[f"{func.overloadpacket.__name__} of {devices} at {line_at()}"] += 1
        cuda = next(tensor.device for tensor in inputs if tensor.is_cuda)
        there = tree_map(lambda leaf: torch.empty_like(leaf, device=cuda) if torch.is_tensor(leaf) else leaf, args)
        return func(*there, **kwargs)

    def _note_copy(self, inputs, outputs, is_asynchronous):
        if not is_asynchronous and inputs[-1].numel() and {tensor.is_cuda for tensor in (*inputs, *outputs)} == {True,
                                                                                                               False}:
            self.waits[f"copy of {inputs[-1].nbytes} bytes at {line_at()}"] += 1

    def _note_kernel(self, func, args, kwargs, made, touched):
        name, counted = func.overloadpacket.__name__, flop_registry.get(func.overloadpacket)
        self.kernels += 1
        self.names[name] += 1
        self.moved_bytes += sum(tensor.nbytes for tensor in {id(each): each for each in touched}.values()
                                if tensor.is_cuda)
        if name in PRODUCTS:
            self.flops += flop_registry[torch.ops.aten.mm](*args[:2], out_val=made)
        elif name in INSIDE:
            self.flops += 2 * made.numel() * args[0].shape[-1]
        elif counted is not None:
            flops = counted(*args, **kwargs, out_val=made)
            self.flops += flops
            self.attention_flops += flops if name in ATTENTIONS else 0

    def _hold(self, tensor):
        if not tensor.is_cuda:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._others:
            return
        if not self._num_users[key]:
            self.resident_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        self._num_users[key] += 1
        # keyed by id, since weak references compare equal if their tensors do
        user = weakref.ref(tensor, lambda reference: self._let_go(reference, key, size))
        self._users[id(user)] = user

    def _let_go(self, reference, key, size):
        del self._users[id(reference)]
        self._num_users[key] -= 1
        if not self._num_users[key]:
            del self._num_users[key]
            self.resident_bytes -= size


def sent_bytes(name, args):
    """Bytes that a rank sends in one of torch's collectives, by its process group."""
    group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject)
                 and arg._type().qualified_name().endswith("ProcessGroup"))
    if name == "alltoall_base_":
        _, inputs, _, _, splits = args[:5]
        return (sum(splits) - splits[group.rank()]) * math.prod(inputs.shape[1:]) * inputs.element_size()
    inputs = tensors_in(args)[-1]
    if name in ("_allgather_base_", "allgather_"):
        return inputs.nbytes * (group.size() - 1)
    if name == "allreduce_":
        return 2 * (group.size() - 1) * inputs.numel() // group.size() * inputs.element_size()
    return inputs.nbytes if name == "send" else 0


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _int8_linear(tensor, weight, scale, bias, code, *options):
    """comfy-kitchen's 8-bit product, as computed without its kernels."""
    from comfy_kitchen.backends.eager.quantization import DTYPE_CODE_TO_DTYPE, int8_linear
    return int8_linear(tensor, weight, scale, bias, DTYPE_CODE_TO_DTYPE[code], *options)


def _is_mask(index):
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _as_if_all_were_true(func, args, kwargs):
    """Replace an operator whose result shape depends on values by one for a mask that is true everywhere."""
    name = func.overloadpacket.__name__
    if name == "nonzero":
        return torch.ops.aten.empty.memory_format, ((args[0].numel(), args[0].ndim),), {"dtype": torch.int64,
                                                                                       "device": args[0].device}
    if name == "masked_select":
        return torch.ops.aten.view.default, (args[0], (-1,)), {}
    if name not in BY_INDEX:
        return func, args, kwargs
    indices = []
    for index in args[1]:
        if _is_mask(index):
            count = 0 if hasattr(index, "is_false") else index.numel()
            indices += [torch.empty(count, dtype=torch.int64, device=index.device)] * index.ndim
        else:
            indices.append(index)
    return func, (args[0], indices, *args[2:]), kwargs


def _goes_to_cuda(kwargs):
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cuda"


def line_at():
    """The innermost running line of the pack, diffusers or ComfyUI's models: file, line and function."""
    frames = [frame for frame in traceback.extract_stack() if any(free_bytes in frame.filename for free_bytes in OURS)
              and os.path.dirname(frame.filename) != HERE]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].name}" if frames else "elsewhere"
