"""IP-Adapter as the pack ComfyUI_IPAdapter_plus puts it into a MODEL: an object in the place of each attention to the
text, with what each adapter was given there. Which of them are known, and why others are not. Asked by operations.py
and model.py.

An object is recognised by the file and name of what it calls, and by the names and values of what these are given; what
it computes is tested by run/adapters.py.
"""

import os

KIND = "attn2"                             # of ComfyUI's patches
FILE = "CrossAttentionPatch.py"
# what an adapter is given -> where the pack's own function is given nothing
GIVEN = {"module_key": "", "ipadapter": None, "weight": 1.0, "cond": None, "cond_alt": None, "uncond": None,
         "weight_type": "linear", "mask": None, "sigma_start": 0.0, "sigma_end": 1.0, "unfold_batch": False,
         "embeds_scaling": "V only"}
HELD = {"callback", "kwargs", "multigpu_kwargs"}               # the last: copies of kwargs on other devices
# kinds of weights that change from layer to layer
EASING = {"ease in": lambda share: 1 - share, "ease out": lambda share: share,
          "ease in-out": lambda share: 1 - abs(2 * share - 1), "reverse in-out": lambda share: abs(2 * share - 1)}
WEAK = {"weak input": {"input"}, "weak middle": {"middle"}, "weak output": {"output"},
        "strong middle": {"input", "output"}}
STYLE, COMPOSITION = "style transfer precise", "composition precise"
# the others are as "linear": where they mean something, the pack gives a weight for each layer
WEIGHT_TYPES = {"linear", *EASING, *WEAK, STYLE, COMPOSITION, "style transfer", "composition", "strong style transfer",
                "style and composition", "strong style and composition"}
SCALINGS = {"V only", "K+V", "K+V w/ C penalty", "K+mean(V) w/ C penalty"}


def why_refused(function):
    """What of an object in the place of attention to the text is not known, for a person; None where all is."""
    called = _named(type(function).__call__)
    if called == (FILE, "CrossAttentionPatch.__call__"):
        return "an IP-Adapter of an old ComfyUI_IPAdapter_plus, which is to be updated,"
    if called != (FILE, "Attn2Replace.__call__"):
        return f"what replaces attention to the text ({getattr(function, '__qualname__', type(function).__name__)})"
    for callback in function.callback:
        if _named(callback) != (FILE, "ipadapter_attention"):
            return f"what replaces attention to the text ({getattr(callback, '__qualname__', type(callback).__name__)})"
    unknown = sorted({name for given in (vars(function), *function.kwargs) for name in given} - HELD - {*GIVEN})
    if unknown:
        return f"what IP-Adapter is given here ({', '.join(unknown)})"
    return next((why for given in function.kwargs if (why := _value_refused(GIVEN | given))), None)


def _value_refused(given):
    for name in ("ipadapter", "cond", "uncond"):
        if given[name] is None:
            return f"an IP-Adapter without {name}"
    for name, known in (("weight_type", WEIGHT_TYPES), ("embeds_scaling", SCALINGS)):
        if given[name] not in known:
            return f"{name} {given[name]} of IP-Adapter"
    if isinstance(given["weight"], dict) and given["weight_type"] in {*EASING, *WEAK}:
        return f"weight_type {given['weight_type']} of IP-Adapter together with a weight for each layer"
    return None


def _named(function):
    code = getattr(function, "__code__", None)
    return code and (os.path.basename(code.co_filename), function.__qualname__)
