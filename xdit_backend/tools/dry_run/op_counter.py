"""What code asks of a CUDA device, counted at torch's operators. Used by simulated_rank.py on pretended devices, and by
tests."""

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

# operators that launch nothing: views, and memory that is not filled
NO_KERNELS = {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze",
              "split", "split_with_sizes", "as_strided", "detach", "alias", "unbind", "chunk", "unfold",
              "view_as_complex", "view_as_real", "_reshape_alias", "lift_fresh", "diagonal", "narrow", "empty",
              "new_empty", "empty_like", "empty_strided"}
READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "_unique2", "unique_dim"}
# of READS, those that hand the host a number, which a pretended device does not have
ANSWERED = {"_local_scalar_dense", "equal", "is_nonzero"}
NEGATIONS = {"bitwise_not", "logical_not"}
ATTENTIONS = {"_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
              "_scaled_dot_product_cudnn_attention"}
PRODUCTS = {"_int_mm", "_scaled_mm_v2"}                   # in 8 bits, which torch does not count
INSIDE = {"int8_linear", "matmul"}                        # products within comfy-kitchen, of inputs (..., in)
AS_NEEDED = {"to", "contiguous", "reshape", "numpy_T"}    # which do something, or nothing
BY_PLACES = {"index", "index_put", "index_put_"}          # which read a mask to know how many places it has
# where lines are looked for: the pack, diffusers, and ComfyUI's models
OURS = f"{os.sep}xdit_backend{os.sep}", f"{os.sep}diffusers{os.sep}", f"{os.sep}comfy{os.sep}ldm{os.sep}"
HERE = os.path.dirname(os.path.abspath(__file__))
# torch's words for operands on unlike devices
MIXED = "two different devices", "at least two devices", "Device Propagation"


