"""Nodes of other packs whose changes of a MODEL cannot be applied, with the node to use instead. They are known by
their class before a run, and by their functions in a run.
"""

import types

from ....xdit_backend.protocol.errors import UnsupportedError

SLG = "SkipLayerGuidanceWanVideo"
CACHES = {"ApplyFBCacheOnModel": "Apply First Block Cache", "TeaCache": "TeaCache"}
# variables that the functions of these nodes close over, among others
VARIABLES = {"ApplyFBCacheOnModel": {"ensure_cache_state", "reset_cache_state", "update_cache_state"},
             "TeaCache": {"context", "diffusion_model", "is_cfg"}, SLG: {"start_percent", "end_percent"}}
WRAPPER = "model_function_wrapper"


def message_of_node(class_type):
    """Message with which a run rejects what a node does to a MODEL, or None."""
    if class_type == SLG:
        return ("Use SkipLayerGuidanceDiT or SkipLayerGuidanceDiTSimple instead of SkipLayerGuidanceWanVideo: it needs "
                "options that ComfyUI does not pass to it, so that a run fails with Load Diffusion Model too.")
    if class_type in CACHES:
        return (f"Use EasyCache or LazyCache instead of {CACHES[class_type]}, or Load Diffusion Model: it replaces the "
                "model's blocks on one device during each call, and they are on xDiT's workers.")
    return None


def refuse_nodes(model_options):
    """Raise UnsupportedError if the options of a MODEL have a function of such a node."""
    found = next((name for name in CACHES if _closes_over(model_options.get(WRAPPER), name)), None)
    replaced = model_options.get("transformer_options", {}).get("patches_replace", {}).get("dit", {})
    if any(_closes_over(function, SLG) and _fails(function) for function in replaced.values()):
        found = SLG
    if found is not None:
        raise UnsupportedError(message_of_node(found))


def _closes_over(function, name):
    return isinstance(function, types.FunctionType) and VARIABLES[name] <= {*function.__code__.co_freevars}


def _fails(function):
    """Whether the function of a block fails with what ComfyUI's models pass to it."""
    try:
        function({"img": None, "transformer_options": {}}, {"original_block": lambda arguments: arguments})
    except ValueError:
        return True
    except Exception:                                          # of the arguments, which are not tensors
        return False
    return False
