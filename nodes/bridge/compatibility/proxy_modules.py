"""The modules of a shell's diffusion model. They compute nothing: whoever reads their weights is told where these are,
and changes that nodes make to them are found. Prepared by proxy_model.py; model_options.py refuses the changes."""

import functools
import os

import torch

from ....xdit_backend.protocol.errors import UnsupportedError

# what a module has more that was compiled, from PyTorch 2.14 on both
COMPILED = {"_compiled_call_impl", "_is_torch_compile"}
# PuLID for Flux writes to the diffusion model itself, and leaves it there: of each of its nodes what it adds, and a
# method that reads this
FACES = "PuLID for Flux (Apply PuLID Flux)"
OF_FACES, FACES_MODULE, FACES_FILE = "pulid_data", "pulid_ca", "pulidflux.py"
FACES_NAMES = {OF_FACES, FACES_MODULE, "pulid_double_interval", "pulid_single_interval", "forward_orig"}


def use_worker_parameters(net, read):
    """Replace the parameters of a shell's diffusion model (on the meta device) by WorkerParameters.

    read(name): the weight as its file has it, with the patches of the MODEL that runs, on the CPU.
    """
    for path, module in net.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            held = WorkerParameter(parameter, requires_grad=False)
            held.read = functools.partial(read, f"{path}.{name}" if path else name)
            module.register_parameter(name, held)


class WorkerParameter(torch.nn.Parameter):
    """A weight that the workers hold. Its shape and dtype are known here; reading its numbers raises an error that says
    where they are.

    It can be copied into another tensor, as the ControlNets of SD3.5 do with an embedder's.
    """

    # what needs no data: torch asks for attributes by __get__
    KNOWN = {"__get__", "__repr__", "__hash__", "__len__", "__format__", "size", "dim", "ndimension", "numel",
             "nelement", "element_size", "stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex",
             "requires_grad_"}

    def detach(self):
        """Itself, which has no gradient. A merge asks for state_dict() once a weight: 470,000 times with SD 1.5."""
        return self

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name = function.__name__
        if name in cls.KNOWN or function == torch.Tensor.requires_grad.__set__:
            return torch.Tensor.__torch_function__.__func__(cls, function, types, args, kwargs or {})
        if name == "copy_" and not isinstance(args[0], cls):
            return args[0].copy_(args[1].read())
        raise UnsupportedError("Use Load Diffusion Model for the node that reads the weights of this MODEL or "
                               f"computes with its layers itself ({name}): xDiT's workers hold them.")


def remember_modules(net):
    """{name: (module, what it holds)} of a shell's diffusion model as it was made."""
    return {name: (module, {key: _copy(value) for key, value in vars(module).items()})
            for name, module in net.named_modules()}


def changed_modules(net, modules):
    """What was changed in a shell's modules since remember_modules, in words. net: the BaseModel's diffusion model as
    it is now.

    Hooks on the diffusion model as a whole run here, around the workers' prediction; hooks on modules inside it would
    not. Compiling changes no result.
    """
    root = modules[""][0]
    found = [] if is_module(net, root) else ["another diffusion model in the place of this one"]
    for name, (module, held) in modules.items():
        now = vars(module)
        if module is root and _has_faces(now):
            found += [FACES] if now[OF_FACES] else []          # without one, its method is as ComfyUI's own
            now = {key: value for key, value in now.items() if key not in FACES_NAMES}
            now["_modules"] = {key: value for key, value in now["_modules"].items() if key != FACES_MODULE}
        if _is_equal(now, held):
            continue
        keys = [key for key, value in now.items()
                if not _same(value, held.get(key, None))] + [key for key in held if key not in now]
        for key in keys:
            if key not in COMPILED and not (module is root and "hook" in key):
                path = ".".join(filter(None, ("diffusion_model", name)))
                found.append(f"hooks on {path}" if "hook" in key else f"a changed {path}.{key.removeprefix('_')}")
    return found


def _has_faces(now):
    code = getattr(now.get("forward_orig"), "__code__", None)
    return OF_FACES in now and code is not None and os.path.basename(code.co_filename) == FACES_FILE


def is_module(value, module):
    """Is this the module, or the module as torch.compile gives it?"""
    return value is module or getattr(value, "_orig_mod", None) is module


def _is_equal(now, held):
    """A quick comparison of all that a module holds. Tensors that are not the same object count as different, since
    comparing them raises."""
    try:
        return now == held
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
