"""ComfyUI's source as syntax trees: modules, symbols, signatures and hashes of bodies. Nothing of it is imported."""

import ast
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs import syntax
from tests.programs.syntax import FUNCTIONS, code_hash, dict_keys, flat, name_parts, targets

# top-level modules of ComfyUI
ROOTS = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "execution", "folder_paths", "latent_preview",
         "node_helpers", "nodes", "server"}
OPTIONS = "transformer_options", "model_options"
MODELS = "comfy.model_base"                # whose classes read and hand on what conditioning has by keys
KEYS, MISSING = "[keys]", "missing"


@dataclass
class Module:
    """A parsed file. names: {name at the top level: its statements}, also below `if` and `try`. imported: {name: dotted
    name}."""

    name: str
    tree: ast.Module
    is_package: bool
    names: dict = field(default_factory=dict)
    imported: dict = field(default_factory=dict)
    starred: list = field(default_factory=list)                # modules of which all names are imported

    def __post_init__(self):
        for node in flat(self.tree.body):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                self.names.setdefault(node.name, []).append(node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self._import(node)
            else:
                for name in targets(node):
                    self.names.setdefault(name, []).append(node)
                for name in syntax.filled(node) & self.names.keys():
                    self.names[name].append(node)

    def _import(self, node):
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.imported[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0])
            return
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        base = [*package[:len(package) - node.level + 1]] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name == "*":
                self.starred.append(source)
            else:
                self.imported[alias.asname or alias.name] = f"{source}.{alias.name}"


@dataclass
class Symbol:
    """A name of a module, e.g. "VAE.decode". nodes: its statements; owner: the class that has it; () and None of a
    module."""

    module: Module
    path: str = ""
    nodes: tuple = ()
    owner: "Symbol | None" = None

    @property
    def key(self):
        return f"{self.module.name}:{self.path}" if self.path else self.module.name

    @property
    def is_class(self):
        return bool(self.nodes) and isinstance(self.nodes[-1], ast.ClassDef)

    @property
    def is_function(self):
        return bool(self.nodes) and isinstance(self.nodes[-1], FUNCTIONS)


