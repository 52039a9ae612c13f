"""A module's own code, in which names of torch's and diffusers' functions mean others. Used by attention_dispatch.py,
unet.py.

What attends in a model is diffusers' code, ComfyUI's or our families', and runs as it is. It finds torch's attention by
a name of its file, such as `F` or `optimized_attention`; on a model that has hooks the same code finds ours there.
Nothing changes in torch, nor for another model.
"""

import functools
import types

import torch
import torch.nn.functional as F


class FunctionOverrides:
    """What code of a model's modules finds by these names of its file."""

    def __init__(self, around=None, instead=None, **names):
        """names: {name: what it means}. Of torch's functional, see `functional`. around: {name: (what it means in the
        file) -> what it means}. instead: {name: (function whose code, or code within it, has the name) -> what runs
        instead of the function}."""
        self._names, self._around, self._instead, self._classes = names, around or {}, instead or {}, {}
        self._functions = {}                                   # by what they were: one for all modules of a class

    def place(self, module):
        """Have a module's own forward, and its processor's __call__, find these names."""
        processor, forward = getattr(module, "processor", None), module.forward
        if isinstance(processor, torch.nn.Module):             # a module of its own, which is placed as such
            pass
        elif isinstance(processor, types.FunctionType):
            module.processor = self._renamed(processor)
        elif processor is not None:
            processor.__class__ = self._class_of(type(processor))
        is_own = isinstance(forward, types.MethodType) and forward.__self__ is module
        if is_own:                                             # its class's, or a family's
            module.forward = types.MethodType(self._renamed(forward.__func__), module)

    def place_in(self, module, names):
        """As `place`, where the code of the module's own forward has one of these names."""
        forward = module.forward
        if isinstance(forward, types.MethodType) and set(names) & set(forward.__func__.__code__.co_names):
            self.place(module)

    def _class_of(self, processor_class):
        """A processor's class whose __call__ finds these names; one for all processors of the class."""
        if processor_class not in self._classes:
            call = {"__call__": self._renamed(processor_class.__call__)}
            self._classes[processor_class] = type(processor_class.__name__, (processor_class,), call)
        return self._classes[processor_class]

    def _renamed(self, function):
        """The same code in a file of these names."""
        if function not in self._functions:
            self._functions[function] = self._made_again(function)
        return self._functions[function]

    def _made_again(self, function):
        names = {name: ours for name, ours in self._names.items() if name in function.__code__.co_names}
        names |= {name: ours(function.__globals__[name]) for name, ours in self._around.items()
                  if name in function.__code__.co_names and name in function.__globals__}
        same = in_file(function, names) if names else function
        for name, ours in self._instead.items():
            same = ours(same) if name in names_in(function.__code__) else same
        return same


def in_file(function, names):
    """The same code in a file of these names."""
    # torch.compile would look up what is in the file of that name
    found = {name: value for name, value in function.__globals__.items() if name != "__name__"} | names
    same = types.FunctionType(function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    same.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(same, function)


def names_in(code):
    """The names that code looks up in its file or in objects, and those of functions within it."""
    within = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names}.union(*within)


def torch_with(**functions):
    """What stands for torch: all of it but these functions."""
    return types.SimpleNamespace(**vars(torch) | functions)


def functional(**functions):
    """What stands for torch.nn.functional: all of its functions but these."""
    return types.SimpleNamespace(**vars(F) | functions)
