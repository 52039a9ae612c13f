"""Attention override: selects the workers' attention backend from a node, xDiT Parallel Config or ComfyUI's start
options.

ComfyUI's nodes set a function, optimized_attention_override in transformer_options, which ComfyUI calls with the
attention function that it would have called and its arguments. A function that only passes these on to one of ComfyUI's
attention functions selects that one; any other function is rejected.
"""

import types

from comfy.ldm.modules import attention

from ....xdit_backend.protocol.specs import ATTENTIONS, SDPA, BackendChoice

OVERRIDE = "optimized_attention_override"
# ComfyUI's attention functions with a backend of their own; all others compute what torch SDPA does
BACKEND_OF_FUNCTION = {"attention_sage": "sage", "attention_flash": "flash", "attention_xformers": "xformers",
                       "attention_comfy_kitchen_int8": "comfy_kitchen_int8"}
# attribute of a function: what ComfyUI calls in its place for queries, keys and values in containers
CONTAINERS = "container_function"
EXACT = ("attention_basic", "attention_sub_quad", "attention_split", "attention_pytorch")
# arguments of a trial call
TRIAL = {"heads": 2, "mask": None, "skip_reshape": True, "transformer_options": {}}


def backend_of(config, of_node=None):
    """Return the BackendChoice of a call. of_node: a node's backend, which has priority over xDiT Parallel Config."""
    if of_node is not None:
        return BackendChoice(of_node, True)
    if config.attention != ATTENTIONS[0]:
        return BackendChoice(config.attention, True)
    return BackendChoice(_backend_named(attention.optimized_attention.__name__) or SDPA)


def override_backend(override):
    """Return the attention backend that such a function stands for, or None if it is unknown."""
    if not isinstance(override, types.FunctionType):
        return None
    found = {function.__name__: function for function in _referred(override)}
    if len(found) != 1:
        return None
    [(name, function)] = found.items()
    containers = getattr(override, CONTAINERS, None)
    is_same = containers is None or containers is getattr(function, CONTAINERS, None)
    return _backend_named(name) if is_same and _only_passes_on(override) else None


def _backend_named(name):
    return SDPA if name in EXACT else BACKEND_OF_FUNCTION.get(name)


def _is_comfyuis(value):
    """Whether this is one of ComfyUI's attention functions, with or without its wrapper."""
    name = getattr(value, "__name__", "")
    own = getattr(attention, name, None) if isinstance(value, types.FunctionType) else None
    return own is not None and value in (own, getattr(own, "__wrapped__", None)) and _backend_named(name) is not None


def _referred(override):
    """ComfyUI's attention functions among a function's closure variables, defaults and globals."""
    values = [cell.cell_contents for cell in override.__closure__ or ()] + list(override.__defaults__ or ())
    values += [override.__globals__.get(name) for name in override.__code__.co_names]
    return [value for value in values if _is_comfyuis(value)]


def _only_passes_on(override):
    """Whether the function passes its arguments on unchanged and returns the result. Its code is run with a fake in
    place of ComfyUI's attention function."""
    arguments, result, calls = (object(), object(), object()), object(), []

    def fake(*args, **kwargs):
        calls.append((args, kwargs))
        return result

    def replaced(value):
        return fake if _is_comfyuis(value) else value
    fake.__wrapped__ = fake
    names = {name: replaced(override.__globals__[name]) for name in override.__code__.co_names
             if name in override.__globals__}
    cells = tuple(types.CellType(replaced(cell.cell_contents)) for cell in override.__closure__ or ())
    same = types.FunctionType(override.__code__, override.__globals__ | names, override.__name__,
                              tuple(map(replaced, override.__defaults__ or ())), cells)
    try:
        passed = same(fake, *arguments, **TRIAL) is result
    except Exception:                                          # raised by a node's code for unexpected arguments
        return False
    return passed and calls == [(arguments, TRIAL)]

