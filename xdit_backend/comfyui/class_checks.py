"""Check that a ComfyUI model class still matches its family's plan, since ComfyUI's internals change between versions.

worker/self_check.py compares results as well.
"""

import inspect

import torch

from ..protocol.errors import CheckpointError
from .install_location import comfyui_version, find_comfyui

FORWARDS = "forward", "_forward", "forward_orig"               # each passes keyword arguments on to the next


def check_class(model, family):
    """Compare a family's plan with a model of ComfyUI's class: lists of blocks, arguments of blocks and of the forward,
    hooked modules and methods. Raises CheckpointError with ComfyUI's version and the first missing one."""
    missing = next(_missing(model, family), None)
    if missing is not None:
        raise moved(family, f"has no {missing}")


def moved(family, what):
    """CheckpointError for a class that differs from its family's plan. what: predicate of a sentence about the
    class."""
    folder = find_comfyui()
    version = comfyui_version(folder) if folder is not None else ""
    return CheckpointError(f"Use Load Diffusion Model, or another version of ComfyUI: {family.name} runs as ComfyUI's "
                           f"own module, and {family.transformer.partition(':')[2]} of ComfyUI {version or 'here'} "
                           f"{what}, which its parallel methods rely on.")


def _missing(model, family):
    plan = family.plan
    methods = [getattr(type(model), name, None) for name in (*FORWARDS, *plan.positions)]
    parameters = [inspect.signature(method).parameters for method in methods if method is not None]
    # some modules list further timesteps that the forward takes
    accepted = {name for own in parameters for name in own} | {*getattr(model, "t_conds", ())}
    accepted |= {name for method in methods if method is not None for name in _looked_up(method)}
    yield from (f"argument {name}" for name in family.inputs.arguments if name not in accepted)
    yield from (f"list {name} of lists of blocks" for name in plan.nested_lists
                if not all(isinstance(blocks, torch.nn.ModuleList) for blocks in getattr(model, name, [None])))
    for list_ in plan.lists:
        blocks = _at(model, list_.name)
        if not isinstance(blocks, torch.nn.ModuleList) or len(blocks) != model.config[list_.count]:
            yield f"list {list_.name} of {list_.count} blocks"
            continue
        for block in blocks:
            names = inspect.signature(block.forward).parameters
            yield from (f"argument {name} of the blocks of {list_.name}"
                        for name in (*list_.streams, *list_.tokens, *plan.masks,
                                     *(plan.token_index_argument or ())[:1],
                                     *([plan.skip_name] if plan.skips(len(blocks)) else ()))
                        if name not in names)
        for name in (*list_.attention, *plan.cross_attention, *plan.cacheable):
            if not any(_has(block, name) for each in plan.lists for block in _at(model, each.name) or ()):
                yield f"module {name} in the blocks"
    yield from (f"module or method {path}" for path in (*plan.positions, *plan.cacheable_outside, *plan.unstaged_blocks,
                                                         *(plan.passes or ())[:1])
                if not _has(model, path))


def _looked_up(method):
    """String constants in the code of a method with **kwargs, such as the names that it looks up."""
    takes_all = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(method).parameters.values())
    code = getattr(inspect.unwrap(method), "__code__", None)
    return [constant for constant in code.co_consts if isinstance(constant, str)] if takes_all and code else []


def _has(module, path):
    return _at(module, path) is not None


def _at(module, path):
    if path == ".":                                            # the block itself
        return module
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
