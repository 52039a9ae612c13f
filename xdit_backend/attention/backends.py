"""Attention backends of a rank: torch SDPA, and the packages FlashAttention, SageAttention, xFormers and
comfy-kitchen.

# B batch, N heads, T tokens, H head size
"""

import functools
import importlib
import importlib.util
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..protocol.errors import UnsupportedError
from ..protocol.specs import SDPA
from .log_sum_exp import HALF, aligned, attention_with_lse
from .masks import as_bias

# raised by the packages for tensors that they do not support
REFUSALS = (AssertionError, NotImplementedError, TypeError, ValueError)


@dataclass(frozen=True)
class AttentionBackend:
    """A package's attention function and its constraints.

    call(module, q, k, v, bias, scale, with_lse), with q, k, v of shape (B, T, N, H) and bias (B, N, T, T) or None,
    returns (out, lse): (B, T, N, H), and (B, N, T) or None.
    """

    title: str
    module: str                            # to import
    package: str                           # to install
    call: Callable
    capability: tuple[int, int] = (8, 0)   # lowest CUDA compute capability
    only_major: int = 0                    # the one supported major capability; 0: all
    dtypes: tuple = HALF
    head_sizes: tuple[int, ...] = tuple(range(8, 257, 8))      # other head sizes are padded to the next one
    takes_groups: bool = True              # supports grouped-query attention
    takes_masks: bool = False
    gives_lse: Callable = lambda module: True              # whether the installed version returns log-sum-exp
    lse_since: str = ""                    # first version that does, where an older one runs; "": none
    function: str = ""                     # attribute of the module that older versions lack
    since: str = ""                        # first version that has it
    quantises: bool = False                # rounds queries and keys to 8 bits


@dataclass
class BackendUse:
    """Attention backend selected for a forward, and counts of the attention calls by backend."""

    name: str = SDPA                       # or a key of BACKENDS
    is_required: bool = False              # an unsupported call is an error; otherwise it runs on torch SDPA
    modules: dict = field(default_factory=dict)            # name -> the imported module, or why it cannot be used
    counts: Counter = field(default_factory=Counter)       # backend, with the reason if it is a fallback -> calls

    def exact(self):
        """This choice for a call with low_precision_attention=False: PyTorch SDPA instead of SageAttention, as in
        ComfyUI."""
        return self.unquantised() if self.name == "sage" else self

    def unquantised(self):
        """This choice for queries and keys of unequal magnitude: PyTorch SDPA instead of a backend that rounds them."""
        return BackendUse(counts=self.counts) if self.name in BACKENDS and BACKENDS[self.name].quantises else self


@functools.lru_cache
def _takes(function, argument):
    return argument in inspect.signature(function).parameters


def _flash(module, q_BTNH, k_BTNH, v_BTNH, bias, scale, with_lse):
    """FlashAttention 2 and 3 (github.com/Dao-AILab/flash-attention). Early releases of 3 always return (out, lse)."""
    requested = {"return_attn_probs": True} if with_lse and _takes(module.flash_attn_func, "return_attn_probs") else {}
    result = module.flash_attn_func(q_BTNH, k_BTNH, v_BTNH, softmax_scale=scale, causal=False, **requested)
    return result[:2] if isinstance(result, tuple) else (result, None)


def _sage(module, q_BTNH, k_BTNH, v_BTNH, bias, scale, with_lse):
    """SageAttention 1 and 2 (github.com/thu-ml/SageAttention), with ComfyUI's options."""
    result = module.sageattn(q_BTNH, k_BTNH, v_BTNH, is_causal=False, tensor_layout="NHD", sm_scale=scale,
                             smooth_k=False, **({"return_lse": True} if with_lse else {}))
    return result if with_lse else (result, None)


def _xformers(module, q_BTNH, k_BTNH, v_BTNH, bias, scale, with_lse):
    """xFormers (github.com/facebookresearch/xformers)."""
    if with_lse:
        return module.memory_efficient_attention_forward_requires_grad(q_BTNH, k_BTNH, v_BTNH, attn_bias=bias,
                                                                       scale=scale)
    return module.memory_efficient_attention(q_BTNH, k_BTNH, v_BTNH, attn_bias=bias, scale=scale), None


def _comfy_kitchen(module, q_BTNH, k_BTNH, v_BTNH, bias, scale, with_lse):
    """comfy-kitchen (github.com/Comfy-Org/comfy-kitchen). It computes float32 in bfloat16, as in ComfyUI."""
    out_BNTH = module.int8_attention(*(each.transpose(1, 2) for each in (q_BTNH, k_BTNH, v_BTNH)), scale=scale,
                                     attn_mask=bias)
    return out_BNTH.transpose(1, 2), None


