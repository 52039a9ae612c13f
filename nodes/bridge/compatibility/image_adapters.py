"""Image adapters of text cross-attention: IP-Adapter, InstantID and PuLID of the packs ComfyUI_IPAdapter_plus,
ComfyUI_InstantID and PuLID_ComfyUI. The packs replace each such attention by an object with the arguments of its
adapters.

An object is recognised by the file and name of the functions that it calls, and by the names and values of their
arguments; sampling/image_adapters.py tests what it computes. For unknown objects there is a reason.
"""

import os
from dataclasses import dataclass

KIND = "attn2"                             # of ComfyUI's patches
FILE, PULID_FILE = "CrossAttentionPatch.py", "pulid.py"
OF_FLUX = "PulidFluxHook.py"               # ComfyUI_PuLID_Flux_ll's
HOLDERS = {(file, "Attn2Replace.__call__") for file in (FILE, PULID_FILE)}
# called functions -> (their node's purpose, its pack)
KNOWN = {(FILE, "ipadapter_attention"): ("IP-Adapter", "ComfyUI_IPAdapter_plus"),
         (FILE, "instantid_attention"): ("InstantID", "ComfyUI_InstantID"),
         (PULID_FILE, "pulid_attention"): ("PuLID", "PuLID_ComfyUI")}
OLD = {"CrossAttentionPatch": "an IP-Adapter of an old ComfyUI_IPAdapter_plus, which should be updated,",
       "CrossAttentionPatchIID": "an InstantID of an old ComfyUI_InstantID, which should be updated,"}
# arguments of an adapter -> defaults of the pack's own function
DEFAULTS = {"module_key": "", "ipadapter": None, "weight": 1.0, "cond": None, "cond_alt": None, "uncond": None,
            "weight_type": "linear", "mask": None, "sigma_start": 0.0, "sigma_end": 1.0, "unfold_batch": False,
            "embeds_scaling": "V only"}
# the same for PuLID, whose "pulid" is what "ipadapter" is; some have no effect
PULID_DEFAULTS = {"module_key": "", "pulid": None, "weight": 1.0, "cond": None, "uncond": None, "mask": None,
                  "sigma_start": 0.0, "sigma_end": 1.0, "ortho": False, "ortho_v2": False}
ATTRIBUTES = {"callback", "kwargs", "multigpu_kwargs"}         # of a known object; the last: kwargs for other devices
# weight types that change from layer to layer, by the relative depth of the layer
EASING = {"ease in": lambda depth: 1 - depth, "ease out": lambda depth: depth,
          "ease in-out": lambda depth: 1 - abs(2 * depth - 1), "reverse in-out": lambda depth: abs(2 * depth - 1)}
WEAK = {"weak input": {"input"}, "weak middle": {"middle"}, "weak output": {"output"},
        "strong middle": {"input", "output"}}
STYLE, COMPOSITION = "style transfer precise", "composition precise"
# the others are equal to "linear": if they have an effect, the pack sets a weight for each layer
WEIGHT_TYPES = {"linear", *EASING, *WEAK, STYLE, COMPOSITION, "style transfer", "composition", "strong style transfer",
                "style and composition", "strong style and composition"}
SCALINGS = {"V only", "K+V", "K+V w/ C penalty", "K+mean(V) w/ C penalty"}


@dataclass(frozen=True)
class Adapter:
    """One adapter of a replaced text cross-attention."""

    node: str                              # "PuLID"
    pack: str                              # "PuLID_ComfyUI"
    arguments: dict                        # the pack's own object, which lives as long as the MODEL

    @property
    def settings(self):
        """All arguments, with defaults, under the names of IP-Adapter's."""
        arguments = PULID_DEFAULTS | self.arguments if self.node == "PuLID" else self.arguments
        return DEFAULTS | arguments | {"ipadapter": arguments.get("pulid", arguments.get("ipadapter"))}


def adapters_at(function, sigma):
    """Return the Adapters of a known object that are active at this sigma."""
    return tuple(Adapter(*KNOWN[_named(callback)], arguments)
                 for callback, arguments in zip(function.callback, function.kwargs)
                 if arguments.get("sigma_end", 1.0) <= sigma <= arguments.get("sigma_start", 0.0))


def why_refused(function):
    """Describe what is unknown of an object that replaces text cross-attention, for the user; None if nothing is."""
    called = _named(type(function).__call__)
    if called not in HOLDERS:
        return OLD.get(type(function).__name__) or _unknown(function)
    for callback in function.callback:
        if _named(callback) not in KNOWN:
            return _unknown(callback)
    unknown = {*vars(function)} - ATTRIBUTES - {*DEFAULTS, *PULID_DEFAULTS}
    for callback, arguments in zip(function.callback, function.kwargs):
        unknown |= {*arguments} - {*(PULID_DEFAULTS if _named(callback)[0] == PULID_FILE else DEFAULTS)}
    if unknown:
        return f"{KNOWN[_named(function.callback[-1])][0]} with unknown arguments ({', '.join(sorted(unknown))})"
    return next((why for callback, arguments in zip(function.callback, function.kwargs)
                 if (why := _value_refused(Adapter(*KNOWN[_named(callback)], arguments)))), None)


def is_of_flux(function):
    """Whether this is PuLID for Flux's replacement of a block."""
    called = _named(function) or _named(type(function).__call__)
    return bool(called) and called[0] == OF_FLUX


def _unknown(function):
    return f"a replaced text cross-attention ({getattr(function, '__qualname__', type(function).__name__)})"


def _value_refused(adapter):
    settings, node = adapter.settings, adapter.node
    for name in ("ipadapter", "cond", "uncond"):
        if settings[name] is None:
            return f"{node} without {name}"
    for name, known in (("weight_type", WEIGHT_TYPES), ("embeds_scaling", SCALINGS)):
        if settings[name] not in known:
            return f"{name} {settings[name]} of {node}"
    if isinstance(settings["weight"], dict) and settings["weight_type"] in {*EASING, *WEAK}:
        return f"weight_type {settings['weight_type']} of {node} together with a weight for each layer"
    return None


def _named(function):
    code = getattr(function, "__code__", None)
    return code and (os.path.basename(code.co_filename), function.__qualname__)
