"""LoRA and other weight patches of a MODEL: what ComfyUI has put on its ModelPatcher, as changes of the tensors of its
file.

A plain LoRA goes to the workers as its two factors. Of all other kinds (and where the rounding is random, as to float8)
ComfyUI's own arithmetic makes the changed weight here, from the file, and that is sent. Quantised weights are not
rounded again: workers add the factors where they unpack, and hold what is sent in the type they compute in. Used by
model_patcher.py.
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
ROUNDED = (torch.float32, torch.bfloat16, torch.float16)      # to the nearest; anything else ComfyUI rounds at random


def changes_of(patcher, hooked={}):
    """{name of a tensor in the MODEL's file: Change} for the patches of a ProxyPatcher. Nothing is computed yet.

    hooked: {name of a weight: further patches}, of LoRA hooks. Raises UnsupportedError for patches of weights that the
    file does not have.
    """
    if not patcher.patches and not patcher.injections and not hooked:
        return {}
    effective = computed_patches(patcher)
    checkpoint, found, weight_of = file_of(patcher)
    # the last: name in the file -> [(weight with rows of it, rows as of places)]
    device, changes, within = patcher.load_device, {}, {}
    # hooks reach buffers too, and parameters beside submodules
    for key in effective | hooked:
        if not found.get(key.removeprefix(PREFIX)) or not key.startswith(PREFIX):
            raise UnsupportedError(f"Remove the LoRA or node that changes {key}, or use Load Diffusion Model: the "
                                   "file of this MODEL does not have it.")
    for weight, sources in found.items():
        for name, rows in sources:
            within.setdefault(name, []).append((PREFIX + weight, rows))
    for name, parts in within.items():
        patches = {key: (effective.get(key, ()), hooked.get(key, ())) for key, _ in parts}
        if not any(some for both in patches.values() for some in both):
            continue
        key, rows = next((key, rows) for key, rows in parts if any(patches[key]))
        held = comfy.utils.get_attr(patcher.model, key)
        # what is changed then is plain
        if any(source in checkpoint.quantised for source, _ in found[key.removeprefix(PREFIX)]):
            held = torch.empty(held.shape, dtype=getattr(torch, patcher.remote.spec.compute_dtype), device="meta")
        of = tuple(tuple((strength, id(what), strength_model, offset, id(function))
                         for strength, what, strength_model, offset, function in some) for both in patches.values()
                   for some in both)
        if rows is None and held.dtype in ROUNDED and all(_is_plain(patch) for some in patches[key] for patch in some):
            make = functools.partial(_factors, key, *patches[key], held, device)
            rank = sum(len(what.weights[1]) for some in patches[key] for _, what, *_ in some)
        else:
            make = functools.partial(_sent, [(functools.partial(_whole, part, *patches[part], held, device, weight_of),
                                              where)
                                             for part, where in parts if rows is not None or part == key])
            rank = 0
        changes[name] = Change(of, sum(comfy.utils.get_attr(patcher.model, part).numel() for part, _ in parts)
                               * held.dtype.itemsize, make, rank)
    return changes


def file_of(patcher):
    """(Checkpoint, weight_sources, a function: name of a weight -> its plain numbers as the workers have them) of a
    ShellPatcher's file.

    The function holds no reference to the MODEL, since the MODEL holds what is made with it.
    """
    checkpoint, base_model, spec = patcher.remote.checkpoint, weakref.proxy(patcher.model), patcher.remote.spec
    checkpoint.check_is(spec)
    found = patcher.remote.weight_sources()
    every = functools.cache(lambda: read_weights(checkpoint, base_model))
    weight_of = (functools.partial(read_weight, checkpoint, found, base_model) if checkpoint.is_packed
                 else lambda name: every()[name])
    if spec.quantisation:
        weight_of = _as_held(weight_of, checkpoint, found, spec.quantisation, patcher.load_device)
    return checkpoint, found, weight_of


def _as_held(weight_of, checkpoint, found, quantisation, device):
    """weight_of, with what the workers have quantised rounded as they hold it. Rows are independent, so ComfyUI's
    layout does not matter."""
    @functools.cache
    def sources():
        return {how.source for how in packed_weights(checkpoint, checkpoint.meta_model(), quantisation).values()}

    def held(name):
        if not {source for source, _ in found[name]} <= sources():
            return weight_of(name)
        numbers, scale = quantised(weight_of(name).to(device, torch.float32), TYPES[quantisation])
        return unpacked(numbers, TYPES[quantisation], scale, torch.float32)
    return held


def effective_patches(patcher):
    """{name of a weight: patches} that ComfyUI's ModelPatcher carries out:
    of no buffer, and of no parameter beside submodules."""
    reached = {f"{module}.{name}" for *_, module, _, parameters in patcher._load_list() for name in parameters}
    return {key: patches for key, patches in patcher.patches.items() if key in reached}


def computed_patches(patcher):
    """effective_patches, and LoRA in bypass mode, which changes what is computed and not the weights that are saved."""
    found = effective_patches(patcher)
    for key, strength, adapter in bypassed(patcher.injections):
        found[key] = [*found.get(key, ()), (strength, adapter, 1.0, None, None)]
    return found


def patched(key, patches, weight, dtype, device, sum_dtype=None):
    """The weight as ComfyUI's ModelPatcher changes it, in the type that it holds it in. weight: not written to.

    sum_dtype: in which it is changed; None: as effective patches are.
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


def _factors(key, patches, hooked, held, device, share):
    terms, more = (_terms(key, some, held, share) for some in (patches, hooked))
    sum_dtype = comfy.model_management.lora_compute_dtype(device)
    return specs.Change(None, terms, dtype_name(held.dtype), dtype_name(sum_dtype), more)


def _terms(key, patches, held, share):
    terms = []
    for strength, what, _, offset, _ in patches:
        up, down, alpha, *_ = what.weights
        if min(up.ndim, down.ndim) < 2 or not len(down):
            raise _mismatch(key, f"its factors have the shapes {list(up.shape)} and {list(down.shape)}")
        shape = list(held.shape)
        if offset is not None:
            shape[offset[0]] = offset[2]
        given = [up.shape[0], down[0].numel()]
        if (up.shape[1:].numel() != down.shape[0] or given != [shape[0], torch.Size(shape[1:]).numel()]
                or offset is not None and sum(offset[1:]) > held.shape[offset[0]]):
            raise _mismatch(key, f"it is for a weight of {given[0]} x {given[1]}, and this one is "
                               f"{' x '.join(map(str, shape))}")
        scale = strength * (1.0 if alpha is None else alpha / down.shape[0])
        terms.append(specs.LowRank(share(up), share(down), float(scale), None if offset is None else tuple(offset)))
    return tuple(terms)


def _whole(key, patches, hooked, held, device, weight_of):
    weight = weight_of(key.removeprefix(PREFIX))
    if patches:
        weight = patched(key, patches, weight, held.dtype, device)
    return patched(key, hooked, weight, held.dtype, device, torch.float32) if hooked else weight


def _sent(parts, share):
    """A tensor of the file as a whole. parts: [(makes a weight, its rows in the tensor, as of places)],
    which together are all of it."""
    if len(parts) == 1 and parts[0][1] is None:
        return specs.Change(share(parts[0][0]()), ())
    pieces = [(whole()[rows >= 0], rows[rows >= 0]) for whole, rows in parts]
    tensor = pieces[0][0].new_empty(sum(len(there) for _, there in pieces), *pieces[0][0].shape[1:])
    for piece, there in pieces:
        tensor[there.to(tensor.device)] = piece
    return specs.Change(share(tensor), ())


def _mismatch(key, why):
    return UnsupportedError("Use a LoRA, or another weight patch, that was made for this model: the one given does "
                            f"not fit {key} ({why}).")


@contextlib.contextmanager
def _logged_warnings():
    """What ComfyUI logs instead of raising, where a patch does not fit."""
    logged = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: logged.append(record.getMessage())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(min(level, logging.WARNING))                 # ComfyUI's --verbose may leave warnings out
    try:
        yield logged
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
