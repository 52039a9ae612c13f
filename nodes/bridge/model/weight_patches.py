"""Weight patches of a MODEL: LoRA and other patches that ComfyUI has put on its ModelPatcher, as changes of the tensors
of its file.

A plain LoRA is sent to the workers as its two factors. For any other patch (and if rounding is random, as to float8),
the patched weight is computed here with ComfyUI's own arithmetic, from the file, and sent. Quantised weights are not
quantised again: workers add the factors after dequantising, and store patched weights in the compute dtype.
"""

import contextlib
import functools
import logging
import weakref

import torch

import comfy.float
import comfy.lora
import comfy.model_management
import comfy.utils
from comfy.weight_adapter import LoRAAdapter

from ....xdit_backend.checkpoints.quantisation.quantise_on_load import TYPES, quantised
from ....xdit_backend.checkpoints.quantisation.quantised_weights import packed_weights, unpacked
from ....xdit_backend.host.weight_updates import Change
from ....xdit_backend.protocol import specs
from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.shared_memory import dtype_name
from ..compatibility.lora_bypass import bypassed
from .state_dict import read_weight, read_weights

PREFIX = "diffusion_model."
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)      # to nearest; ComfyUI rounds to other dtypes at random


def changes_of(patcher, hooked={}):
    """Return {name of a tensor in the MODEL's file: Change} for the patches of a ProxyPatcher. Nothing is computed yet.

    hooked: {name of a weight: further patches}, of LoRA hooks. Raises UnsupportedError for patches of weights that the
    file does not have.
    """
    if not patcher.patches and not patcher.injections and not hooked:
        return {}
    effective = computed_patches(patcher)
    checkpoint, found, weight_of = file_of(patcher)
    # within: name in the file -> [(weight with rows of it, rows as of weight_sources)]
    device, changes, within = patcher.load_device, {}, {}
    # hooks also reach buffers, and parameters next to submodules
    for key in effective | hooked:
        if not found.get(key.removeprefix(PREFIX)) or not key.startswith(PREFIX):
            raise UnsupportedError(f"Remove the LoRA or node that changes {key}, or use Load Diffusion Model: the "
                                   "file of this MODEL does not have it.")
    for weight, sources in found.items():
        for name, rows in sources:
            within.setdefault(name, []).append((PREFIX + weight, rows))
    for name, targets in within.items():
        patches = {key: (effective.get(key, ()), hooked.get(key, ())) for key, _ in targets}
        if not any(some for both in patches.values() for some in both):
            continue
        key, rows = next((key, rows) for key, rows in targets if any(patches[key]))
        target = comfy.utils.get_attr(patcher.model, key)
        # a patched weight is not quantised
        if any(source in checkpoint.quantised for source, _ in found[key.removeprefix(PREFIX)]):
            target = torch.empty(target.shape, dtype=getattr(torch, patcher.remote.spec.compute_dtype), device="meta")
        of = tuple(tuple((strength, id(what), strength_model, offset, id(function))
                         for strength, what, strength_model, offset, function in some) for both in patches.values()
                   for some in both)
        if (rows is None and target.dtype in ROUNDED
                and all(_is_plain(patch) for some in patches[key] for patch in some)):
            make = functools.partial(_factors, key, *patches[key], target, device)
            rank = sum(len(what.weights[1]) for some in patches[key] for _, what, *_ in some)
        else:
            make = functools.partial(_tensor, [
                (functools.partial(_weight, each, *patches[each], target, device, weight_of), where)
                for each, where in targets if rows is not None or each == key])
            rank = 0
        changes[name] = Change(of, sum(comfy.utils.get_attr(patcher.model, each).numel() for each, _ in targets)
                               * target.dtype.itemsize, make, rank)
    return changes


def file_of(patcher):
    """Return (Checkpoint, weight_sources, a function: name of a weight -> its dequantised values as the workers have
    them) of a ProxyPatcher's file.

    The function holds no reference to the MODEL, since the MODEL holds objects that are made with it.
    """
    checkpoint, base_model, spec = patcher.remote.checkpoint, weakref.proxy(patcher.model), patcher.remote.spec
    checkpoint.check_is(spec)
    found = patcher.remote.weight_sources()
    every = functools.cache(lambda: read_weights(checkpoint, base_model))
    weight_of = (functools.partial(read_weight, checkpoint, found, base_model) if checkpoint.is_packed
                 else lambda name: every()[name])
    if spec.quantisation:
        weight_of = _as_quantised(weight_of, checkpoint, found, spec.quantisation, patcher.load_device)
    return checkpoint, found, weight_of


def _as_quantised(weight_of, checkpoint, found, quantisation, device):
    """Wrap weight_of so that weights that the workers have quantised are rounded in the same way. Rows are quantised
    independently, so ComfyUI's layout does not matter."""
    @functools.cache
    def sources():
        return {how.source for how in packed_weights(checkpoint, checkpoint.meta_model(), quantisation).values()}

    def rounded(name):
        if not {source for source, _ in found[name]} <= sources():
            return weight_of(name)
        numbers, scale = quantised(weight_of(name).to(device, torch.float32), TYPES[quantisation])
        return unpacked(numbers, TYPES[quantisation], scale, torch.float32)
    return rounded


