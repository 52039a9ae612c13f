"""Stand-ins of the packages that compute attention, with their signatures, layouts and demands, in torch's own
arithmetic. Written into a folder that tests, ranks and workers have on their path.

# B batch, N heads, T tokens, H head size
"""

import dataclasses
import importlib
import sys

import torch

from xdit_backend.attention import backends

COMMON = """
import sys
import torch
calls = []
DTYPES = (torch.float16, torch.bfloat16, torch.float64)        # the last: for tests of exactness

def attend(q, k, v, scale, bias=None):
    # (B, T, N, H) -> (out like q, lse (B, N, T) in natural logarithms)
    assert q.dtype == k.dtype == v.dtype and q.shape[0] == k.shape[0] == v.shape[0] and k.shape == v.shape
    assert all(each.stride(3) == 1 for each in (q, k, v)) and q.shape[2] % k.shape[2] == 0
    exact = torch.promote_types(q.dtype, torch.float32)
    q_, k_, v_ = (each.transpose(1, 2).to(exact) for each in (q, k, v))
    k_, v_ = (each.repeat_interleave(q_.shape[1] // k_.shape[1], 1) for each in (k_, v_))
    scores = q_ @ k_.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias.to(exact)
    out = (scores.softmax(-1) @ v_).transpose(1, 2).to(q.dtype).contiguous()
    return out, scores.logsumexp(-1).to(torch.promote_types(torch.float32, exact))
"""
FLASH = COMMON + """
def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    assert q.dtype in DTYPES and q.shape[3] <= 256 and q.shape[3] % 8 == 0 and not causal and not dropout_p
    calls.append({"softmax_scale": softmax_scale, "causal": causal})
    out, lse = attend(q, k, v, softmax_scale)
    return (out, lse, None) if return_attn_probs else out
"""
FLASH3 = COMMON + """
def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                    deterministic=False, sm_margin=0, return_attn_probs=False):
    assert q.dtype in DTYPES and not causal
    out, lse = attend(q, k, v, softmax_scale)
    return (out, lse) if return_attn_probs else out
"""
SAGE2 = COMMON + """
def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, **kwargs):
    assert q.dtype in DTYPES and q.shape[3] in (64, 128) and not is_causal
    calls.append({"tensor_layout": tensor_layout, "is_causal": is_causal, "sm_scale": sm_scale, **kwargs})
    if tensor_layout == "HND":
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    out, lse = attend(q, k, v, sm_scale)
    out = out.transpose(1, 2) if tensor_layout == "HND" else out
    return (out, lse) if return_lse else out
"""
SAGE1 = SAGE2.replace("return_lse=False, **kwargs", "smooth_k=True, **kwargs").replace("(out, lse) if return_lse else ",
                                                                                       "")
XFORMERS = COMMON + """
def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    assert query.dtype in (*DTYPES, torch.float32) and query.shape[2] == key.shape[2] and query.shape[3] % 8 == 0
    assert attn_bias is None or (attn_bias.shape == (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
                                 and attn_bias.stride(-2) % 8 == 0 and attn_bias.dtype == query.dtype)
    return attend(query, key, value, scale, attn_bias)[0]

def memory_efficient_attention_forward_requires_grad(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None):
    assert query.shape[2] == key.shape[2]
    out, lse = attend(query, key, value, scale, attn_bias)
    return out, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32))
"""
COMFY_KITCHEN = COMMON + """
def int8_attention(q, k, v, *, scale=None, attn_mask=None):
    # (B, N, T, H)
    assert q.dtype in (*DTYPES, torch.float32) and q.shape[3] <= 256
    calls.append({"scale": scale, "attn_mask": attn_mask})
    return attend(*(each.transpose(1, 2) for each in (q, k, v)), scale, attn_mask)[0].transpose(1, 2)
"""
# of a name of its own: other code has imported the real package
DOUBLE = "comfy_kitchen_double"
PACKAGES = {"flash_attn/__init__.py": FLASH, "flash_attn_interface.py": FLASH3, "sageattention/__init__.py": SAGE2,
            "xformers/__init__.py": "", "xformers/ops.py": XFORMERS, f"{DOUBLE}.py": COMFY_KITCHEN}
HOPPER = 9, 0
# what a worker does when it starts: its device counts as such a card
ON_HOPPER = f"""
import dataclasses
from xdit_backend.attention import backends as kernels
kernels.capability_of = lambda device: (9, 0)
double = dataclasses.replace(kernels.BACKENDS["comfy_kitchen_int8"], module="{DOUBLE}")
kernels.BACKENDS["comfy_kitchen_int8"] = double
"""


def write(folder, **others):
    """Write the packages there. others: {file, "/" as "__": its text} in their place."""
    for name, text in (PACKAGES | others).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def forget():
    """In this process, no such package has been imported."""
    names = {name.partition("/")[0].removesuffix(".py") for name in PACKAGES}
    for loaded in [each for each in sys.modules if each.partition(".")[0] in names]:
        del sys.modules[loaded]


def use(folder, exact=True):
    """In this process: packages of this folder are found, its CPU counts as a card that all run on, and they take
    float64 too."""
    forget()
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    backends.capability_of = lambda device: HOPPER
    double = dataclasses.replace(backends.BACKENDS["comfy_kitchen_int8"], module=DOUBLE)
    backends.BACKENDS["comfy_kitchen_int8"] = double
    packages = {name: kernel for name, kernel in backends.BACKENDS.items() if kernel.module}
    for name, kernel in packages.items() if exact else ():
        backends.BACKENDS[name] = dataclasses.replace(kernel, dtypes=(*kernel.dtypes, torch.float64))