# the names are choices of the setting as well: protocol.specs.ATTENTIONS and BackendChoice
BACKENDS = {
    "flash": AttentionBackend("FlashAttention 2", "flash_attn", "flash-attn", _flash),
    "flash3": AttentionBackend("FlashAttention 3", "flash_attn_interface", "flash-attn-3", _flash, (9, 0),
                               only_major=9),
    "sage": AttentionBackend("SageAttention", "sageattention", "sageattention", _sage, head_sizes=(64, 128),
                            gives_lse=lambda module: _takes(module.sageattn, "return_lse"), lse_since="2",
                            quantises=True),
    "xformers": AttentionBackend("xFormers", "xformers.ops", "xformers", _xformers, (6, 0),
                                dtypes=(*HALF, torch.float32), takes_groups=False, takes_masks=True),
    "comfy_kitchen_int8": AttentionBackend("comfy-kitchen's int8 attention", "comfy_kitchen", "comfy-kitchen",
                                           _comfy_kitchen, (7, 5), dtypes=(*HALF, torch.float32),
                                           head_sizes=(64, 128, 256), takes_masks=True,
                                           gives_lse=lambda module: False, function="int8_attention", since="0.2.31",
                                           quantises=True),
}


def unusable(device):
    """{backend: why it cannot run on this device, or ""}. Imports no package."""
    return {name: _why_absent(backend) or _why_not_on(backend, device) for name, backend in BACKENDS.items()}


def attend(q_BNTH, k_BNTH, v_BNTH, use, mask=None, is_causal=False, scale=None):
    """Drop-in for torch's scaled_dot_product_attention that runs the backend of a BackendUse.

    k and v may have fewer heads (grouped-query attention). Calls that the backend does not support run on torch SDPA;
    masked ones always may, others raise UnsupportedError if the backend is required.
    """
    if q_BNTH.dim() != 4:                                      # no dim of heads
        return F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, mask, 0.0, is_causal, scale=scale)
    if _fits(q_BNTH, k_BNTH, v_BNTH, use, mask, is_causal, False):
        return _run(q_BNTH, k_BNTH, v_BNTH, use, mask, scale, False)[0]
    return F.scaled_dot_product_attention(q_BNTH, *repeat_heads(q_BNTH, k_BNTH, v_BNTH), attn_mask=mask,
                                          is_causal=is_causal, scale=scale)


def attend_with_lse(q_BNTH, k_BNTH, v_BNTH, use, mask=None, scale=None):
    """Like `attend`, without causal masks; also returns the queries' log-sum-exp, (B, N, T, 1). See
    attention_with_lse."""
    if _fits(q_BNTH, k_BNTH, v_BNTH, use, mask, False, True):
        return _run(q_BNTH, k_BNTH, v_BNTH, use, mask, scale, True)
    return attention_with_lse(q_BNTH, *repeat_heads(q_BNTH, k_BNTH, v_BNTH), scale, mask)


def repeat_heads(q_BNTH, k_BNTH, v_BNTH):
    """Repeat key and value heads for grouped-query attention, up to the number of query heads."""
    repeats = q_BNTH.shape[1] // k_BNTH.shape[1]
    return ((k_BNTH, v_BNTH) if repeats == 1
            else (k_BNTH.repeat_interleave(repeats, 1), v_BNTH.repeat_interleave(repeats, 1)))


def _fits(q_BNTH, k_BNTH, v_BNTH, use, mask, is_causal, with_lse):
    """True if the selected backend supports this call. Counts the call under the backend that will run it."""
    if use.name == SDPA:
        use.counts[SDPA] += 1
        return False
    backend, brief = BACKENDS[use.name], ""
    if is_causal or (mask is not None and not backend.takes_masks):
        brief = "masks"
    elif not (q_BNTH.shape[2] and k_BNTH.shape[2]):
        brief = "no tokens"
    else:
        brief, reason = _misfit(backend, q_BNTH, v_BNTH, use, with_lse)
        if brief and use.is_required:
            raise UnsupportedError("Set attention to sdpa in xDiT Parallel Config, or remove the node that selects "
                                   f"{use.name}: {backend.title} {reason}.")
    use.counts[f"{SDPA} ({brief})" if brief else use.name] += 1
    return not brief


