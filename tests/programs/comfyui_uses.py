"""ComfyUI symbols that the pack uses, derived from the pack's source.

A use is a key of tests.programs.comfyui_tree ("module:Class.method") and a level:

- "called": the pack relies on its signature;
- "copied": also on its code, which the pack replaces, overrides or reimplements;
- "computed": a class of a model, which the pack runs in workers or computes with a class of diffusers;
- "reached": code that a computed class uses.
"""

import ast
import io
import re
import tokenize
from collections import defaultdict

from tests.programs.comfyui_tree import MODELS, ROOTS, Symbol
from tests.programs.syntax import FUNCTIONS, functions, name_parts

CALLED, COPIED, REACHED, COMPUTED = LEVELS = "called", "copied", "reached", "computed"
NETWORKS = "comfy.ldm", "comfy.taesd"
# modules that compute a model: all code in them that a used class reaches is compared
COMPUTES = (*NETWORKS, "comfy.model_base", "comfy.model_sampling", "comfy.latent_formats", "comfy.conds",
            "comfy.rmsnorm", "comfy.supported_models", "comfy.supported_models_base")
TEXT = "comfy.text_encoders"               # too, where transformers are built from them (HiDream-O1)
# Classes whose objects ComfyUI passes to the pack. An attribute with the name of one of their members counts as a use.
GIVEN = ("comfy.model_patcher:ModelPatcher", "comfy.model_base:BaseModel", "comfy.sd:VAE", "comfy.samplers:CFGGuider",
         "comfy.samplers:KSAMPLER", "comfy.samplers:KSamplerX0Inpaint", "comfy.model_management:LoadedModel",
         "comfy.controlnet:ControlBase", "comfy.controlnet:ControlNet",
         "comfy.supported_models_base:BASE", "comfy.weight_adapter.base:WeightAdapterBase",
         "comfy.patcher_extension:PatcherInjection", "comfy.patcher_extension:WrapperExecutor",
         "comfy.context_windows:IndexListContextHandler", "comfy.model_sampling:ModelSamplingDiscrete",
         "comfy.conds:CONDRegular", "comfy_execution.utils:ExecutionContext", "server:PromptServer")
# constructors of the pack with strings that are names in ComfyUI: {call: {position or keyword: owner of the name}}
NAMING = {"Sampled": {0: "comfy.model_base.ModelType", 2: "comfy.latent_formats"},
          "SmallConfig": {"detected": "comfy.supported_models"}}
CLASS = re.compile(r"comfy(\.\w+)+:\w+")
MENTION = re.compile(r"\bcomfy(?:\.\w+)+")
TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}
FUNCTION_NAME = re.compile(r"[A-Za-z]\w*_\w+|\.?[\w.]+\.<locals>\.[\w.<>]+|[A-Z]\w+\.\w+")
SAMPLER = "def sample_"                    # functions of ComfyUI's samplers, which go by the rest of the name
# where strings are names of functions
RECOGNISES = "nodes/bridge/compatibility", "nodes/bridge/sampling", "xdit_backend/hooks"
# classes of families that run with a newer ComfyUI than the table's alone
NEWER = {"comfy.ldm.wan.model_animate2.WanAnimate2Model", "comfy.ldm.minimax_music.dit.MiniMaxMusic3DiT"}


