"""LoRA in bypass mode: ComfyUI adds the adapter's output to the layer's output instead of patching its weight, by
injections into the modules. The factors are read from these injections and sent to the workers like those of any LoRA.
"""

import os

import torch

from comfy.weight_adapter import LoHaAdapter, LoKrAdapter, LoRAAdapter

INJECTS = "bypass.py", "BypassInjectionManager.create_injections.<locals>.inject_all"
# adapters whose bypass equals their weight patch -> indices of tensors that, if present, apply to the weight only: the
# scale of DoRA, another shape
WEIGHT_ONLY = {LoRAAdapter: (4, 5), LoHaAdapter: (7,), LoKrAdapter: (8,)}
EXACT = (torch.float32, torch.bfloat16, torch.float16)


def bypassed(injections):
    """Return [(name of a weight, strength, adapter)] of a ModelPatcher's injections in their order."""
    return [(f"{module}.weight", strength, adapter) for some in injections.values() for injection in some
            if (manager := _manager_of(injection)) is not None
            for module, (adapter, strength) in manager.adapters.items()]


def refused_injections(injections, storage_dtype):
    """Describe the injections of a ModelPatcher that the workers do not support. storage_dtype: of the weights."""
    unknown = [name for name, some in injections.items() if any(_manager_of(each) is None for each in some)]
    found = [f"injections such as a LoRA in bypass mode ({', '.join(unknown)})"] if unknown else []
    kinds = {type(adapter).__name__ for _, _, adapter in bypassed(injections)
             if not all(adapter.weights[index] is None for index in WEIGHT_ONLY.get(type(adapter), ()))
             or type(adapter) not in WEIGHT_ONLY}
    if kinds:
        found.append(f"a LoRA in bypass mode with layers of DoRA or similar types ({', '.join(sorted(kinds))}), which "
                     "Load LoRA supports,")
    if bypassed(injections) and storage_dtype not in EXACT:
        found.append(f"a LoRA in bypass mode on weights of {str(storage_dtype).removeprefix('torch.')}, which Load "
                     "LoRA supports,")
    return found


def _manager_of(injection):
    """ComfyUI's object whose adapters an injection adds; None for an injection of another kind."""
    function = injection.inject
    code = getattr(function, "__code__", None)
    if code is None or (os.path.basename(code.co_filename), function.__qualname__) != INJECTS:
        return None
    return function.__closure__[code.co_freevars.index("self")].cell_contents
