"""Attention backends of a rank: the packages FlashAttention, SageAttention, xFormers and comfy-kitchen, and torch's
operators.

# B batch, N heads, T tokens, H head size
"""

import bisect
import functools
import importlib
import importlib.util
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from ..protocol.errors import UnsupportedError
from ..protocol.specs import SDPA, operator_key
from .masks import as_bias

log = logging.getLogger(__name__)

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
MAX_HEAD_SIZE = 2 ** 16                    # of operators without a limit

# raised by the packages for tensors that they do not support
REFUSALS = (AssertionError, NotImplementedError, TypeError, ValueError)


@dataclass(frozen=True)
class AttentionBackend:
    """A package's attention function, or one of torch's attention operators, and its constraints.

    call(module, q, k, v, bias, scale, with_lse), with q, k, v of shape (B, T, N, H) and bias (B, N, T, T) or None,
    returns (out, lse): (B, T, N, H), and (B, N, T) or None. Further elements of lse's last dim are dropped.
    """

    title: str
    module: str                            # to import; "": an operator of torch's
    package: str                           # to install
    call: Callable
    # lowest CUDA compute capability; None: it runs on CPUs only
    capability: tuple[int, int] | None = (8, 0)
    majors: tuple[int, ...] = ()           # the supported major capabilities; (): all
    dtypes: tuple = HALF                   # (): all
    head_sizes: Sequence[int] = range(8, 257, 8)           # other head sizes are padded to the next one
    takes_groups: bool = True              # supports grouped-query attention
    takes_masks: bool = False
    gives_lse: Callable = lambda module: True              # whether the installed version returns log-sum-exp
    lse_since: str = ""                    # first version that does, where an older one runs; "": none
    function: str = ""                     # attribute of the module that older versions lack
    since: str = ""                        # first version that has it
    quantises: bool = False                # rounds queries and keys to 8 bits
    min_keys: int = 1
    computes_in: torch.dtype | None = None                 # dtype that the tensors are cast to; None: their own

    def runs_on(self, capability):
        """Whether it runs on a device of this CUDA compute capability; None: a CPU."""
        if self.capability is None or capability is None:
            return self.capability is None and capability is None
        return capability >= self.capability and (not self.majors or capability[0] in self.majors)

    def padded(self, head_size):
        """The head size to which this one is zero-padded; None: it is not supported."""
        index = bisect.bisect_left(self.head_sizes, head_size)
        return self.head_sizes[index] if index < len(self.head_sizes) else None

    def supports(self, dtype, head_size, num_keys, capability, masked):
        """Whether it computes attention of such tensors. masked: with a mask of the keys."""
        return (self.runs_on(capability) and (not self.dtypes or dtype in self.dtypes)
                and self.padded(head_size) is not None and num_keys >= self.min_keys
                and (self.takes_masks or not masked))


@dataclass
class BackendUse:
    """Attention backend selected for a forward, and counts of the attention calls by backend."""

    name: str = SDPA                       # or a key of BACKENDS
    is_required: bool = False              # an unsupported call is an error; otherwise it runs on torch SDPA
    modules: dict = field(default_factory=dict)            # name -> the imported module, or why it cannot be used
    counts: Counter = field(default_factory=Counter)       # backend, with the reason if it is a fallback -> calls
    fastest: dict = field(default_factory=dict)            # see specs.BackendChoice

    @property
    def is_default(self):
        """Whether every call runs on torch SDPA."""
        return self.name == SDPA and not self.fastest

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


def _operator(function):
    """The `call` of one of torch's operators. function: (q, k, v, bias, scale), with (B, N, T, H) -> (out, lse)."""
    def call(module, q_BTNH, k_BTNH, v_BTNH, bias, scale, with_lse):
        out, lse = function(*(each.transpose(1, 2) for each in (q_BTNH, k_BTNH, v_BTNH)), bias, scale)
        return out.transpose(1, 2), lse.flatten(2)             # cuDNN's has a last dim of 1
    return call


@_operator
def _torch_cpu(q_BNTH, k_BNTH, v_BNTH, bias, scale):
    return aten._scaled_dot_product_flash_attention_for_cpu(q_BNTH, k_BNTH, v_BNTH, attn_mask=bias, scale=scale)


