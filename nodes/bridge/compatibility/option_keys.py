"""Keys of a MODEL's options that ComfyUI's own code reads, from the source of the installed ComfyUI.

An option acts only if code that runs reads it. Options that ComfyUI's code does not read are a node's own records: the
code of that node runs in ComfyUI's process, with any MODEL. Functions among them are not records.
"""

import ast
import functools
import inspect
import os
from pathlib import Path

import comfy.model_sampling

MODEL, TRANSFORMER = "model_options", "transformer_options"    # of a ModelPatcher; of each call
MODELS = "ldm"                             # ComfyUI's folder of models, whose code gets the second alone
SAMPLING = "comfy.model_sampling"          # module whose objects are records
OTHERS = "text_encoders"                   # whose model_options are those of a text encoder
LOOKUPS = "get", "pop", "setdefault"       # methods of a dict
# callable objects that look up their own text: (file, function)
RECORDS = {("helper.py", "ExtraOptions.__call__")}             # RES4LYF's extra_options of a sampler
# keys that packs' patches inside a model read from other files than their own: AnimateDiff's window, by IP-Adapter's
READ_BY_PATCHES = {"ad_params"}
MAX_DEPTH = 8                              # of containers in an option


@functools.cache
def is_read(options, key):
    """Whether ComfyUI's code reads a key of options (MODEL or TRANSFORMER).

    In files about transformer_options, a string counts as read in the lookups of any dict, as models pass options on
    under several names, and, in a package that unpacks options into arguments, if it names a parameter; of
    model_options, in lookups of these alone. Keys that are looped over or assigned to a name count as well.
    """
    return isinstance(key, str) and any(key in _names_read(path, key, options, unpacks)
                                        for path, unpacks in _files(options))


def is_read_by_patches(key, transformer_options):
    """Whether functions that nodes have put inside the model may read a key: it is in the file of one."""
    patches = transformer_options.get("patches", {}).values()
    replaced = transformer_options.get("patches_replace", {}).values()
    functions = [function for each in patches for function in each] + [
        function for each in replaced for function in each.values()]
    return bool(functions and key in READ_BY_PATCHES) or any(_quotes(text, key) for text in map(_source_of, functions))


def _source_of(function):
    called = function if hasattr(function, "__code__") else type(function).__call__
    path = Path(getattr(getattr(called, "__code__", None), "co_filename", ""))
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _quotes(text, key):
    return f'"{key}"' in text or f"'{key}'" in text


def functions_in(value, depth=0):
    """Names of the functions, and other callable objects, anywhere in an option. ComfyUI's model_sampling and RECORDS
    are not among them."""
    if isinstance(value, dict):
        entries = (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        entries = tuple(value)
    else:
        return [_name_of(value)] if callable(value) and not _is_record(value) else []
    if depth == MAX_DEPTH:
        return [f"{depth} containers in each other"]
    return [name for entry in entries for name in functions_in(entry, depth + 1)]


def _is_record(value):
    called = type(value).__call__
    code = getattr(called, "__code__", None)
    return (any(class_.__module__ == SAMPLING for class_ in type(value).__mro__)
            or code is not None and (os.path.basename(code.co_filename), called.__qualname__) in RECORDS)


def _name_of(value):
    return getattr(value, "__qualname__", type(value).__qualname__)


@functools.cache
def _files(options):
    """(path, unpacks) of ComfyUI's files that can read these options. unpacks: a file of its package unpacks those of a
    call."""
    folder = Path(inspect.getfile(comfy.model_sampling.ModelSamplingDiscrete)).parent
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))
             if path.parent != folder / OTHERS}
    unpacking = {path.parent for path, text in texts.items() if options == TRANSFORMER and f"**{options}" in text}
    return tuple((path, path.parent in unpacking) for path, text in texts.items()
                 if options in text or path.is_relative_to(folder / MODELS) and options == TRANSFORMER)


def _names_read(path, key, options, unpacks):
    """Names that a file reads, as in is_read; empty if it does not have the key."""
    text = path.read_text(encoding="utf-8")
    if not (_quotes(text, key) or unpacks and key in text):
        return set()
    nodes = list(ast.walk(ast.parse(text)))
    owners = () if options == TRANSFORMER else {options} | {
        node.targets[0].id for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        and _is_of(node.value, {options})}
    found = {name for node in nodes for each in _reading(node, owners) for name in _strings(each)}
    if unpacks:
        found |= {argument.arg for node in nodes if isinstance(node, ast.arguments)
                  for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs)}
    return found


def _is_of(node, owners):
    """Whether an expression is one of the dicts of these names, or a copy; without names: any dict."""
    if isinstance(node, ast.Call):
        looked_up = node.args[:1] if isinstance(node.func, ast.Attribute) and node.func.attr in LOOKUPS else ()
        return not owners or any(_strings(each) and _strings(each)[0] in owners for each in looked_up) or (
            not looked_up and any(_is_of(each, owners) for each in (node.func, *node.args)))
    if isinstance(node, ast.Attribute) and node.attr == "copy":
        return _is_of(node.value, owners)
    if isinstance(node, ast.Subscript):
        return not owners or bool(owners & {*_strings(node.slice)})
    name = getattr(node, "id", getattr(node, "attr", ""))
    return not owners or name in owners


def _reading(node, owners):
    """Expressions in a node whose strings are keys that it may read of the dicts of these names."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Store):
        return [node.slice] if _is_of(node.value, owners) else []
    if isinstance(node, ast.Call):
        is_lookup = (isinstance(node.func, ast.Attribute) and node.func.attr in LOOKUPS
                     and _is_of(node.func.value, owners))
        passes = any(_is_of(each, owners or {TRANSFORMER, "extra_options"}) for each in node.args)
        return node.args if is_lookup or passes else []
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        return [node.left] if _is_of(node.comparators[0], owners) else []
    if isinstance(node, (ast.For, ast.comprehension)):
        return [node.iter]
    return [node.value] if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None else []


def _strings(node):
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return [name for each in node.elts for name in _strings(each)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
