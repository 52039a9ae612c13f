"""Functions over syntax trees of Python: names, members, signatures, and hashes that ignore layout."""

import ast
import copy
import hashlib

FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
SKIPPED = {"ctx", "kind", "type_comment", "type_ignores", "annotation", "returns", "lineno"}
MAX_LITERAL = 60                           # characters of a constant that is stored as it is


def functions(statements, prefix=""):
    """(qualified name, node) of all functions, also of those in others."""
    for node in statements:
        if isinstance(node, FUNCTIONS):
            yield prefix + node.name, node
            yield from functions(node.body, f"{prefix}{node.name}.<locals>.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node.body, f"{prefix}{node.name}.")
        else:
            yield from functions([each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)], prefix)


def own_members(node):
    """{name: statements} of a class: methods and attributes of its body."""
    found = {}
    for each in flat(node.body):
        names = [each.name] if isinstance(each, (*FUNCTIONS, ast.ClassDef)) else targets(each)
        for name in names:
            found.setdefault(name, []).append(each)
    return found


def members(node):
    """{name: statements} of a class: methods, attributes, and what its methods assign to the object."""
    found = own_members(node)
    for method in [each for each in flat(node.body) if isinstance(each, FUNCTIONS)]:
        for each in ast.walk(method):
            for target in assigned(each):
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and (
                        target.value.id in ("self", "cls", node.name)):
                    found.setdefault(target.attr, []).append(each)
    return found


def signature(node):
    """The arguments of a function as text, without annotations."""
    arguments = copy.deepcopy(node.args)
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    return f"({ast.unparse(arguments)})"


def code_hash(nodes):
    """6 hex digits of syntax trees: the same for other comments, docstrings, annotations and layouts, and for every
    version of Python."""
    return hashlib.sha256("".join(map(_dump, nodes)).encode()).hexdigest()[:6]


def name_parts(node):
    """["a", "b", "c"] of a.b.c; None of any other expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else None


def keys_read(node):
    """Constant keys of dicts in code: d["key"], d.get("key"), "key" in d and {"key": ...}."""
    return sorted({key for each in ast.walk(node) for key, _ in dict_keys(each) if key.isidentifier()})


def dict_keys(node):
    """(key, expression of the dict or None) of one node."""
    text = lambda each: isinstance(each, ast.Constant) and isinstance(each.value, str)  # noqa: E731
    if isinstance(node, ast.Subscript) and text(node.slice):
        yield node.slice.value, node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args and text(node.args[0]) and (
            node.func.attr in ("get", "pop", "setdefault")):
        yield node.args[0].value, node.func.value
    elif isinstance(node, ast.Compare) and text(node.left) and isinstance(node.ops[0], (ast.In, ast.NotIn)):
        yield node.left.value, node.comparators[0]
    elif isinstance(node, ast.Dict):
        yield from ((key.value, None) for key in node.keys if text(key))


def flat(statements):
    """Statements and those below `if`, `try`, `with` and loops."""
    for node in statements:
        if isinstance(node, (ast.If, ast.Try, ast.With, ast.For, ast.While)):
            blocks = [getattr(node, name, []) for name in ("body", "orelse", "finalbody")]
            for block in (*blocks, *(each.body for each in getattr(node, "handlers", []))):
                yield from flat(block)
        else:
            yield node


def assigned(node):
    targets = (node.targets if isinstance(node, ast.Assign) else [node.target]
               if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else [])
    for target in targets:
        yield from target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]


def targets(node):
    return [target.id for target in assigned(node) if isinstance(target, ast.Name)]


def filled(node):
    """Names of variables that a statement adds an entry to: ALL["key"] = ..."""
    return {target.value.id for target in assigned(node)
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name)}


def value_text(nodes):
    """Of a constant: itself where it is a short literal, else a word; of objects' attributes: that they are there."""
    value = getattr(nodes[-1], "value", None)
    try:
        text = repr(ast.literal_eval(value)) if len(nodes) == 1 and value is not None else ""
    except ValueError:
        text = ""
    return f"= {text}" if 0 < len(text) <= MAX_LITERAL and "#" not in text else "variable"


def _dump(node):
    if isinstance(node, list):
        return f"[{','.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:]
    given = (f"{name}={_dump(value)}" for name, value in fields.items()
             if name not in SKIPPED and value is not None and value != [])
    return f"{type(node).__name__}({','.join(given)})"
