"""Adapters that show pictures to attention to the text: IP-Adapter, InstantID and PuLID, as the packs
ComfyUI_IPAdapter_plus, ComfyUI_InstantID and PuLID_ComfyUI put them into a MODEL: an object in the place of each such
attention, with what each adapter was given there. Which of them are known, and why others are not. Asked by
block_patches.py, model_options.py and sampling/image_adapters.py.

An object is recognised by the file and name of what it calls, and by the names and values of what these are given; what
it computes is tested by sampling/image_adapters.py.
"""

import os
from dataclasses import dataclass

KIND = "attn2"                             # of ComfyUI's patches
FILE, FACES = "CrossAttentionPatch.py", "pulid.py"
OF_FLUX = "PulidFluxHook.py"               # ComfyUI_PuLID_Flux_ll's
HOLDERS = {(file, "Attn2Replace.__call__") for file in (FILE, FACES)}
# functions that are called -> (what their node is for, its pack)
KNOWN = {(FILE, "ipadapter_attention"): ("IP-Adapter", "ComfyUI_IPAdapter_plus"),
         (FILE, "instantid_attention"): ("InstantID", "ComfyUI_InstantID"),
         (FACES, "pulid_attention"): ("PuLID", "PuLID_ComfyUI")}
OLD = {"CrossAttentionPatch": "an IP-Adapter of an old ComfyUI_IPAdapter_plus, which is to be updated,",
       "CrossAttentionPatchIID": "an InstantID of an old ComfyUI_InstantID, which is to be updated,"}
# what an adapter is given -> where the pack's own function is given nothing
GIVEN = {"module_key": "", "ipadapter": None, "weight": 1.0, "cond": None, "cond_alt": None, "uncond": None,
         "weight_type": "linear", "mask": None, "sigma_start": 0.0, "sigma_end": 1.0, "unfold_batch": False,
         "embeds_scaling": "V only"}
# PuLID: the same, of which some has no meaning; what "ipadapter" is has another name
OF_FACES = {"module_key": "", "pulid": None, "weight": 1.0, "cond": None, "uncond": None, "mask": None,
            "sigma_start": 0.0, "sigma_end": 1.0, "ortho": False, "ortho_v2": False}
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


@dataclass(frozen=True)
class Adapter:
    """One in the place of an attention to the text."""

    node: str                              # "PuLID"
    pack: str                              # "PuLID_ComfyUI"
    given: dict                            # the pack's own, which lives as long as the MODEL

    @property
    def settings(self):
        """What it was given and what not, under the names that IP-Adapter has for it."""
        given = OF_FACES | self.given if self.node == "PuLID" else self.given
        return GIVEN | given | {"ipadapter": given.get("pulid", given.get("ipadapter"))}


def adapters_at(function, sigma):
    """The Adapters of an object, which is known, that act at a noise level."""
    return tuple(Adapter(*KNOWN[_named(callback)], given) for callback, given in zip(function.callback, function.kwargs)
                 if given.get("sigma_end", 1.0) <= sigma <= given.get("sigma_start", 0.0))


def why_refused(function):
    """What of an object in the place of attention to the text is not known, for a person; None where all is."""
    called = _named(type(function).__call__)
    if called not in HOLDERS:
        return OLD.get(type(function).__name__) or _unknown(function)
    for callback in function.callback:
        if _named(callback) not in KNOWN:
            return _unknown(callback)
    unknown = {*vars(function)} - HELD - {*GIVEN, *OF_FACES}
    for callback, given in zip(function.callback, function.kwargs):
        unknown |= {*given} - {*(OF_FACES if _named(callback)[0] == FACES else GIVEN)}
    if unknown:
        return f"what {KNOWN[_named(function.callback[-1])][0]} is given here ({', '.join(sorted(unknown))})"
    return next((why for callback, given in zip(function.callback, function.kwargs)
                 if (why := _value_refused(Adapter(*KNOWN[_named(callback)], given)))), None)


def is_of_flux(function):
    """Does PuLID for Flux put this in the place of a block?"""
    called = _named(function) or _named(type(function).__call__)
    return bool(called) and called[0] == OF_FLUX


def _unknown(function):
    return f"what replaces attention to the text ({getattr(function, '__qualname__', type(function).__name__)})"


def _value_refused(adapter):
    given, node = adapter.settings, adapter.node
    for name in ("ipadapter", "cond", "uncond"):
        if given[name] is None:
            return f"{node} without {name}"
    for name, known in (("weight_type", WEIGHT_TYPES), ("embeds_scaling", SCALINGS)):
        if given[name] not in known:
            return f"{name} {given[name]} of {node}"
    if isinstance(given["weight"], dict) and given["weight_type"] in {*EASING, *WEAK}:
        return f"weight_type {given['weight_type']} of {node} together with a weight for each layer"
    return None


def _named(function):
    code = getattr(function, "__code__", None)
    return code and (os.path.basename(code.co_filename), function.__qualname__)
