"""Is ComfyUI's class still what a family's plan says? ComfyUI's insides are no interface, and move from version to
version. Called by checkpoints/build_transformer.py when a model is made; worker/self_check.py compares what it
computes.
"""

import inspect

import torch

from ..protocol.errors import CheckpointError
from .install_location import comfyui_version, find_comfyui

FORWARDS = "forward", "_forward", "forward_orig"               # one calls the next, with what it does not know by name


def check_class(model, family):
    """Hold a family's plan against a model of ComfyUI's class: lists, arguments of blocks and of the forward, modules
    and methods that are hooked. Raises CheckpointError that names ComfyUI's version and the first that is missing."""
    missing = next(_missing(model, family), None)
    if missing is not None:
        raise moved(family, f"has no {missing}")


def moved(family, what):
    """The CheckpointError of a class that differs from the plan of its family. what: as it follows the class's name."""
    folder = find_comfyui()
    version = comfyui_version(folder) if folder is not None else ""
    return CheckpointError(f"Use Load Diffusion Model, or another version of ComfyUI: {family.name} runs as ComfyUI's "
                           f"own module, and {family.transformer.partition(':')[2]} of ComfyUI {version or 'here'} "
                           f"{what}, which its parallel methods rely on.")


def _missing(model, family):
    plan = family.plan
    methods = [getattr(type(model), name, None) for name in (*FORWARDS,
                                                             *(() if family.is_replicated else plan.positions))]
    parameters = [inspect.signature(method).parameters for method in methods if method is not None]
    # of some, a list of the module names times that the forward takes beside
    accepted = {name for own in parameters for name in own} | {*getattr(model, "t_conds", ())}
    accepted |= {name for method in methods if method is not None for name in _looked_up(method)}
    yield from (f"argument {name}" for name in family.arguments if name not in accepted)
    if family.is_replicated:
        yield from (f"list {name} of lists of blocks" for name in ("down_blocks", "up_blocks")
                    if not all(isinstance(blocks, torch.nn.ModuleList) for blocks in getattr(model, name, [None])))
        return
    for list_ in plan.lists:
        blocks = _at(model, list_.name)
        if not isinstance(blocks, torch.nn.ModuleList) or len(blocks) != model.config[list_.count]:
            yield f"list {list_.name} of {list_.count} blocks"
            continue
        for block in blocks:
            names = inspect.signature(block.forward).parameters
            yield from (f"argument {name} of the blocks of {list_.name}"
                        for name in (*list_.streams, *list_.tokens, *list_.masks,
                                     *(plan.token_index_argument or ())[:1],
                                     *([plan.skip_name] if plan.skips(len(blocks)) else ()))
                        if name not in names)
        for name in (*list_.attention, *plan.cross_attention, *plan.cacheable):
            if not any(_has(block, name) for each in plan.lists for block in _at(model, each.name) or ()):
                yield f"module {name} in the blocks"
    yield from (f"module or method {path}" for path in (*plan.positions, *plan.cacheable_outside, *plan.unstaged_blocks)
                if not _has(model, path))


def _looked_up(method):
    """Words that a method with **kwargs has in its code, such as those that it looks up there."""
    takes_all = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(method).parameters.values())
    code = getattr(inspect.unwrap(method), "__code__", None)
    return [constant for constant in code.co_consts if isinstance(constant, str)] if takes_all and code else []


def _has(module, path):
    return _at(module, path) is not None


def _at(module, path):
    if path == ".":                                            # a block itself
        return module
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
