"""Banned words with the field's word for each, and their occurrences by place; `python -m tests.support.words --write`
lowers the stored counts.

A place is one kind of text: identifiers, messages, docstrings, pages. tests/support/word_counts.json has the count of
each word in each place. Counts may only fall.
"""

import argparse
import ast
import fnmatch
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COUNTS = ROOT / "tests" / "support" / "word_counts.json"
PLACES = ("finished pages", "pages", "module docstrings", "docstrings and comments", "finished messages", "messages",
          "names")
# patterns of pages, and of files with messages, in which every count is 0; zh.js has the messages of all Python files
FINISHED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/*.md", "docs/*/*.md", "web/docs/*.md")
FINISHED_MESSAGES = ("nodes/*.py", "web/*.js", "locales/*/*.json", "workflows/*.json")
UNFINISHED_MESSAGES = ("web/zh.js",)
OPENING = "relative clause as an opening"
SHOWN = 20                                 # occurrences that a failure lists


class Word(NamedTuple):
    """A banned word. text: its pattern in lower-case text, from and to a word boundary; name: in an identifier, as
    _split_by_underscores_. None: not searched for there."""

    word: str
    better: str
    text: str | None = None
    name: str | None = None


class Found(NamedTuple):
    place: str
    word: str
    path: str                              # relative to the repository's root, with slashes
    line: int


# Patterns leave out good English: "model card", "ComfyUI's own code", "a share of the time". Words with too many
# legitimate uses in prose (whole, place, parts, given) are counted in names only.
WORDS = (
    Word("picture", "image", r"pictures?", r"_pictures?_"),
    Word("card", "GPU, device", r"(?<!model[\s_])cards?(?!-)", r"(?<!_model)_cards?_"),
    Word("sound", "audio", r"sounds?", r"_sounds?_"),
    Word("person", "user", r"(?:a|the|another|which|whichever) person(?:'s)?(?!,)"),
    Word("room", "package, or free memory, memory budget", r"rooms?", r"_rooms?_"),
    Word("come", "offloaded, streamed",
         r"com(?:es?|ing) (?:from|out of|through|over) (?:the |a )?(?:host|computer|system ram|main memory|ram|memory)"
         r"|(?:weights|layers|blocks) (?:that |which |to )?(?:come|coming)|com(?:es?|ing) (?:in|at|with) every step",
         r"_com(?:es?|ing)_"),
    Word("share", "shard, sharded, split", r"shar(?:e|es|ed|ing) out|(?:its|their|own|each|rank's|ranks') shares?"
         r"|shares? of (?:the |a |its |each )?(?:weights?|rows|tokens|heads|layers?|tensors?)", r"_shares_"),
    Word("spread", "sharded, split; weight placement", r"spread(?:s|ing)?", r"_spreads?_"),
    Word("held", "resident, loaded, stored", r"held", r"_held_"),
    Word("kept", "cached", r"kept", r"_kept_"),
    Word("led, heard", "LLLite targets; audio cross-attention", None, r"_(?:led|heard|hearing)_"),
    Word("way up, way down", "decoder path, encoder path", r"ways? (?:up|down)", r"_way_(?:up|down)_"),
    Word("take turns", "interleave, alternate", r"(?:tak(?:e|es|ing|en)|took) (?:\w+ )?turns", r"_turns_"),
    Word("own code", "function override", None, r"_own_code_"),
    Word("halves", "split linear", None, r"_(?:halves|halved)_"),
    Word("given", "input, conditioning", None, r"_given_"),
    Word("told", "configured, informed, distinguished", r"told|tells? apart", r"_(?:told|tells?)_"),
    Word("said of", "describes; the object without \"of\"", r"(?:sa(?:id|ys?|ying)|given|told|tells?|known) of"),
    Word("beside", "alongside, next to, in addition to, compared with", r"beside", r"_beside_"),
    Word("draw", "generate; sample; random", r"dr(?:aws?|awn|awing|ew)", r"_(?:draws?|drawn|drew)_"),
    Word("unlike", "heterogeneous, different",
         r"unlike (?:devices|gpus|cards|machines|ranks|groups|numbers|lengths?|sizes|widths|weights|steps|ones|each)"
         r"|(?:are|run|is|of) unlike", r"_unlike_"),
    Word("alike", "identical, the same", r"alike", r"_alike_"),
    Word("whole", "full, unsharded, synchronous, replicated", None, r"_whole_"),
    Word("place", "position, token indices, insertion point; install", None, r"(?<!_in)_places?_"),
    Word("pieces", "chunks, patches, tiles", r"pieces", r"_pieces?_"),
    Word("parts", "components, shards, breakdown", None, r"_parts_"),
    Word("words", "message, text", r"(?:in|with|of|the|no) words|words (?:for|of) (?:what|an?|the)|in other words",
         r"_words_"),
    Word("forecast", "estimate; extrapolate", r"forecast(?:s|ing|ed)?", r"_forecasts?_"),
    Word("stand-in", "placeholder, test double", r"stand-ins?|stand(?:s|ing)? in for", r"_stand_ins?_"),
    Word("stands in", "is in, is described in", r"stands? in(?! for)"),
    Word("amend", "patch the model", r"amend(?:s|ed|ing|ments?)?", r"_amend(?:s|ed|ing|ments?)?_"),
    Word("tiny", "test configuration", None, r"_tiny_"),
    Word("live", "activation footprint", None, r"_live_"),
    Word("net", "model dimensions", None, r"(?<!_u)_nets?_"),
    Word("choosing, rereads", "graph breaks; reads the latent late", None, r"_(?:choosing|rereads)_"),
    Word("pretend", "fake, simulate", r"pretend(?:s|ed|ing)?", r"_pretend(?:s|ed)?_"),
    Word("shell", "proxy model", None, r"_shell_"),
    Word("greeting", "handshake", r"greet(?:s|ed|ings?)?", r"_(?:greet|greetings?|hello|welcome)_"),
    Word("shortage", "out-of-memory report", r"shortages?", r"_shortages?_"),
    Word("asked", "requested, read", r"asked", r"_asked_"),
    Word("vocabulary", "model description API", None, r"_vocabulary_"),
    Word("anew", "again", r"anew", r"_anew_"),
    Word("heed", "honours, reads, supports", r"heed(?:s|ed|ing)?", r"_heed(?:s|ed)?_"),
    Word("honoured", "supported", r"honou?r(?:s|ed|ing)?(?! (?:))"),
    Word("refused by name", "rejected", r"refus(?:e|es|ed|al) (?:by|with) (?:its |their |the |a )?(?:names?|reasons?)"),
    Word("mend", "fix", r"mend(?:s|ed|ing)?", r"_mend(?:s|ed)?_"),
    Word("foresee", "estimate, expect", r"fores(?:ee|ees|een|aw)"),
    Word("step before", "previous step", r"(?:a|the) step before"),
    Word("one device's picture", "a single-GPU run",
         r"(?:one|a single|a) (?:device|gpu|card)'s (?:own )?(?:picture|image)s?"),
    Word("computer's memory", "system RAM", r"computer's memory"),
    Word("for want of", "for lack of, without", r"for want of"),
    Word("but for", "except, apart from", r"but for(?! (?:speed|memory)\b)"),
    Word(OPENING, "a noun or a verb first"),
)
OPENINGS = re.compile(r"\s*(?:(?:of|to|by|for|with|in|on|from|at) (?:which|what|whom|whose)|what|which|whose|who|how"
                      r"|where|of|whatever|whoever)\b", re.IGNORECASE)

# (file, word, text of the line, reason): occurrences that are right as they are
EXCEPTIONS: tuple[tuple[str, str, str, str], ...] = ()

# not in names of code (Family.amend, draw(), tensor_sharding.py), which are counted where they are defined
TEXT = re.compile(r"(?=[a-z])\b(?<![.\\])(?:" + "|".join(
    f"(?P<w{index}>{word.text})" for index, word in enumerate(WORDS) if word.text).replace(" ", r"\s+")
    + r")\b(?!\(|\.py\b|\.\w+\()")
JS = re.compile(r"/\*(?P<block>.*?)\*/|//(?P<line>[^\n]*)"
                r"|(?P<text>\"(?:[^\"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|`(?:[^`\\]|\\.)*`)", re.DOTALL)
