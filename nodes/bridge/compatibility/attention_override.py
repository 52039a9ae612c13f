"""By which kernel the workers compute attention: what a node, xDiT Parallel Config, or ComfyUI's start options choose.
Asked by model_options.py, once for each call and for what it refuses before.

ComfyUI's nodes choose by a function, optimized_attention_override in transformer_options, which ComfyUI calls with the
attention that it would have run and its arguments. One that only passes these on to one of ComfyUI's own attentions
means that one; any other is refused.
"""

import types

from comfy.ldm.modules import attention

from ....xdit_backend.protocol.specs import ATTENTIONS, SDPA, BackendChoice

OVERRIDE = "optimized_attention_override"
# ComfyUI's attentions that other kernels stand for here; all else that it has computes what torch's own does
KERNELS = {"attention_sage": "sage", "attention_flash": "flash", "attention_xformers": "xformers"}
EXACT = ("attention_basic", "attention_sub_quad", "attention_split", "attention_pytorch")
# arguments of a trial call
TRIAL = {"heads": 2, "mask": None, "skip_reshape": True, "transformer_options": {}}


def backend_of(config, of_node=None):
    """The BackendChoice of a call. of_node: what a node's function means, which counts before xDiT Parallel Config."""
    if of_node is not None:
        return BackendChoice(of_node, True)
    if config.attention != ATTENTIONS[0]:
        return BackendChoice(config.attention, True)
    return BackendChoice(_backend_named(attention.optimized_attention.__name__) or SDPA)


def override_backend(override):
    """The kernel that such a function means; None where that is not known."""
    if not isinstance(override, types.FunctionType):
        return None
    found = {function.__name__ for function in _referred(override)}
    backend = _backend_named(found.pop()) if len(found) == 1 else None
    return backend if backend and _only_passes_on(override) else None


def _backend_named(name):
    return SDPA if name in EXACT else KERNELS.get(name)


def _is_comfyuis(value):
    """Is it one of ComfyUI's attentions, with its wrapper or without?"""
    name = getattr(value, "__name__", "")
    own = getattr(attention, name, None) if isinstance(value, types.FunctionType) else None
    return own is not None and value in (own, getattr(own, "__wrapped__", None)) and _backend_named(name) is not None


def _referred(override):
    """ComfyUI's attentions among what a function can reach by its variables, its defaults and names of its file."""
    values = [cell.cell_contents for cell in override.__closure__ or ()] + list(override.__defaults__ or ())
    values += [override.__globals__.get(name) for name in override.__code__.co_names]
    return [value for value in values if _is_comfyuis(value)]


def _only_passes_on(override):
    """Does it hand its arguments on as they are, and return what it is given for them? Its code is run with a stand-in
    in the place of ComfyUI's attention."""
    given, result, calls = (object(), object(), object()), object(), []

    def stand_in(*args, **kwargs):
        calls.append((args, kwargs))
        return result

    def replaced(value):
        return stand_in if _is_comfyuis(value) else value
    stand_in.__wrapped__ = stand_in
    names = {name: replaced(override.__globals__[name]) for name in override.__code__.co_names
             if name in override.__globals__}
    cells = tuple(types.CellType(replaced(cell.cell_contents)) for cell in override.__closure__ or ())
    same = types.FunctionType(override.__code__, override.__globals__ | names, override.__name__,
                              tuple(map(replaced, override.__defaults__ or ())), cells)
    try:
        passed = same(stand_in, *given, **TRIAL) is result
    except Exception:                                          # another's code, given what it does not expect
        return False
    return passed and calls == [(given, TRIAL)]

