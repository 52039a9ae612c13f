"""Attention override: selects the workers' attention backend from a node, xDiT Parallel Config or ComfyUI's start
options.

ComfyUI's nodes set a function, optimized_attention_override in transformer_options, which ComfyUI calls with the
attention function that it would have called and its arguments. A function that only passes these on to one of ComfyUI's
attention functions selects that one, and a function that computes attention by a package's selects that package's; any
other function is rejected.

# B batch, N heads, T tokens, H head size
"""

import types

import torch
import torch.nn.functional as F

from comfy.ldm.modules import attention

from ....xdit_backend.protocol.specs import AS_COMFYUI, FASTEST, SDPA, BackendChoice

OVERRIDE = "optimized_attention_override"
# ComfyUI's attention functions with a backend of their own; all others compute what torch SDPA does
BACKEND_OF_FUNCTION = {"attention_sage": "sage", "attention_flash": "flash", "attention_xformers": "xformers",
                       "attention_comfy_kitchen_int8": "comfy_kitchen_int8"}
# attribute of a function: what ComfyUI calls in its place for queries, keys and values in containers
CONTAINERS = "container_function"
EXACT = ("attention_basic", "attention_sub_quad", "attention_split", "attention_pytorch")
# arguments of a trial call
TRIAL = {"heads": 2, "mask": None, "skip_reshape": True, "transformer_options": {}}
# (package, its function) -> backend that calls it with its default options
BACKEND_OF_PACKAGE = {("sageattention", "sageattn"): "sage", ("flash_attn", "flash_attn_func"): "flash",
                      ("flash_attn_interface", "flash_attn_func"): "flash3",
                      ("xformers", "memory_efficient_attention"): "xformers"}
PACKAGES = {package for package, _ in BACKEND_OF_PACKAGE} | {"sageattn3"}
UNCOMPILED = "_torchdynamo_orig_callable"  # of a function that torch.compiler.disable wraps
MAX_CALLS = 6                              # functions in each other, from the override to the package's
TOLERANCE = 0.01                           # absolute; some functions round to half precision


def backend_of(config, of_node=None):
    """Return the BackendChoice of a call. of_node: a node's backend, which has priority over xDiT Parallel Config."""
    if of_node is not None:
        return BackendChoice(of_node, True)
    if config.attention not in (FASTEST, AS_COMFYUI):
        return BackendChoice(config.attention, True)
    return BackendChoice(_backend_named(attention.optimized_attention.__name__) or SDPA)


def override_backend(override):
    """Return the attention backend that such a function stands for, or None if it is unknown."""
    if not isinstance(override, types.FunctionType):
        return None
    found = {function.__name__: function for function in _referred(override)}
    containers = getattr(override, CONTAINERS, None)
    if containers is not None and containers not in [getattr(each, CONTAINERS, None) for each in found.values()]:
        return None
    backend = _backend_named(next(iter(found))) if len(found) == 1 else None
    if backend and _only_passes_on(override):
        return backend
    calls = []
    same = _with_fakes(override, calls)
    backend = BACKEND_OF_PACKAGE.get(calls[0]) if len(set(calls)) == 1 else None
    return backend if backend and _computes_attention(same) else None


def packages_called(override):
    """Names of the functions of attention packages that an override calls, "sageattention.sageattn"."""
    calls: list = []
    _with_fakes(override, calls)
    return [".".join(each) for each in dict.fromkeys(calls)]


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


def _with_fakes(value, calls, depth=MAX_CALLS):
    """A function with exact attention in place of the packages' functions that it calls, in functions that it calls
    too; any other value as it is. (package, function) is appended to calls for each of them."""
    value = getattr(value, UNCOMPILED, value)
    package, name = str(getattr(value, "__module__", "")).partition(".")[0], getattr(value, "__name__", "")
    if package in PACKAGES and callable(value):
        calls.append((package, name))
        return {"sageattention": _fake_sage, "xformers": _fake_xformers}.get(package, _fake_flash)
    if not isinstance(value, types.FunctionType) or not depth or package in ("torch", "comfy"):
        return value
    if any(cell == types.CellType() for cell in value.__closure__ or ()):       # a function in its own definition
        return value
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    names = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
    before = [*cells, *names.values(), *(value.__defaults__ or ())]
    after = [_with_fakes(each, calls, depth - 1) for each in before]
    if all(new is old for new, old in zip(after, before)):
        return value
    of_cells, others = after[:len(cells)], after[len(cells):]
    same = types.FunctionType(value.__code__, value.__globals__ | dict(zip(names, others)), value.__name__,
                              tuple(others[len(names):]), tuple(map(types.CellType, of_cells)))
    same.__kwdefaults__ = value.__kwdefaults__
    if hasattr(value, "__wrapped__"):
        same.__wrapped__ = _with_fakes(value.__wrapped__, [], depth - 1)
    return same


def _fake_sage(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, attn_mask=None):
    if tensor_layout == "HND":                                 # BNTH
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=sm_scale)
    return _fake_flash(q, k, v, softmax_scale=sm_scale, causal=is_causal)


def _fake_flash(q_BTNH, k_BTNH, v_BTNH, dropout_p=0.0, softmax_scale=None, causal=False):
    q, k, v = (each.transpose(1, 2) for each in (q_BTNH, k_BTNH, v_BTNH))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)


def _fake_xformers(q_BTNH, k_BTNH, v_BTNH, attn_bias=None, p=0.0, scale=None):
    return _fake_flash(q_BTNH, k_BTNH, v_BTNH, softmax_scale=scale)


def _computes_attention(override):
    """Whether the function's results are those of attention, in both layouts of ComfyUI's functions."""
    q, k, v = torch.randn(3, 2, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    expected = F.scaled_dot_product_attention(q, k, v)
    of_tokens = [each.transpose(1, 2).flatten(2) for each in (q, k, v)]
    try:
        found = [override(print, *inputs, **TRIAL | {"skip_reshape": is_apart, "skip_output_reshape": stays_apart})
                 for inputs, is_apart in (((q, k, v), True), (of_tokens, False)) for stays_apart in (True, False)]
        return all(torch.allclose(each.float(), want, atol=TOLERANCE) and each.dtype == q.dtype for each, want in zip(
            found, 2 * [expected, expected.transpose(1, 2).flatten(2)]))
    except Exception:                                          # raised by a node's code for these arguments
        return False


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