@_operator
def _torch_cudnn(q_BNTH, k_BNTH, v_BNTH, bias, scale):
    return aten._scaled_dot_product_cudnn_attention(q_BNTH, k_BNTH, v_BNTH, bias, True, scale=scale)[:2]


@_operator
def _torch_flash(q_BNTH, k_BNTH, v_BNTH, bias, scale):
    return aten._scaled_dot_product_flash_attention(q_BNTH, k_BNTH, v_BNTH, scale=scale)[:2]


@_operator
def _torch_efficient(q_BNTH, k_BNTH, v_BNTH, bias, scale):
    """Pads lse to a multiple of 32."""
    return aten._scaled_dot_product_efficient_attention(q_BNTH, k_BNTH, v_BNTH, bias, True, scale=scale)[:2]


EFFICIENT = functools.partial(AttentionBackend, "torch SDPA (memory-efficient)", "", "", _torch_efficient,
                              takes_groups=False, takes_masks=True)

# Packages, whose names are choices of the setting as well: protocol.specs.ATTENTIONS and BackendChoice. Then torch's
# operators that return a log-sum-exp, fastest first, with the limits of torch 2.11; all need rows of a multiple of 16
# bytes. torch SDPA prefers cuDNN on Hopper and data-centre Blackwell.
BACKENDS = {
    "flash": AttentionBackend("FlashAttention 2", "flash_attn", "flash-attn", _flash),
    "flash3": AttentionBackend("FlashAttention 3", "flash_attn_interface", "flash-attn-3", _flash, (9, 0),
                               majors=(9,)),
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
    "torch_cpu": AttentionBackend("torch SDPA (CPU)", "", "", _torch_cpu, None, dtypes=(),
                                  head_sizes=range(1, MAX_HEAD_SIZE), takes_groups=False, takes_masks=True),
    "torch_cudnn": AttentionBackend("torch SDPA (cuDNN)", "", "", _torch_cudnn, majors=(9, 10),
                                    head_sizes=range(8, 129, 8), takes_groups=False, min_keys=2),
    "torch_flash": AttentionBackend("torch SDPA (flash)", "", "", _torch_flash, takes_groups=False),
    "torch_efficient": EFFICIENT(head_sizes=range(8, MAX_HEAD_SIZE, 8)),
    "torch_efficient_fp16": EFFICIENT((0, 0), dtypes=(torch.float16,), head_sizes=range(8, MAX_HEAD_SIZE, 8)),
    "torch_efficient_fp32": EFFICIENT((0, 0), dtypes=(torch.float32, torch.bfloat16),
                                       head_sizes=range(4, MAX_HEAD_SIZE, 4), computes_in=torch.float32),
}


def unusable(device):
    """{backend: why it cannot run on this device, or ""}. Imports no package."""
    return {name: _why_absent(backend) or _why_not_on(backend, device)
            for name, backend in BACKENDS.items() if backend.module}


def attend(q_BNTH, k_BNTH, v_BNTH, use, mask=None, is_causal=False, scale=None):
    """Drop-in for torch's scaled_dot_product_attention that runs the backend of a BackendUse.

    k and v may have fewer heads (grouped-query attention). Calls that the backend does not support run on torch SDPA;
    masked ones always may, others raise UnsupportedError if the backend is required.
    """
    if q_BNTH.dim() != 4:                                      # no dim of heads
        return F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, mask, 0.0, is_causal, scale=scale)
    found = None if mask is not None or is_causal else _by_fastest(q_BNTH, k_BNTH, v_BNTH, use, scale, False)
    if found is not None:
        return found[0]
    if _fits(q_BNTH, k_BNTH, v_BNTH, use, mask, is_causal, False):
        return _run_package(q_BNTH, k_BNTH, v_BNTH, use, mask, scale, False)[0]
    return F.scaled_dot_product_attention(q_BNTH, *repeat_heads(q_BNTH, k_BNTH, v_BNTH), attn_mask=mask,
                                          is_causal=is_causal, scale=scale)


