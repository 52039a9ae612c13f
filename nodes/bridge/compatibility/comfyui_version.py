"""Recognition of a ComfyUI that is newer than the pack knows, and the errors about it."""

import ast
import inspect

import comfy.model_base

from ....xdit_backend.comfyui.install_location import comfyui_version, find_comfyui
from ....xdit_backend.protocol.errors import UnsupportedError

# arguments of every call of extra_conds; ComfyUI's other ones are entries of the conditioning, which nodes set
ALWAYS = {"noise", "device", "cross_attn", "latent_shapes", "seed"}
# names in comfy.model_base.ModelType: how a sampler's sigma and latent become those of the model. With FLOW_AV the
# latent of audio is scaled, see Components.rescale.
MODEL_TYPES = frozenset({"EPS", "V_PREDICTION", "V_PREDICTION_EDM", "STABLE_CASCADE", "EDM", "FLOW",
                         "V_PREDICTION_CONTINUOUS", "FLUX", "IMG_TO_IMG", "FLOW_COSMOS", "IMG_TO_IMG_FLOW",
                         "V_PREDICTION_DDPM"})
TYPES_OF = {"MiniMax H3": {"FLOW_AV"}}     # family -> names that it alone is run with


def newer_comfyui(family_name, what, instead="Load Diffusion Model"):
    """Return the UnsupportedError for a part of ComfyUI's model that the pack does not know. what: a clause about it.
    instead: ComfyUI's own nodes."""
    folder = find_comfyui()
    version = comfyui_version(folder) if folder is not None else ""
    return UnsupportedError(f"Update xDiT, or use {instead}: this ComfyUI {f'({version}) ' * bool(version)}"
                            f"is newer than the pack knows, and in its model of {family_name} {what}.")


def check_model_type(family, base_model):
    """Raise UnsupportedError where ComfyUI samples a model of the family in a way that the pack does not know."""
    name = base_model.model_type.name
    if name not in MODEL_TYPES | TYPES_OF.get(family.name, set()):
        raise newer_comfyui(family.name, f"the model type is {name}, by which xDiT does not sample it")


def refuse_new_keys(family_name, diffusion_model, names):
    """Raise UnsupportedError where ComfyUI's model reads conditioning of these names that the pack does not know."""
    found = new_keys(diffusion_model, names)
    if found:
        raise newer_comfyui(family_name, f"the conditioning has {', '.join(found)}, which xDiT does not read")


def new_keys(diffusion_model, names):
    """Return those of these names of conditioning that ComfyUI's class of the model reads, and that no node has to set.

    diffusion_model: ComfyUI's. A name in a dict, which ComfyUI alone makes, has the dict's name and a dot before
    it."""
    read = names_in_methods(type(diffusion_model)) if names else ()
    found = [name for name in names if name.partition(".")[0] in read]
    of_nodes = keys_of_nodes(inspect.getsource(comfy.model_base)) if found else ()
    return [name for name in found if name.rpartition(".")[2] not in of_nodes]


def keys_of_nodes(source):
    """Keys that the extra_conds of ComfyUI's BaseModels set only for conditioning with some entry, which a node sets.

    source: of comfy.model_base."""
    methods = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)
               and node.name == "extra_conds")
    return {key for method in methods for key in _conditional(method.body, set(), False)}


def _conditional(statements, entries, is_conditional):
    """Keys of dicts that are set under a condition on an entry. entries: names of variables with entries of the
    conditioning; those that are assigned here are added."""
    for statement in statements:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                key = target.slice.value if _is_item(target) else None
                if is_conditional and isinstance(key, str):
                    yield key
                elif isinstance(target, ast.Name) and _reads(statement.value, entries):
                    entries.add(target.id)
        test = getattr(statement, "test", getattr(statement, "iter", None))
        within = is_conditional or (test is not None and _reads(test, entries))
        for branch in ("body", "orelse"):
            yield from _conditional(getattr(statement, branch, ()), entries, within)


def _is_item(expression):
    return isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant)


def _reads(expression, entries):
    """Does an expression read an entry of the conditioning, kwargs, or a variable that holds one?"""
    nodes = [*ast.walk(expression)]
    always = [call.func.value for call in nodes if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
              and call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value in ALWAYS]
    always += [node.value for node in nodes if _is_item(node) and node.slice.value in ALWAYS]
    return any(isinstance(node, ast.Name) and node.id in {"kwargs", *entries} and node not in always for node in nodes)


def names_in_methods(cls):
    """Return the names of arguments and the strings in the code of ComfyUI's methods of a class."""
    methods = [method for each in cls.__mro__ if each.__module__.partition(".")[0] == "comfy"
               for method in vars(each).values() if inspect.isfunction(method)]
    return {word for method in methods for word in _names_in_code(method.__code__)}


def _names_in_code(code):
    yield from code.co_varnames[:code.co_argcount + code.co_kwonlyargcount]
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif inspect.iscode(constant):
            yield from _names_in_code(constant)