# names of files and commands: code; code blocks, targets of links and attributes of HTML
CODE = re.compile(r"`[^`\n]*`")
MARKUP = re.compile(r"^```.*?^```|(?<=\])\([^)\s]*\)|\b(?:src|href|width)=\"[^\"]*\"", re.DOTALL | re.MULTILINE)


def find(root=ROOT, exceptions=EXCEPTIONS):
    """All occurrences, sorted, below a folder that is laid out as the repository is."""
    found = []
    for path in [root / name for name in ("__init__.py", "start.py")] + [
            path for package in ("nodes", "xdit_backend") for path in sorted((root / package).rglob("*.py"))]:
        found += _of_python(path, root) if path.exists() else []
    for path in sorted((root / "web").glob("*.js")):
        found += _of_javascript(path, root)
    for path in sorted((root / "locales").rglob("*.json")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for text in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
                found += _in_text(text, "messages", path, root, number) if " " in text else []
    for path in sorted((root / "workflows").glob("*.json")):
        found += _of_workflow(path, root)
    for path in [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md")),
                 *sorted((root / "web" / "docs").glob("*.md")), *sorted((root / "xdit_backend").rglob("*.md"))]:
        if path.name != "README.zh.md":
            found += _of_page(path, root)
    return sorted(each for each in found if not _excepted(each, root, exceptions))


def count(found):
    """{place: {word: number of occurrences}} for every place and word, sorted."""
    counts = {place: {word.word: 0 for word in sorted(WORDS)} for place in sorted(PLACES)}
    for each in found:
        counts[each.place][each.word] += 1
    return counts


def lower(stored, counts):
    """The counts to store: a word that is stored for a place never rises, a new one starts at its count."""
    return {place: {word: min(number, stored.get(place, {}).get(word, number)) for word, number in words.items()}
            for place, words in counts.items()}


def problems(stored, found, changed=frozenset()):
    """One message for each count that rose, fell without being stored, or is missing.

    changed: (path, line) of lines newer than the stored counts, which are listed first.
    """
    counts, better = count(found), {word.word: word.better for word in WORDS}
    messages = []
    for place, words in counts.items():
        for word, number in words.items():
            limit = stored.get(place, {}).get(word)
            if limit is None or number < limit:
                messages.append("Run `python -m tests.support.words --write` and commit word_counts.json: "
                                f"\"{word}\" occurs {number} times in {place}, "
                                + ("and no count is stored." if limit is None else f"the stored count is {limit}."))
            elif number > limit:
                lines = [(each.path, each.line) for each in found if (each.place, each.word) == (place, word)]
                lines = [line for line in lines if line in changed] or lines
                messages.append(f"Write {better[word]} instead of \"{word}\" ({number} times in {place}, at most "
                                f"{limit} allowed), or add an exception to tests/support/words.py: "
                                + ", ".join(f"{path}:{line}" for path, line in lines[:SHOWN])
                                + (f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""))
    return messages


def changed_lines(root=ROOT):
    """(path, line) of lines changed since the commit that last stored the counts; empty without git."""
    def git(*arguments):
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=60,
                              check=True).stdout
    try:
        commit = git("log", "-1", "--format=%H", "--", "tests/support/word_counts.json").strip()
        difference = git("diff", "-U0", "--no-color", commit) if commit else ""
        new = git("ls-files", "--others", "--exclude-standard").splitlines()
    except (OSError, subprocess.SubprocessError):
        return set()
    lines, path = set(), ""
    for line in difference.splitlines():
        if line.startswith("+++ "):
            path = line[6:]
        elif match := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            start, number = int(match[1]), int(match[2] or 1)
            lines |= {(path, start + offset) for offset in range(number)}
    return lines | {(name, number) for name in new if (root / name).suffix in (".py", ".md", ".js")
                    for number, _ in enumerate((root / name).read_text(encoding="utf-8").splitlines(), 1)}