def _misfit(backend, q_BNTH, v_BNTH, use, with_lse):
    """(brief reason, full reason) why a backend does not support these tensors; ("", "") if it does."""
    module, head_size = _module(backend, use), q_BNTH.shape[3]
    if isinstance(module, str):
        return f"no {use.name}", module
    why = _why_not_on(backend, q_BNTH.device)
    if why:
        return "this device", why
    if q_BNTH.dtype not in backend.dtypes:
        dtype = _name(q_BNTH.dtype)
        return dtype, f"takes {', '.join(map(_name, backend.dtypes))}, and this model computes in {dtype}"
    if head_size > backend.head_sizes[-1] or v_BNTH.shape[3] != head_size:
        return f"heads of {head_size}", (f"takes a head size of at most {backend.head_sizes[-1]}, the same for queries "
                                         f"and values, and this model has {head_size} and {v_BNTH.shape[3]}")
    if with_lse and not backend.gives_lse(module):
        return "Ring", ("gives no log-sum-exp in the installed version, which ring_degree needs; with "
                        f"{backend.package} {backend.lse_since}, or ulysses_degree instead of ring_degree, it can be "
                        "used" if backend.lse_since else
                        "gives no log-sum-exp, which ring_degree needs; with ulysses_degree instead of ring_degree, it "
                        "can be used")
    return "", ""


def _run(q_BNTH, k_BNTH, v_BNTH, use, mask, scale, with_lse):
    """Run the package's attention; returns (out, like q; lse or None). Heads are zero-padded, which is exact."""
    backend, head_size, num_queries = BACKENDS[use.name], q_BNTH.shape[3], q_BNTH.shape[2]
    scale = head_size ** -0.5 if scale is None else scale
    if not backend.takes_groups:
        k_BNTH, v_BNTH = repeat_heads(q_BNTH, k_BNTH, v_BNTH)
    bias = mask
    if mask is not None:
        bias = aligned(as_bias(mask, q_BNTH.dtype) if mask.dtype == torch.bool else mask.to(q_BNTH.dtype), q_BNTH)
    missing = next(size for size in backend.head_sizes if size >= head_size) - head_size
    inputs = (F.pad(each, (0, missing)) if missing else each for each in (q_BNTH, k_BNTH, v_BNTH))
    # BNTH -> BTNH below; the packages require the head dim to be contiguous
    inputs = (each if each.stride(3) == 1 else each.contiguous() for each in inputs)
    try:
        out, lse = backend.call(use.modules[use.name], *(each.transpose(1, 2) for each in inputs), bias, scale,
                                with_lse)
    except REFUSALS as error:
        raise UnsupportedError("Set attention to sdpa in xDiT Parallel Config, or remove the node that selects "
                               f"{use.name}: {backend.title} rejects queries of shape {tuple(q_BNTH.shape)} and type "
                               f"{_name(q_BNTH.dtype)} ({type(error).__name__}: {str(error)[:200]}).") from error
    out = out.transpose(1, 2)[..., :head_size]
    return out, None if lse is None else lse[..., :num_queries, None]


def _module(backend, use):
    """The imported package, or a message (str) why it cannot be used."""
    if use.name not in use.modules:
        why = _why_absent(backend)
        try:
            module = use.modules[use.name] = why or importlib.import_module(backend.module)
            if not why and backend.function and not hasattr(module, backend.function):
                use.modules[use.name] = f"needs {backend.package} {backend.since} or newer"
        except Exception as error:                             # e.g. a package built for another torch
            use.modules[use.name] = (f"cannot be imported ({type(error).__name__}: {str(error)[:200]}): reinstall "
                                     f"{backend.package} for PyTorch {torch.__version__}")
    return use.modules[use.name]


def _why_absent(backend):
    found = importlib.util.find_spec(backend.module.partition(".")[0])
    return "" if found is not None and found.origin else f"is not installed (package {backend.package})"


def _why_not_on(backend, device):
    needed = ".".join(map(str, backend.capability))
    which = f"{backend.only_major}.x" if backend.only_major else f"{needed} and above"
    capability = capability_of(device)
    if capability is None or capability < backend.capability or backend.only_major not in (0, capability[0]):
        has = "is none" if capability is None else f"has {'.'.join(map(str, capability))}"
        return f"runs on CUDA devices of compute capability {which}, and {device} {has}"
    return ""


def capability_of(device):
    """Compute capability of a CUDA device; None for other devices, ROCm among them."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if is_cuda else None


def _name(dtype):
    return str(dtype).removeprefix("torch.")
