"""Upscale models, loaded by spandrel from the state dict of a loaded one."""

import hashlib
import inspect
import re

from ..protocol.errors import UnsupportedError

NODE = "Upscale Image (using Model)"       # ComfyUI's node, for messages
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def facts_of(descriptor):
    """Return what determines the results of a spandrel ImageModelDescriptor next to its state dict, {name: text}."""
    model = descriptor.model
    modules = list(model.modules())
    hooks = sum(len(hooks) for module in modules for hooks in (
        module._forward_hooks, module._forward_pre_hooks))
    return {"architecture": descriptor.architecture.id,
            "class": _name_of(type(model)),
            "hyperparameters": _text(getattr(model, "hyperparameters", None)),
            "scale": str(descriptor.scale),
            "channels": f"{descriptor.input_channels} to {descriptor.output_channels}",
            "size requirements": _text(descriptor.size_requirements),
            "dtype": str(descriptor.dtype),
            "layers": _digest(str(model)),
            "hooks": str(hooks),
            "functions": _digest(" ".join(_functions_of(each) for each in (descriptor, *modules)))}


def load_upscaler(tensors, facts):
    """Load an upscale model from the state dict of a loaded one; returns a spandrel ImageModelDescriptor on the CPU.

    tensors: {name: tensor}. facts: facts_of the loaded one. Raises UnsupportedError if spandrel is missing, does not
    recognise the tensors, or makes another model of them.
    """
    try:
        from spandrel import MAIN_REGISTRY, ModelLoader, UnsupportedModelError
    except ImportError as error:
        raise UnsupportedError(f"Install spandrel in the Python of the workers: {error}.") from error
    registry = MAIN_REGISTRY.copy()
    try:
        from spandrel_extra_arches import EXTRA_REGISTRY
        registry.add(*EXTRA_REGISTRY, ignore_duplicates=True)  # ComfyUI adds it too, where it is installed
    except ImportError:
        pass
    try:
        descriptor = ModelLoader(registry=registry).load_from_state_dict(dict(tensors)).eval()
    except (UnsupportedModelError, RuntimeError, KeyError, ValueError, AssertionError) as error:
        raise UnsupportedError(f"Use {NODE} for this upscale model: spandrel cannot load it from its tensors "
                               f"({facts['architecture']}, {type(error).__name__}: {error}).") from error
    loaded = facts_of(descriptor)
    changed = next((name for name, text in facts.items() if loaded.get(name) != text), None)
    if changed is not None:
        raise UnsupportedError(f"Use {NODE} for this upscale model, or connect Load Upscale Model directly: its "
                               f"{changed} differ from those of a {facts['architecture']} model that spandrel loads "
                               f"({_short(facts[changed])} instead of {_short(loaded.get(changed))}).")
    return descriptor


def _functions_of(owner):
    """Functions that are attributes of an object itself, by name: its class's methods are not among them."""
    return ",".join(f"{name}={_name_of(value)}" for name, value in sorted(vars(owner).items())
                    if inspect.isroutine(value))


def _name_of(named):
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"


def _text(value):
    return ADDRESS.sub("", repr(value))


def _digest(text):
    return hashlib.sha256(ADDRESS.sub("", text).encode()).hexdigest()[:16]


def _short(text):
    return str(text)[:200]