def _of_python(path, root):
    """Identifiers where they are defined, docstrings, comments, and strings with a space."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    tree = ast.parse(source)
    docstrings, strings, found, inside, pieces = set(), [], [], {}, set()
    found += _in_name(path.parent.name if path.stem == "__init__" else path.stem, path, root, 1)
    for node in _walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                docstrings.add(first.value)
                place = "module docstrings" if isinstance(node, ast.Module) else "docstrings and comments"
                found += _in_text(first.value.value, place, path, root, first.value.lineno)
                if OPENINGS.match(first.value.value):
                    found.append(_found(place, OPENING, path, root, first.value.lineno))
        for name in _defined(node):
            found += _in_name(name, path, root, node.lineno)
        if isinstance(node, ast.JoinedStr):
            pieces.update(node.values)
            strings.append((node, "".join(str(value.value) if isinstance(value, ast.Constant) else "{}"
                                          for value in node.values)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append((node, node.value))
    for node, text in strings:
        for number in range(node.lineno, node.end_lineno + 1):
            inside.setdefault(number, []).append((node.col_offset if number == node.lineno else 0,
                                                  node.end_col_offset if number == node.end_lineno else sys.maxsize))
        if " " in text and node not in docstrings and node not in pieces:
            found += _in_text(text, "messages", path, root, node.lineno, lines[node.lineno - 1:node.end_lineno])
    return found + _of_comments(lines, inside, path, root)


def _of_comments(lines, inside, path, root):
    """Comments; adjacent lines of nothing else are read as one text. inside: {line: columns of strings, in bytes}."""
    found, text, start = [], "", 0
    for number, line in enumerate([*lines, ""], 1):
        comment = ""
        if "#" in line:
            columns = [len(line[:match.start()].encode()) for match in re.finditer("#", line)]
            column = next((column for column in columns if not any(
                first <= column < last for first, last in inside.get(number, ()))), None)
            comment = line.encode()[column + 1:].decode() if column is not None else ""
        if comment and text and line.lstrip().startswith("#"):
            text += "\n" + comment
        else:
            found += _in_text(text, "docstrings and comments", path, root, start)
            text, start = comment, number
    return found


def _of_javascript(path, root):
    found, source = [], path.read_text(encoding="utf-8")
    for match in JS.finditer(source):
        text = match[match.lastgroup].strip("`")
        if match.lastgroup != "text" or " " in text:
            found += _in_text(text, "messages" if match.lastgroup == "text" else "docstrings and comments", path, root,
                              source.count("\n", 0, match.start()) + 1)
    return found


def _of_workflow(path, root):
    """A template's title, which is its file name, its notes and the titles of its nodes; prompts are not read."""
    source = path.read_text(encoding="utf-8")
    found = _in_text(path.stem, "messages", path, root, 1)
    for node in json.loads(source)["nodes"]:
        for text in [node.get("title") or "", *(node["widgets_values"] if node["type"] == "MarkdownNote" else [])]:
            line = 1 + source.partition(json.dumps(text))[0].count("\n")
            found += [each._replace(line=line) for each in _in_text(text, "messages", path, root, line)]
    return found


