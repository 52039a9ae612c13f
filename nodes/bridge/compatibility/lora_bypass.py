"""LoRA in bypass mode: ComfyUI adds what it gives to what a layer gives, instead of to the layer's weight, by
injections into the modules. Its factors are read from these injections, and go to the workers as those of any LoRA.

Asked by model_options.py for what cannot be, and by model/weight_patches.py.
"""

import os

import torch

from comfy.weight_adapter import LoHaAdapter, LoKrAdapter, LoRAAdapter

INJECTS = "bypass.py", "BypassInjectionManager.create_injections.<locals>.inject_all"
# kinds whose way beside a layer is their change of its weight -> which of their tensors, where they are given, are for
# the weight alone
BESIDE = {LoRAAdapter: (4, 5), LoHaAdapter: (7,), LoKrAdapter: (8,)}       # the scale of DoRA, another shape
EXACT = (torch.float32, torch.bfloat16, torch.float16)


def bypassed(injections):
    """[(name of a weight, strength, adapter)] of a ModelPatcher's injections, in their order."""
    return [(f"{module}.weight", strength, adapter) for some in injections.values() for injection in some
            if (manager := _manager_of(injection)) is not None
            for module, (adapter, strength) in manager.adapters.items()]


def refused_injections(injections, storage_dtype):
    """What of a ModelPatcher's injections the workers do not carry out, in words. storage_dtype: of the weights."""
    unknown = [name for name, some in injections.items() if any(_manager_of(each) is None for each in some)]
    found = [f"injections such as a LoRA in bypass mode ({', '.join(unknown)})"] if unknown else []
    kinds = {type(adapter).__name__ for _, _, adapter in bypassed(injections)
             if not all(adapter.weights[index] is None for index in BESIDE.get(type(adapter), ()))
             or type(adapter) not in BESIDE}
    if kinds:
        found.append(f"a LoRA in bypass mode with layers of DoRA and the like ({', '.join(sorted(kinds))}), which Load "
                     "LoRA takes,")
    if bypassed(injections) and storage_dtype not in EXACT:
        found.append(f"a LoRA in bypass mode on weights of {str(storage_dtype).removeprefix('torch.')}, which Load "
                     "LoRA takes,")
    return found


def _manager_of(injection):
    """ComfyUI's object whose adapters an injection adds; None where it is another's."""
    function = injection.inject
    code = getattr(function, "__code__", None)
    if code is None or (os.path.basename(code.co_filename), function.__qualname__) != INJECTS:
        return None
    return function.__closure__[code.co_freevars.index("self")].cell_contents
