"""Every ComfyUI symbol that the pack uses, compared with the ComfyUI in a folder.

    python -m tests.programs.comfyui_interfaces FOLDER            # print differences from the table
    python -m tests.programs.comfyui_interfaces FOLDER --write    # write the table, from the oldest supported ComfyUI

Exits with 1 on a difference that is not explained. Source is parsed, nothing is imported. The table,
comfyui_interfaces.json, has one line a symbol: signatures of functions that the pack calls, and hashes of code that it
replaces, reimplements or runs in workers. comfyui_explained.json has differences that were checked and break nothing:
{symbol: {new value: reason}}. If such a symbol changes again, it is reported again.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.programs.comfyui_tree import KEYS, MISSING, Tree, option_keys
from tests.programs.comfyui_uses import COMPUTED, COPIED, REACHED, Uses
from xdit_backend.comfyui.install_location import comfyui_version

PACK = Path(__file__).resolve().parents[2]
TABLE, EXPLAINED = (Path(__file__).with_name(f"comfyui_{name}.json") for name in ("interfaces", "explained"))
VERSION = "comfyui"                        # key of the table: the version of ComfyUI
NAMES = "names of "                        # prefix of keys of the table whose values are lists of names
MODELS = "comfy.supported_models:models"
# models of newer ComfyUIs, without which the table's version runs all others
NEWER = {"comfy.ldm.wan.model_animate2.WanAnimate2Model"}
KINDS = {"missing": "symbols missing", "signature": "signatures or values", "code": "bodies",
         "names": "names of keys or models"}


@dataclass(frozen=True, order=True)
class Difference:
    """One symbol that differs. kind: one of KINDS. now: its key in the table of explained differences."""

    kind: str
    symbol: str
    now: str
    before: str = ""
    users: tuple = ()

    def __str__(self):
        text = {"missing": "missing", "code": f"code {self.now}, was {self.before or 'absent'}", "names": self.now,
                "signature": _changed(self.before, self.now)}[self.kind]
        more = f" and {len(self.users) - 1} more" if len(self.users) > 1 else ""
        return f"{self.symbol}: {text}{f'  [{self.users[0]}{more}]' if self.users else ''}"


def table_of(pack, tree):
    """The table of a pack and a ComfyUI. Raises SystemExit if this ComfyUI lacks a symbol that the pack uses."""
    uses = Uses(pack, tree)
    if missing := {name: user for name, user in uses.missing.items() if name not in NEWER}:
        raise SystemExit("\n".join(["Use the ComfyUI that the pack supports: this one lacks", *sorted(
            f"{name} [{user}]" for name, user in missing.items())]))
    found = {}
    for key, (how, _) in uses.found.items():
        facts = tree.facts(key) if how in (REACHED, COMPUTED) else {"": tree.fact(key, has_body=how == COPIED)}
        if how == REACHED and len(facts) > 1:                  # __init__ is among its members
            facts[""] = facts[""].partition(" (self")[0]
        found[key] = facts[""] if len(facts) == 1 else facts
    return {VERSION: comfyui_version(tree.folder)} | found | names_of(tree)


def names_of(tree):
    """{key: names}: option keys that ComfyUI's models and nodes read or write, and the models that it detects."""
    found = {f"{NAMES}{name}": " ".join(keys) for name, keys in option_keys(tree).items()}
    models = tree.find(MODELS)
    return found | {f"{NAMES}{MODELS}": " ".join(sorted({
        node.attr if isinstance(node, ast.Attribute) else node.id for statement in models.nodes
        for node in ast.walk(statement.value) if isinstance(node, (ast.Attribute, ast.Name))}) if models else ())}


def differences(table, tree):
    """Differences of a ComfyUI from a table, sorted."""
    found = []
    for key, before in table.items():
        if key == VERSION or key.startswith(NAMES):
            continue
        if isinstance(before, dict):
            found += _of_class(key, before, tree.facts(key))
        else:
            found += _of_fact(key, before, tree.fact(key, has_body=" #" in before))
    wanted = [key for key in table if key.startswith(NAMES)]
    now = names_of(tree) if wanted else {}
    for key in wanted:
        found += _of_names(key, table[key], now[key])
    return sorted(found)


def _of_class(key, before, now):
    is_same = now[""].startswith(f"{before['']} (self")       # the table has no arguments of this class
    found = [] if is_same else [*_of_fact(key, before[""], now[""])]
    if not now[""].startswith("class "):
        return found
    for name in sorted(before.keys() | now.keys() - {""}):
        old, new = before.get(name, ""), now.get(name, MISSING)
        if name == "" or old == new:
            continue
        if name == KEYS:
            found += _of_names(f"{key}{KEYS}", old, "" if new == MISSING else new)
        elif new == MISSING:
            found.append(Difference("missing", f"{key}.{name}", MISSING, old))
        else:
            found.append(Difference("code", f"{key}.{name}", new, old))
    return found


def _of_fact(key, before, now):
    if now == MISSING:
        yield Difference("missing", key, MISSING, before)
        return
    (old, _, old_code), (new, _, new_code) = before.partition(" #"), now.partition(" #")
    if old != new:
        yield Difference("signature", key, new, old)
    elif old_code != new_code:
        yield Difference("code", key, new_code, old_code)


def _of_names(key, before, now):
    old, new = set(before.split()), set(now.split())
    return [Difference("names", f"{key} {name}", "new" if name in new else "gone") for name in sorted(old ^ new)]


def _changed(before, now):
    """The arguments or packages that differ."""
    old, new = (re.findall(r"[^ ,()]+=\([^)]*\)|[^ ,()]+", text) for text in (before, now))
    changes = [f"-{each}" for each in old if each not in new] + [f"+{each}" for each in new if each not in old]
    return " ".join(changes) or f"{now}, was {before}"


def is_explained(difference, explained):
    return difference.now in explained.get(difference.symbol, {})


def with_users(found, pack, tree):
    """Differences with the files of the pack that use the symbols."""
    uses = Uses(pack, tree)
    for each in found:
        key = each.symbol.removesuffix(KEYS)
        while key and key not in uses.found and "." in key.partition(":")[2]:
            key = key.rpartition(".")[0]
        missing = uses.missing.get(each.symbol.replace(":", "."))
        users = sorted(uses.found[key][1]) if key in uses.found else [missing] if missing else []
        yield Difference(each.kind, each.symbol, each.now, each.before, tuple(users))


def save_table(table, path):
    """Write JSON with one line a symbol."""
    lines = (f"{json.dumps(key)}: {json.dumps(table[key])}" for key in sorted(table))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="ComfyUI's folder")
    parser.add_argument("--write", action="store_true", help="write the table of this ComfyUI instead")
    options = parser.parse_args(arguments)
    tree = Tree(options.folder)
    if tree.module("comfy.model_base") is None:
        parser.error(f"Name ComfyUI's folder: {options.folder} has no comfy/model_base.py.")
    if options.write:
        save_table(table_of(PACK, tree), TABLE)
        return 0
    table, explained = (json.loads(path.read_text(encoding="utf-8")) for path in (TABLE, EXPLAINED))
    found = differences(table, tree)
    new = [each for each in found if not is_explained(each, explained)]
    for each in with_users(new, PACK, tree) if new else ():
        print(f"{each.kind:9} {each}")
    counts = Counter(each.kind for each in new)
    print(f"{len(table) - 1} symbols of ComfyUI {table[VERSION]}, compared with {comfyui_version(options.folder)}: "
          + ", ".join(f"{counts[kind]} {name}" for kind, name in KINDS.items())
          + f"; {len(found) - len(new)} explained")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