def attend_with_lse(q_BNTH, k_BNTH, v_BNTH, use, mask=None, scale=None):
    """Like `attend`, without causal masks; also returns the queries' log-sum-exp, (B, N, T, 1). See
    attention_with_lse."""
    found = None if mask is not None else _by_fastest(q_BNTH, k_BNTH, v_BNTH, use, scale, True)
    if found is not None:
        return found
    if _fits(q_BNTH, k_BNTH, v_BNTH, use, mask, False, True):
        return _run_package(q_BNTH, k_BNTH, v_BNTH, use, mask, scale, True)
    return attention_with_lse(q_BNTH, k_BNTH, v_BNTH, scale, mask)


def attention_with_lse(q_BNTH, k_BNTH, v_BNTH, scale=None, mask=None):
    """Softmax attention by one of torch's operators; returns (out, lse).

    mask: (B, 1, 1, T) bool, True for keys to attend to. out: like q. lse: (B, N, T, 1), float32, or float64 on CPUs
    for float64 inputs. If all keys are masked, out is a mean of the values and lse so low that a merge ignores it.
    """
    capability = torch.cuda.get_device_capability(q_BNTH.device) if q_BNTH.is_cuda else None
    has_cudnn = capability is not None and torch.version.hip is None and torch.backends.cudnn.is_available()
    name = torch_backend(q_BNTH.dtype, q_BNTH.shape[-1], k_BNTH.shape[2], capability, has_cudnn, mask is not None)
    return run_backend(BACKENDS[name], None, q_BNTH, k_BNTH, v_BNTH, mask, scale, True)


def torch_backend(dtype, head_size, num_keys, capability=None, has_cudnn=False, masked=False):
    """The key in BACKENDS of the fastest of torch's operators that returns a log-sum-exp for such tensors.

    capability: of the CUDA device; None: CPU. Raises UnsupportedError if none supports them.
    """
    for name, backend in BACKENDS.items():
        if (not backend.module and backend.supports(dtype, head_size, num_keys, capability, masked)
                and (has_cudnn or name != "torch_cudnn")):
            return name
    raise UnsupportedError("Use ulysses_degree instead of ring_degree, or another weight_dtype: Ring attention on "
                           f"CUDA takes float16, bfloat16 and float32, and this model computes in {dtype}.")


def run_backend(backend, module, q_BNTH, k_BNTH, v_BNTH, mask, scale, with_lse):
    """Attention by an entry of BACKENDS; returns (out, like q; lse, (B, N, T, 1), or None). module: the imported
    package; None for torch's operators. Heads are zero-padded, which is exact."""
    head_size, num_queries, dtype = q_BNTH.shape[3], q_BNTH.shape[2], q_BNTH.dtype
    scale = head_size ** -0.5 if scale is None else scale
    if not backend.takes_groups:
        k_BNTH, v_BNTH = repeat_heads(q_BNTH, k_BNTH, v_BNTH)
    inputs = [each.to(backend.computes_in or dtype) for each in (q_BNTH, k_BNTH, v_BNTH)]
    bias = mask
    if mask is not None:
        bias = as_bias(mask, inputs[0].dtype) if mask.dtype == torch.bool else mask.to(inputs[0].dtype)
        bias = aligned(bias, q_BNTH)
    missing = backend.padded(head_size) - head_size
    inputs = [F.pad(each, (0, missing)) if missing else each for each in inputs]
    # BNTH -> BTNH below; the packages require the head dim to be contiguous
    inputs = [each if each.stride(3) == 1 else each.contiguous() for each in inputs]
    out, lse = backend.call(module, *(each.transpose(1, 2) for each in inputs), bias, scale, with_lse)
    out = out.transpose(1, 2)[..., :head_size].to(dtype)
    return out, None if lse is None else lse[..., :num_queries, None]


def aligned(bias, q_BNTH):
    """Expand a bias to all heads and queries, with rows padded in memory to a multiple of 16 elements as the kernels
    require."""
    row = F.pad(bias, (0, -bias.shape[-1] % 16))[..., :bias.shape[-1]]
    return row.expand(-1, q_BNTH.shape[1], q_BNTH.shape[2], -1)