def _of_page(path, root):
    """A page's prose, without code and the targets of links."""
    text = MARKUP.sub(lambda match: "\n" * match[0].count("\n") or "_", path.read_text(encoding="utf-8"))
    return _in_text(text, "pages", path, root, 1)


def _is_finished(place, name):
    patterns = {"pages": FINISHED, "messages": () if name in UNFINISHED_MESSAGES else FINISHED_MESSAGES}.get(place, ())
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _in_text(text, place, path, root, line, lines=()):
    """lines: of a literal's source, in which the words stand where implicit concatenation hides their line."""
    found, text = [], CODE.sub("_", text.lower())
    for match in TEXT.finditer(text):
        word = WORDS[int(match.lastgroup[1:])].word
        offset = next((number for number, each in enumerate(lines) if match[0] in each.lower()),
                      0 if lines else text.count("\n", 0, match.start()))
        found.append(_found(place, word, path, root, line + offset))
    return found


def _in_name(name, path, root, line):
    return [_found("names", word, path, root, line) for word in _words_of(name)]


@functools.cache
def _words_of(name):
    """Banned words in an identifier, which is split at underscores and at capitals."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    tokens = f"_{split.lower().strip('_')}_"
    return [word.word for word in WORDS if word.name and re.search(word.name, tokens)]


def _walk(tree):
    """All nodes but contexts, which are half of them; ast.walk takes twice as long."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in node._fields:
            value = None if field == "ctx" else getattr(node, field, None)
            if isinstance(value, list):
                waiting += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                waiting.append(value)


def _defined(node):
    """Names that a node defines. Uses are not counted: they follow when the definition is renamed."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    return []


def _found(place, word, path, root, line):
    name = path.relative_to(root).as_posix()
    return Found(f"finished {place}" if _is_finished(place, name) else place, word, name, line)


def _excepted(found, root, exceptions):
    return any((file, word) == (found.path, found.word) and text in
               (root / file).read_text(encoding="utf-8").splitlines()[found.line - 1]
               for file, word, text, reason in exceptions)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="store counts that fell; refuses to raise any")
    parser.add_argument("--list", metavar="PLACE", choices=PLACES, help="list the occurrences in a place")
    arguments = parser.parse_args()
    found = find()
    stored = json.loads(COUNTS.read_text(encoding="utf-8")) if COUNTS.exists() else {}
    if arguments.list:
        print("\n".join(f"{each.path}:{each.line}: {each.word}" for each in found if each.place == arguments.list))
    if arguments.write:
        stored = lower(stored, count(found))
        COUNTS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    messages = problems(stored, found, changed_lines()) if not arguments.list else []
    print("\n".join(messages), end="\n" if messages else "")
    sys.exit(bool(messages))


if __name__ == "__main__":
    main()