class Tree:
    """The Python files of a folder."""

    def __init__(self, folder):
        self.folder, self._modules, self._members, self._referred = Path(folder), {}, {}, {}

    def module(self, name):
        """The Module of a dotted name; None where there is no such file."""
        if name not in self._modules:
            path = self.folder.joinpath(*name.split("."))
            file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
            is_package = path.is_dir() and (file is None or file.name == "__init__.py")
            text = "" if file is None else file.read_text(encoding="utf-8")
            self._modules[name] = (Module(name, ast.parse(text), is_package)
                                   if name and (file is not None or is_package) else None)
        return self._modules[name]

    def files_with(self, words):
        """Modules of comfy and comfy_extras whose text has one of these words, sorted."""
        has_word = re.compile("|".join(map(re.escape, sorted(words)))).search
        for folder in ("comfy", "comfy_extras"):
            for path in sorted((self.folder / folder).rglob("*.py")):
                if not has_word(path.read_text(encoding="utf-8")):
                    continue
                parts = path.relative_to(self.folder).with_suffix("").parts
                yield self.module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))

    def find(self, key):
        """The Symbol of "module:Class.method" or "module"; None where there is none."""
        module, _, path = key.partition(":")
        if ".<locals>." in path:
            found = self.module(module)
            nodes = [node for name, node in syntax.functions(found.tree.body) if name == path] if found else []
            return Symbol(found, path, tuple(nodes)) if nodes else None
        found = self.resolve(f"{module}.{path}" if path else module)
        return found if found is None or bool(found.path) == bool(path) else None

    def resolve(self, dotted, seen=()):
        """The Symbol of a dotted name, through imports and base classes; None where there is none."""
        parts = dotted.split(".")
        for end in range(len(parts), 0, -1):
            module = self.module(".".join(parts[:end]))
            if module is not None:
                break
        else:
            return None
        if end == len(parts):
            return Symbol(module)
        return None if dotted in seen else self.inside(module, parts[end:], (*seen, dotted))

    def inside(self, module, parts, seen=()):
        """The Symbol of a name as code of this module writes it, in parts."""
        first, *rest = parts
        if first in module.names:
            found = Symbol(module, first, tuple(module.names[first]))
            for name in rest:
                found = self.member(found, name) if found is not None and found.is_class else None
            return found
        if first in module.imported:
            return self.resolve(".".join([module.imported[first], *rest]), seen)
        return next((found for source in module.starred
                     if (found := self.resolve(".".join([source, *parts]), seen)) is not None), None)

    def member(self, symbol, name):
        """A class's method, attribute, or attribute of its objects, its own or inherited; None where there is none."""
        for cls in self.classes(symbol):
            nodes = self.members(cls).get(name)
            if nodes:
                return Symbol(cls.module, f"{cls.path}.{name}", tuple(nodes), cls)
        return None

    def members(self, symbol):
        """{name: statements} of a class, as syntax.members gives them."""
        if symbol.key not in self._members:
            self._members[symbol.key] = syntax.members(symbol.nodes[-1])
        return self._members[symbol.key]

    def referred(self, symbol):
        """Symbols at the top level of modules that the code of one names."""
        if symbol.key not in self._referred:
            found = {}
            for parts in {tuple(parts) for top in symbol.nodes for node in ast.walk(top)
                          if isinstance(node, (ast.Name, ast.Attribute)) and (parts := name_parts(node))}:
                other = self.inside(symbol.module, parts)
                if other is not None and other.path:
                    other = other.owner or other
                    found[other.key] = other
            self._referred[symbol.key] = [found[key] for key in sorted(found)]
        return self._referred[symbol.key]

    def classes(self, symbol, seen=()):
        """A class and its bases in this folder, nearest first."""
        yield symbol
        for base in symbol.nodes[-1].bases:
            found = self.inside(symbol.module, chain) if (chain := name_parts(base)) else None
            if found is not None and found.is_class and found.key not in seen:
                yield from self.classes(found, (*seen, found.key))

    def fact(self, key, has_body=False):
        """The comparable form of a symbol: its signature, bases or value, with has_body also a hash of its code."""
        symbol = self.find(key)
        if symbol is None:
            return MISSING
        if not symbol.path:
            return " ".join(["module", *packages(symbol.module)])
        node = symbol.nodes[-1]
        if symbol.is_class:
            made = self.member(symbol, "__init__") or self.member(symbol, "__new__")
            text = f"class ({', '.join(map(ast.unparse, node.bases))})"
            if made is not None and made.is_function:
                text += f" {syntax.signature(made.nodes[-1])}"
        elif symbol.is_function:
            kind = "".join(f"@{name} " for each in node.decorator_list
                           if (name := ast.unparse(each)) in ("property", "staticmethod", "classmethod"))
            text = f"{kind}def {syntax.signature(node)}"
        else:
            text = syntax.value_text(symbol.nodes)
        return f"{text} #{code_hash(symbol.nodes)}" if has_body else text

    def facts(self, key):
        """{"": fact, and of a class {member: hash of its code}, KEYS: keys of dicts that its code reads or makes}."""
        symbol, found = self.find(key), {"": self.fact(key)}
        if symbol is None or not symbol.is_class:
            return {"": self.fact(key, has_body=True)}
        for name, nodes in syntax.own_members(symbol.nodes[-1]).items():
            found[name] = code_hash(nodes)
        keys = syntax.keys_read(symbol.nodes[-1]) if symbol.module.name == MODELS else ()
        return found | ({KEYS: " ".join(keys)} if keys else {})


def packages(module):
    """Packages of others that a module imports where it is imported, without a fallback; sorted."""
    found = set()
    for node in module.tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return sorted(found - sys.stdlib_module_names - ROOTS)


def option_keys(tree):
    """{"transformer_options": keys that ComfyUI's models and nodes read or write, sorted, "model_options": the same}"""
    found = {name: set() for name in OPTIONS}
    for module in tree.files_with(OPTIONS):
        for node in ast.walk(module.tree):
            for key, owner in dict_keys(node):
                name = next((name for name in OPTIONS if owner is not None and _ends_with(owner, name)), None)
                if name:
                    found[name].add(key)
    return {name: sorted(keys) for name, keys in found.items()}


def _ends_with(node, name):
    """Return whether it is a variable, an attribute or an entry of this name."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == name
    return getattr(node, "attr", getattr(node, "id", "")) == name