def repeat_heads(q_BNTH, k_BNTH, v_BNTH):
    """Repeat key and value heads for grouped-query attention, up to the number of query heads."""
    repeats = q_BNTH.shape[1] // k_BNTH.shape[1]
    return ((k_BNTH, v_BNTH) if repeats == 1
            else (k_BNTH.repeat_interleave(repeats, 1), v_BNTH.repeat_interleave(repeats, 1)))


def _by_fastest(q_BNTH, k_BNTH, v_BNTH, use, scale, with_lse):
    """`run_backend` by the measured fastest operator for an unmasked call; None where the usual backend computes it: no
    operator was timed for such tensors, or it does not support them. The result is the same up to rounding."""
    key = operator_key(q_BNTH.shape[3], k_BNTH.shape[2], with_lse) if use.fastest else None
    name = use.fastest.get(key, SDPA)
    if name == SDPA or not (q_BNTH.shape[2] and k_BNTH.shape[2]):
        return None
    backend, chosen = BACKENDS[name], replace(use, name=name)
    if any(_misfit(backend, q_BNTH, v_BNTH, chosen, with_lse)) or k_BNTH.shape[2] < backend.min_keys:
        return None
    try:
        found = run_backend(backend, use.modules[name], q_BNTH, k_BNTH, v_BNTH, None, scale, with_lse)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, *REFUSALS) as error:                 # such as cuDNN's, where it has no plan for a shape
        use.modules[name] = f"failed ({type(error).__name__}: {str(error)[:200]})"
        log.warning("attention by %s %s: it runs on %s instead", name, use.modules[name], use.name)
        return None
    use.counts[name] += 1
    return found


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
    if backend.dtypes and q_BNTH.dtype not in backend.dtypes:
        dtype = _name(q_BNTH.dtype)
        return dtype, f"takes {', '.join(map(_name, backend.dtypes))}, and this model computes in {dtype}"
    if backend.padded(head_size) is None or v_BNTH.shape[3] != head_size:
        return f"heads of {head_size}", (f"takes a head size of at most {backend.head_sizes[-1]}, the same for queries "
                                         f"and values, and this model has {head_size} and {v_BNTH.shape[3]}")
    if with_lse and not backend.gives_lse(module):
        return "Ring", ("gives no log-sum-exp in the installed version, which ring_degree needs; with "
                        f"{backend.package} {backend.lse_since}, or ulysses_degree instead of ring_degree, it can be "
                        "used" if backend.lse_since else
                        "gives no log-sum-exp, which ring_degree needs; with ulysses_degree instead of ring_degree, it "
                        "can be used")
    return "", ""


def _run_package(q_BNTH, k_BNTH, v_BNTH, use, mask, scale, with_lse):
    """`run_backend` by the package of a BackendUse. Raises UnsupportedError for tensors that it rejects."""
    backend = BACKENDS[use.name]
    try:
        return run_backend(backend, use.modules[use.name], q_BNTH, k_BNTH, v_BNTH, mask, scale, with_lse)
    except REFUSALS as error:
        raise UnsupportedError("Set attention to sdpa in xDiT Parallel Config, or remove the node that selects "
                               f"{use.name}: {backend.title} rejects queries of shape {tuple(q_BNTH.shape)} and type "
                               f"{_name(q_BNTH.dtype)} ({type(error).__name__}: {str(error)[:200]}).") from error


def _module(backend, use):
    """The imported package, None for torch's operators, or a message (str) why it cannot be used."""
    if not backend.module:
        return use.modules.setdefault(use.name, None)
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
    capability = capability_of(device)
    if backend.runs_on(capability):
        return ""
    which = (" or ".join(f"{major}.x" for major in backend.majors)
             or f"{'.'.join(map(str, backend.capability))} and above")
    has = "is none" if capability is None else f"has {'.'.join(map(str, capability))}"
    return f"runs on CUDA devices of compute capability {which}, and {device} {has}"


def capability_of(device):
    """Compute capability of a CUDA device; None for other devices, ROCm among them."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if is_cuda else None


def _name(dtype):
    return str(dtype).removeprefix("torch.")