class Uses:
    """Uses of ComfyUI in a pack's folder.

    found: {key: (level, files that use it)}. missing: {dotted name that ComfyUI lacks: file that uses it}.
    """

    def __init__(self, pack, tree):
        self._tree, self.found, self.missing = tree, {}, {}
        self._attributes, self._patched, self._names = defaultdict(set), defaultdict(set), defaultdict(set)
        folders = (sorted((pack / name).rglob("*.py")) for name in ("nodes", "xdit_backend"))
        for path in [pack / "__init__.py", *(path for paths in folders for path in paths)]:
            self._file(path.relative_to(pack).as_posix(), path.read_text(encoding="utf-8"))
        self._objects()
        self._named_functions()
        for key, (how, users) in [*self.found.items()]:
            if how == COMPUTED:
                self._reach(key, min(users))
        self._models_of_classes()

    def _add(self, dotted, user, how, must=True):
        """Add a dotted name, or its longest part that names a symbol. With `must`, a part that is no module."""
        symbol, must = self._tree.resolve(dotted), must and dotted not in NEWER
        parts = dotted.split(".")
        while symbol is None and len(parts) > 1:
            parts.pop()
            symbol = self._tree.resolve(".".join(parts))
            if symbol is not None and (not symbol.path or symbol.is_class):
                if must and not (symbol.is_class and dotted.rpartition(".")[2] in ("mro", "__name__", "__init__")):
                    self.missing[dotted] = user
                return None
        if symbol is None:
            if must:
                self.missing[dotted] = user
            return None
        if symbol.is_class and symbol.module.name.startswith(COMPUTES):
            how = COMPUTED
        self._put(symbol, user, how)
        return symbol

    def _put(self, symbol, user, how):
        known, users = self.found.get(symbol.key, (how, set()))
        self.found[symbol.key] = max(known, how, key=LEVELS.index), users | {user}

    def _file(self, user, text):
        tree = ast.parse(text)
        for dotted in _mentions(text):                         # code that is reimplemented here
            self._add(dotted, user, COPIED, must=False)
        aliases = self._imports(user, tree)
        self._aliases(tree, aliases)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                self._chain(user, node, aliases)
            elif isinstance(node, ast.ClassDef):
                self._subclass(user, node, aliases)
            elif isinstance(node, ast.Call):
                self._call(user, node, aliases)
            elif isinstance(node, ast.Assign) and user.startswith("nodes/"):
                for target in node.targets:
                    if isinstance(target, ast.Attribute):
                        self._patched[target.attr].add(user)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self._text(user, node.value)

    def _imports(self, user, tree):
        """{name in the file: dotted name of ComfyUI}"""
        aliases = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] in ROOTS:
                        self._add(alias.name, user, CALLED)
                        root = alias.name.partition(".")[0]
                        aliases[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] in ROOTS:
                for alias in node.names:
                    self._add(f"{node.module}.{alias.name}", user, CALLED)
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return aliases

    def _aliases(self, tree, aliases):
        """Add variables that hold a module: manager = ....comfy.model_management."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], (ast.Name, ast.Tuple)):
                pairs = (zip(target.elts, getattr(node.value, "elts", ())) if isinstance(target, ast.Tuple)
                         else [(target, node.value)])
                for name, value in pairs:
                    dotted = _dotted(value, aliases)
                    if isinstance(name, ast.Name) and dotted and self._tree.module(dotted) is not None:
                        aliases[name.id] = dotted

    def _chain(self, user, node, aliases):
        dotted = _dotted(node, aliases)
        if dotted:
            self._add(dotted, user, CALLED)
        elif user.startswith("nodes/"):
            self._attributes[node.attr].add(user)

    def _subclass(self, user, node, aliases):
        """Add methods that a class of the pack overrides."""
        for base in node.bases:
            dotted = _dotted(base, aliases)
            symbol = dotted and self._tree.resolve(dotted)
            if symbol and symbol.is_class:
                for name in [each.name for each in node.body if isinstance(each, FUNCTIONS)]:
                    own = self._tree.member(symbol, name)
                    if own is not None and own.is_function:
                        self._put(own, user, COPIED)

    def _call(self, user, node, aliases):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        for place, owner in NAMING.get(name, {}).items():
            given = (node.args[place:place + 1] if isinstance(place, int)
                     else [each.value for each in node.keywords if each.arg == place])
            for each in given:
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    self._add(f"{owner}.{each.value}", user, CALLED)
        if name == "replaced" and node.args and (dotted := _dotted(node.args[0], aliases)):
            for keyword in node.keywords:
                self._add(f"{dotted}.{keyword.arg}", user, COPIED)
        if name in ("getattr", "hasattr", "setattr") and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            dotted, attribute = _dotted(node.args[0], aliases), str(node.args[1].value)
            if dotted:
                self._add(f"{dotted}.{attribute}", user, CALLED, must=False)
            elif user.startswith("nodes/"):
                self._attributes[attribute].add(user)

    def _text(self, user, text):
        if CLASS.fullmatch(text):
            self._add(text.replace(":", "."), user, COMPUTED)
        elif user.startswith(RECOGNISES) and (text.isidentifier() or FUNCTION_NAME.fullmatch(text)):
            self._names[text].add(user)

    def _objects(self):
        """Add attributes and methods of the classes in GIVEN."""
        classes = {key: self._tree.find(key) for key in GIVEN}
        for key, symbol in classes.items():
            if symbol is None:
                self.missing[key] = "tests/programs/comfyui_uses.py"
                continue
            names = {name for cls in self._tree.classes(symbol) for name in self._tree.members(cls)}
            for name in sorted(names):
                for uses, how in ((self._attributes, CALLED), (self._patched, COPIED)):
                    if name in uses and not name.startswith("__"):
                        own = self._tree.member(symbol, name)
                        for user in uses[name]:
                            self._put(own, user, how if own.is_function else CALLED)

    def _named_functions(self):
        """Add functions that the pack recognises by name."""
        names = [name for name in self._names if FUNCTION_NAME.fullmatch(name)]
        for module in self._tree.files_with({SAMPLER, *(f"def {name.rpartition('.')[2]}(" for name in names)}):
            for path, node in functions(module.tree.body):
                ends = (path[start:] for start in range(len(path)) if path[start] == ".")
                texts = {path, node.name, *ends} & {*names}
                if node.name.startswith("sample_"):            # "euler" of sample_euler
                    texts.add(node.name[7:])
                for user in {user for text in texts for user in self._names.get(text, ())}:
                    self._put(Symbol(module, path, (node,)), user, COPIED)

    def _reach(self, key, user):
        """Add all symbols that a class reaches within COMPUTES."""
        waiting, seen = [self._tree.find(key)], set()
        while waiting:
            symbol = waiting.pop()
            if symbol is None or symbol.key in seen or not symbol.module.name.startswith((*COMPUTES, TEXT)):
                continue
            seen.add(symbol.key)
            if symbol.path:
                self._put(symbol, user, REACHED)
                self._put(Symbol(symbol.module), user, CALLED)
                is_network = symbol.module.name.startswith((*NETWORKS, TEXT))
                waiting += [each for each in self._tree.referred(symbol)
                            if is_network or not each.module.name.startswith(TEXT)]

    def _models_of_classes(self):
        """Add ComfyUI's BaseModels of the transformers, and the model configs of these: conditioning and sampling."""
        computed = {key for key, (how, _) in self.found.items() if how in (REACHED, COMPUTED)}
        for name in (MODELS, "comfy.supported_models"):
            module = self._tree.module(name)
            for path, nodes in module.names.items() if module else ():
                symbol = Symbol(module, path, tuple(nodes))
                referred = {each.key for each in self._tree.referred(symbol)} if symbol.is_class else set()
                for key in sorted(referred & computed):
                    if key.startswith("comfy.ldm") or name != MODELS and key.startswith(f"{MODELS}:") and (
                            key != f"{MODELS}:BaseModel"):
                        self._reach(symbol.key, min(self.found[key][1]))
                        computed.add(symbol.key)


def _mentions(text):
    """Dotted names of ComfyUI in comments and strings."""
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in TEXTS:
            found.update(MENTION.findall(token.string))
    return sorted(found)


def _dotted(node, aliases):
    """The dotted name in ComfyUI of an expression, also of x().comfy.y; None for any other expression."""
    parts = name_parts(node)
    if parts:
        return ".".join([aliases[parts[0]], *parts[1:]]) if parts[0] in aliases else None
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed(names[:names.index("comfy") + 1])) if "comfy" in names else None
