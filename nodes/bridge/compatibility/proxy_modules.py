"""Modules of a proxy model's diffusion model. They compute nothing: reading their weights raises an error that says
where they are, and changes that nodes make to them are detected."""

import functools
import os

import torch

from ....xdit_backend.protocol.errors import UnsupportedError

# attributes of a compiled module, both from PyTorch 2.14 on
COMPILED = {"_compiled_call_impl", "_is_torch_compile"}
# PuLID for Flux leaves attributes on the diffusion model: the data of each of its nodes, and a method that reads them
PULID_FLUX = "PuLID for Flux (Apply PuLID Flux)"
PULID_DATA, PULID_MODULE, PULID_FILE = "pulid_data", "pulid_ca", "pulidflux.py"
PULID_NAMES = {PULID_DATA, PULID_MODULE, "pulid_double_interval", "pulid_single_interval", "forward_orig"}


def use_worker_parameters(model, read):
    """Replace the parameters of a proxy model's diffusion model (on the meta device) by WorkerParameters.

    read(name): the weight from its file, with the patches of the running MODEL, on the CPU.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            remote = WorkerParameter(parameter, requires_grad=False)
            remote.read = functools.partial(read, f"{path}.{name}" if path else name)
            module.register_parameter(name, remote)


class WorkerParameter(torch.nn.Parameter):
    """Weight that is on the workers. Shape and dtype are known here; reading its data raises an error that says where
    it is.

    It can be copied into another tensor, as the ControlNets of SD3.5 do with an embedder's.
    """

    # functions that need no data; torch reads attributes by __get__
    KNOWN = {"__get__", "__repr__", "__hash__", "__len__", "__format__", "size", "dim", "ndimension", "numel",
             "nelement", "element_size", "stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex",
             "requires_grad_"}

    def detach(self):
        """Return itself, without a gradient. A merge calls state_dict() for each weight: 470,000 calls with SD 1.5."""
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        if name in cls.KNOWN or function == torch.Tensor.requires_grad.__set__:
            return torch.Tensor.__torch_function__.__func__(cls, function, types, args, kwargs or {})
        if name == "copy_" and not isinstance(args[0], cls):
            return args[0].copy_(args[1].read())
        raise UnsupportedError("Use Load Diffusion Model for the node that reads the weights of this MODEL or "
                               f"computes with its layers itself ({name}): they are on xDiT's workers.")


def remember_modules(model):
    """Return {name: (module, copy of its attributes)} of a proxy model's diffusion model after its creation."""
    return {name: (module, {key: _copy(value) for key, value in vars(module).items()})
            for name, module in model.named_modules()}


def changed_modules(model, modules, forwards):
    """Describe the changes to a proxy model's modules since remember_modules. model: the BaseModel's current diffusion
    model. forwards: its ForwardPatches.

    Hooks on the diffusion model itself are allowed, as they run here around the workers' prediction; hooks on modules
    inside it would not run. Compiling does not change a result.
    """
    root = modules[""][0]
    found = [] if is_module(model, root) else ["a replaced diffusion model"]
    for name, (module, remembered) in modules.items():
        now = vars(module)
        if module is root and _has_pulid(now):
            found += [PULID_FLUX] if now[PULID_DATA] else []   # without data, its method computes what ComfyUI's does
            now = {key: value for key, value in now.items() if key not in PULID_NAMES}
            now["_modules"] = {key: value for key, value in now["_modules"].items() if key != PULID_MODULE}
        if module is root:
            before = remembered["_modules"]
            now = {**now, "_modules": {key: before[key] if forwards.riflex(modules, key, value) else value
                                       for key, value in now["_modules"].items()}}
        if _is_equal(now, remembered):
            continue
        keys = [key for key, value in now.items()
                if not _same(value, remembered.get(key, None))] + [key for key in remembered if key not in now]
        for key in keys:
            if (key not in COMPILED and not (module is root and "hook" in key)
                    and not (name and key in now and forwards.of_attribute(modules, name, key, now[key]))):
                path = ".".join(filter(None, ("diffusion_model", name)))
                found.append(f"hooks on {path}" if "hook" in key else f"a changed {path}.{key.removeprefix('_')}")
    return found


def _has_pulid(now):
    code = getattr(now.get("forward_orig"), "__code__", None)
    return PULID_DATA in now and code is not None and os.path.basename(code.co_filename) == PULID_FILE


def is_module(value, module):
    """Whether this is the module, or the module compiled by torch.compile."""
    return value is module or getattr(value, "_orig_mod", None) is module


def _is_equal(now, remembered):
    """Compare a module's attributes quickly. Tensors that are not the same object count as different, since comparing
    them raises."""
    try:
        return now == remembered
    except (RuntimeError, ValueError):
        return False


def _copy(value):
    return value.copy() if isinstance(value, (dict, list, set)) else value


def _same(value, remembered):
    if value is remembered:
        return True
    if type(value) is not type(remembered):
        return False
    if isinstance(value, dict):
        return len(value) == len(remembered) and all(
            key in remembered
            and (part is remembered[key] or (remembered[key] is not None and is_module(part, remembered[key])))
            for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return len(value) == len(remembered) and all(part is other for part, other in zip(value, remembered))
    return isinstance(value, (bool, int, float, str, set, torch.dtype)) and value == remembered
