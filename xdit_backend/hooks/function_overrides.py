"""Overrides of the functions that a module's code calls, without changing torch or other models.

Attention is computed by code of diffusers, ComfyUI or this package, which finds torch's functions by global names of
its file, such as `F` or `optimized_attention`. On a hooked model the same code runs with other globals.
"""

import functools
import types

import torch
import torch.nn.functional as F


class FunctionOverrides:
    """Functions that replace others by name in the code of a model's modules."""

    def __init__(self, around=None, instead=None, **names):
        """names: {name: replacement}; for torch.nn.functional see `functional`. around: {name: (the file's function) ->
        replacement}. instead: {name: (function whose code, or code within it, uses the name) -> replacement of that
        function}."""
        self._names, self._around, self._instead, self._classes = names, around or {}, instead or {}, {}
        self._functions = {}                                   # original -> replacement, shared by a class's modules

    def install(self, module):
        """Override the names in a module's own forward and in its processor's __call__."""
        processor, forward = getattr(module, "processor", None), module.forward
        if isinstance(processor, torch.nn.Module):             # installed on as a module
            pass
        elif isinstance(processor, types.FunctionType):
            module.processor = self._renamed(processor)
        elif processor is not None:
            processor.__class__ = self._class_of(type(processor))
        is_own = isinstance(forward, types.MethodType) and forward.__self__ is module
        if is_own:                                             # its class's, or assigned by a family
            module.forward = types.MethodType(self._renamed(forward.__func__), module)

    def install_if_used(self, module, names):
        """`install`, if the code of the module's own forward uses one of these names."""
        forward = module.forward
        if isinstance(forward, types.MethodType) and set(names) & set(forward.__func__.__code__.co_names):
            self.install(module)

    def _class_of(self, processor_class):
        """A subclass of a processor's class with an overridden __call__, shared by all processors of the class."""
        if processor_class not in self._classes:
            call = {"__call__": self._renamed(processor_class.__call__)}
            self._classes[processor_class] = type(processor_class.__name__, (processor_class,), call)
        return self._classes[processor_class]

    def _renamed(self, function):
        """The function with overrides, cached."""
        if function not in self._functions:
            self._functions[function] = self._overridden(function)
        return self._functions[function]

    def _overridden(self, function):
        names = {name: ours for name, ours in self._names.items() if name in function.__code__.co_names}
        names |= {name: ours(function.__globals__[name]) for name, ours in self._around.items()
                  if name in function.__code__.co_names and name in function.__globals__}
        same = in_file(function, names) if names else function
        for name, ours in self._instead.items():
            same = ours(same) if name in names_in(function.__code__) else same
        return same


def in_file(function, names):
    """The same function with other globals. names: {name: value}, in addition to those of its file."""
    # torch.compile would look up globals in the module of that name
    found = {name: value for name, value in function.__globals__.items() if name != "__name__"} | names
    same = types.FunctionType(function.__code__, found, function.__name__, function.__defaults__, function.__closure__)
    same.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(same, function)


def names_in(code):
    """Names that code looks up as globals or attributes, including code of functions within it."""
    within = (names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return {*code.co_names}.union(*within)


def torch_with(**functions):
    """A namespace like torch with these functions replaced."""
    return types.SimpleNamespace(**vars(torch) | functions)


def functional(**functions):
    """A namespace like torch.nn.functional with these functions replaced."""
    return types.SimpleNamespace(**vars(F) | functions)
