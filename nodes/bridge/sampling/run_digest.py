"""Digest of a sampling run: everything that its time on given devices depends on, except the parallel layout."""

import hashlib
import json
import types

import torch

from ....xdit_backend.host.machine_profiles import software
from ....xdit_backend.protocol.specs import FASTEST
from ..compatibility.model_options import call_backend

STATE_DIGITS = 8                           # of a ModelSpec's name: the state of its files
DEPTH = 6                                  # of objects in each other; deeper ones are described by their type
IDENTITIES = "uuid", "uuids", "multigpu_clones", "sample_sigmas"       # differ between equal runs


def run_digest(remote, guider, sampler, sigmas, extra_args, noise, denoise_mask, compiled=""):
    """16 digits that are equal for runs that compute the same amount by the same code.

    In the digest: the file, dtypes, size, steps, sampler, shapes of the conditioning, what nodes have put on the MODEL,
    attention backend, software versions and `compiled`, how blocks are compiled. Not in it: seed, prompts' content,
    guidance scales, and the parallel layout. remote: RemoteModel. sampler, guider and the other arguments: of ComfyUI's
    Sampler.sample.
    """
    spec, config, model_options = remote.spec, remote.config, extra_args["model_options"]
    options = model_options["transformer_options"]
    work = [
        [spec.state or spec.name.rpartition("-")[2][:STATE_DIGITS], spec.storage_dtype, spec.compute_dtype,
         spec.quantisation, spec.fast, config.weights_memory],
        [config.attention == FASTEST, call_backend(config, options).name, compiled],
        [type(sampler).__name__, getattr(getattr(sampler, "sampler_function", None), "__name__", ""),
         described(getattr(sampler, "extra_options", {}))],
        [type(guider).__name__, sorted((name, value == 1) for name, value in vars(guider).items()
                                       if isinstance(value, float))],
        described(guider.conds), described(model_options), described(noise), denoise_mask is not None,
        len(sigmas), software(remote.devices)]
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()[:16]


def described(value, depth=DEPTH):
    """A value as plain ones for JSON: tensors by shape and dtype, functions and classes by name, other objects by
    their type and attributes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if torch.is_tensor(value):
        return ["tensor", list(value.shape), str(value.dtype)]
    if isinstance(value, (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)):
        return value.__qualname__
    if isinstance(value, torch.nn.Module) or depth == 0:
        return type(value).__qualname__
    if isinstance(value, dict):
        if "model_conds" in value:                             # prepared from the other tensors of this entry
            value = value | {name: None for name, entry in value.items() if torch.is_tensor(entry)}
        return {str(key): described(each, depth - 1) for key, each in value.items() if key not in IDENTITIES}
    if isinstance(value, (list, tuple)):
        return [described(each, depth - 1) for each in value]
    if hasattr(value, "cond"):                                 # ComfyUI's COND classes; a number, such as guidance, is
        kind = type(value.cond).__name__                       # conditioning too
        return kind if isinstance(value.cond, (bool, int, float)) else described(value.cond, depth - 1)
    return [type(value).__qualname__, described(getattr(value, "__dict__", {}), depth - 1)]