class DeviceWork(TorchDispatchMode):
    """While active, counts kernels, operations, bytes that kernels read and write, and bytes that are held.

    `held_bytes` are those of the tensors that live, `peak_bytes` the most of them since `start_over`. Not counted are
    workspaces that an operator uses inside, and what allocators lose. `flops` are of matrix products, convolutions and
    attention, `attention_flops` those of attention among them. `sent_bytes` are what exchanges send, as their process
    groups say. `waits`: each line at which the host waits for the
    device, which are readings of its numbers and copies that are not asynchronous. `mixed`: each line at which an
    operator is given tensors on unlike devices. Both are {text: how often}.
    """

    def __init__(self, others=(), answer=1, num_experts=0):
        """others: tensors whose bytes are not counted among those held, such as weights. answer: what the host is told
        where it reads a number of a pretended device that does not follow from the host's, such as how many tokens of a
        text are not masked. num_experts:
        as many take the same number of tokens each, where a model has experts that tokens are sent to."""
        super().__init__()
        self._answer, self._num_experts = answer, num_experts
        self.resident_bytes = 0
        self._num_users, self._users, self._known = collections.Counter(), {}, KnownNumbers()
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self.start_over()

    def start_over(self):
        """Count from here on; what is held stays so."""
        self.kernels = self.moved_bytes = self.flops = self.attention_flops = self.sent_bytes = 0
        self.peak_bytes = self.resident_bytes
        self.waits, self.mixed = collections.Counter(), collections.Counter()
        self.names = collections.Counter()                     # of the operators that are kernels

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = tensors_in((args, kwargs))
        if any(map(is_traceable_wrapper_subclass, given)):     # comfy-kitchen's: what it does with those it is made of
            return NotImplemented
        if name in AS_NEEDED:
            with self:
                return func.decompose(*args, **kwargs)
        # packages hold pretended tensors in tensors of their own, which are on CUDA too
        is_fake = any(isinstance(tensor, FakeTensor) or tensor.is_cuda for tensor in given)
        if not is_fake and not _goes_to_cuda(kwargs):
            with unset_fake_temporarily():                     # the host's own numbers stay numbers
                return func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
        reads = name in READS or (name in BY_PLACES and any(_is_mask(place) for place in args[1]))
        if reads and any(tensor.is_cuda for tensor in given):
            self.waits[f"{name} at {line_at()}"] += 1
            if name in ANSWERED:
                return self._known.number(given, self._answer)
            func, args, kwargs = _as_if_all_were_true(func, args, kwargs)
        if name == "bincount" and self._num_experts:
            return self._even_counts(given[0])
        if name == "int8_linear" and not kitchen_layers.has_kernels():
            with self:
                return _int8_linear(*args, **kwargs)
        if name == "int8_linear":                              # whose kernels round its inputs, and hold them meanwhile
            rounded = torch.empty_like(args[0], dtype=torch.int8)
            self._hold(rounded)
        made = self._known.follow(func, args, kwargs, lambda: self._run(func, args, kwargs, given))
        outputs = tensors_in(made)
        if name in ("_to_copy", "copy_"):
            self._note_copy(given, outputs, kwargs.get("non_blocking") or (name == "copy_" and args[2:] and args[2]))
        if name not in NO_KERNELS and func.namespace != "c10d" and any(tensor.is_cuda for tensor in outputs):
            self._note_kernel(func, args, kwargs, made, [*given, *outputs])
        if func.namespace == "c10d":
            self.sent_bytes += sent_bytes(name, args)
        for tensor in outputs:
            self._hold(tensor)
            if name in NEGATIONS:                              # of what is taken to be true everywhere
                tensor.is_false = True
        return made

    def _even_counts(self, places):
        """How many tokens go to each expert, as the host then knows, which waits for it. places: the expert of each."""
        self.kernels += 1
        self.waits[f"copy of {8 * self._num_experts} bytes at {line_at()}"] += 1
        ends = [places.numel() * expert // self._num_experts for expert in range(self._num_experts + 1)]
        with unset_fake_temporarily():
            return torch.tensor(ends).diff()

    def _run(self, func, args, kwargs, given):
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not any(words in str(error) for words in MIXED):
                raise
        devices = " and ".join(sorted({str(tensor.device) for tensor in given}))
        self.mixed[f"{func.overloadpacket.__name__} of {devices} at {line_at()}"] += 1
        cuda = next(tensor.device for tensor in given if tensor.is_cuda)
        there = tree_map(lambda leaf: torch.empty_like(leaf, device=cuda) if torch.is_tensor(leaf) else leaf, args)
        return func(*there, **kwargs)

    def _note_copy(self, given, outputs, is_asynchronous):
        if not is_asynchronous and given[-1].numel() and {tensor.is_cuda for tensor in (*given, *outputs)} == {True,
                                                                                                               False}:
            self.waits[f"copy of {given[-1].nbytes} bytes at {line_at()}"] += 1

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
        # by its number, since weak references are compared as what they refer to
        user = weakref.ref(tensor, lambda reference: self._let_go(reference, key, size))
        self._users[id(user)] = user

    def _let_go(self, reference, key, size):
        del self._users[id(reference)]
        self._num_users[key] -= 1
        if not self._num_users[key]:
            del self._num_users[key]
            self.resident_bytes -= size


def sent_bytes(name, args):
    """What a rank sends in one of torch's exchanges, by the group that it is given."""
    group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject)
                 and arg._type().qualified_name().endswith("ProcessGroup"))
    if name == "alltoall_base_":
        _, given, _, _, parts = args[:5]
        return (sum(parts) - parts[group.rank()]) * math.prod(given.shape[1:]) * given.element_size()
    given = tensors_in(args)[-1]
    if name in ("_allgather_base_", "allgather_"):
        return given.nbytes * (group.size() - 1)
    if name == "allreduce_":
        return 2 * (group.size() - 1) * given.numel() // group.size() * given.element_size()
    return given.nbytes if name == "send" else 0


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _int8_linear(tensor, weight, scale, bias, code, *options):
    """comfy-kitchen's product in 8 bits, as it computes it without kernels of its own."""
    from comfy_kitchen.backends.eager.quantization import DTYPE_CODE_TO_DTYPE, int8_linear
    return int8_linear(tensor, weight, scale, bias, DTYPE_CODE_TO_DTYPE[code], *options)


def _is_mask(place):
    return place is not None and place.dtype in (torch.bool, torch.uint8)


def _as_if_all_were_true(func, args, kwargs):
    """An operator whose result's shape depends on numbers, where nothing is masked."""
    name = func.overloadpacket.__name__
    if name == "nonzero":
        return torch.ops.aten.empty.memory_format, ((args[0].numel(), args[0].ndim),), {"dtype": torch.int64,
                                                                                       "device": args[0].device}
    if name == "masked_select":
        return torch.ops.aten.view.default, (args[0], (-1,)), {}
    if name not in BY_PLACES:
        return func, args, kwargs
    places = []
    for place in args[1]:
        if _is_mask(place):
            count = 0 if hasattr(place, "is_false") else place.numel()
            places += [torch.empty(count, dtype=torch.int64, device=place.device)] * place.ndim
        else:
            places.append(place)
    return func, (args[0], places, *args[2:]), kwargs


def _goes_to_cuda(kwargs):
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cuda"


def line_at():
    """The innermost line of the pack, of diffusers or of ComfyUI's models that runs: file, line and function."""
    frames = [frame for frame in traceback.extract_stack() if any(free_bytes in frame.filename for free_bytes in OURS)
              and os.path.dirname(frame.filename) != HERE]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].name}" if frames else "elsewhere"