def effective_patches(patcher):
    """Return {name of a weight: patches} that ComfyUI's ModelPatcher applies: not those of buffers, nor of parameters
    next to submodules."""
    reached = {f"{module}.{name}" for *_, module, _, parameters in patcher._load_list() for name in parameters}
    return {key: patches for key, patches in patcher.patches.items() if key in reached}


def computed_patches(patcher):
    """effective_patches, and LoRA in bypass mode, which affects the computation but not saved weights."""
    found = effective_patches(patcher)
    for key, strength, adapter in bypassed(patcher.injections):
        found[key] = [*found.get(key, ()), (strength, adapter, 1.0, None, None)]
    return found


def patched(key, patches, weight, dtype, device, sum_dtype=None):
    """Return the weight as patched by ComfyUI's ModelPatcher, in this dtype. weight is not modified.

    sum_dtype: dtype of the computation; None: as for effective patches.
    """
    weight = weight.to(dtype)
    copy = comfy.model_management.cast_to_device(weight, device, sum_dtype
                                                 or comfy.model_management.lora_compute_dtype(device), copy=True)
    with _logged_warnings() as logged:
        try:
            result = comfy.lora.calculate_weight(patches, copy, key)
        except (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError) as error:            # of shapes
            raise _mismatch(key, error) from error
    if logged or result.shape != weight.shape:
        why = (logged[0] if logged
               else f"it would make its shape {list(result.shape)} instead of {list(weight.shape)}")
        raise _mismatch(key, why)
    return comfy.float.stochastic_rounding(result, dtype, seed=comfy.utils.string_to_seed(key))


def _is_plain(patch):
    _, what, strength_model, _, function = patch
    if type(what) is not LoRAAdapter or strength_model != 1.0 or function is not None:
        return False
    _, _, _, middle, dora_scale, reshape = what.weights
    return middle is None and dora_scale is None and reshape is None


def _factors(key, patches, hooked, target, device, share):
    terms, more = (_terms(key, some, target, share) for some in (patches, hooked))
    sum_dtype = comfy.model_management.lora_compute_dtype(device)
    return specs.Change(None, terms, dtype_name(target.dtype), dtype_name(sum_dtype), more)


def _terms(key, patches, target, share):
    terms = []
    for strength, what, _, offset, _ in patches:
        up, down, alpha, *_ = what.weights
        if min(up.ndim, down.ndim) < 2 or not len(down):
            raise _mismatch(key, f"its factors have the shapes {list(up.shape)} and {list(down.shape)}")
        shape = list(target.shape)
        if offset is not None:
            shape[offset[0]] = offset[2]
        sides = [up.shape[0], down[0].numel()]
        if (up.shape[1:].numel() != down.shape[0] or sides != [shape[0], torch.Size(shape[1:]).numel()]
                or offset is not None and sum(offset[1:]) > target.shape[offset[0]]):
            raise _mismatch(key, f"it is for a weight of {sides[0]} x {sides[1]}, and this one is "
                               f"{' x '.join(map(str, shape))}")
        scale = strength * (1.0 if alpha is None else alpha / down.shape[0])
        terms.append(specs.LowRank(share(up), share(down), float(scale), None if offset is None else tuple(offset)))
    return tuple(terms)


def _weight(key, patches, hooked, target, device, weight_of):
    weight = weight_of(key.removeprefix(PREFIX))
    if patches:
        weight = patched(key, patches, weight, target.dtype, device)
    return patched(key, hooked, weight, target.dtype, device, torch.float32) if hooked else weight


def _tensor(weights, share):
    """A full tensor of the file. weights: [(makes a weight, its rows in the tensor, as of weight_sources)], which
    together cover it."""
    if len(weights) == 1 and weights[0][1] is None:
        return specs.Change(share(weights[0][0]()), ())
    chunks = [(make()[rows >= 0], rows[rows >= 0]) for make, rows in weights]
    tensor = chunks[0][0].new_empty(sum(len(rows) for _, rows in chunks), *chunks[0][0].shape[1:])
    for chunk, rows in chunks:
        tensor[rows.to(tensor.device)] = chunk
    return specs.Change(share(tensor), ())


def _mismatch(key, why):
    return UnsupportedError("Use a LoRA, or another weight patch, that was made for this model: this one does not fit "
                            f"{key} ({why}).")


@contextlib.contextmanager
def _logged_warnings():
    """Collect warnings, which ComfyUI logs instead of raising an error if a patch does not fit."""
    logged = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(min(level, logging.WARNING))                 # ComfyUI's --verbose may suppress warnings
    try:
        yield logged
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
