"""README, docs/ and the help pages: commands parse, links resolve, generated tables are current, pages have a maximum
length."""

import ast
import importlib
import importlib.util
import io
import re
import shlex
import sys
import tokenize

import pytest

from tests.programs.reference_pages import FOLDER
from tests.programs.reference_pages import PAGES as GENERATED
from tests.support.architecture import ROOT, sources
from tests.support.comfy_quants import WRITTEN
from xdit_backend.checkpoints.quantisation.layer_formats import FORMATS
from xdit_backend.models import FAMILIES
from xdit_backend.protocol.timeouts import TIMEOUTS

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")),
         *sorted((ROOT / "web" / "docs").glob("*.md")),
         *sorted((ROOT / "xdit_backend").rglob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODELS = (FOLDER / "models.md").read_text(encoding="utf-8")
COMMANDS = sorted({line.partition("  #")[0].strip() for page in PAGES
                   for block in re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
                   for line in block.splitlines() if line.strip()})


OF_COMFYUI = {"latent_formats.py", "comfy/latent_formats.py", "main.py", "nodes.py"}
# stems of files that are also files, packages or modules of others: config.json, gguf.md, errors.log
ALSO_OTHERS = {"config", "gguf", "errors", "torchrun", "setup", "vae", "backends"}


def slug(heading):
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text):
        target = "".join(target)
        if not target.startswith(("https://", "http://")):
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), f"{page.name}: {target}"
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M) if anchor else []
            assert not anchor or anchor in map(slug, headings), f"{page.name}: {target}"
    for path in re.findall(r"`((?:xdit_backend|nodes|tests|web|workflows|docs)/[\w/.-]+\.\w+)`", text):
        assert (ROOT / path).exists(), f"{page.name}: {path}"


def words_about(path):
    """The docstrings and comments of a file."""
    text = path.read_text(encoding="utf-8")
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    comments = [token.string for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.COMMENT]
    return [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text))
            if isinstance(node, documented)] + comments


@pytest.mark.parametrize("path", sources("nodes") + sources("xdit_backend"),
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_what_comments_name_is_there(path):
    """file.py and room/file.py are files, and `file.name` is a name of that file."""
    there = sources("nodes") + sources("xdit_backend") + sources("tests")
    files = {other.stem for other in there}
    rooms = {other.parent.name for other in there} - {"xdit_backend", "nodes", "tests"}
    for words in words_about(path):
        for name in re.findall(r"(?<![\w/.])((?:\w+/)*\w+\.py)\b", words):
            assert name in OF_COMFYUI or any(str(other).endswith(f"/{name}") for other in there), f"{path.name}: {name}"
        for free_bytes, stem, name in re.findall(r"(?<![\w/])(?:(\w+)\.)?(\w+)\.([A-Za-z_]\w+)\b", words):
            if free_bytes in rooms:
                assert stem in files or name == "py", f"{path.name}: {free_bytes}.{stem}"
            if stem in files and stem not in ALSO_OTHERS and name != "py":
                same = [other.read_text(encoding="utf-8") for other in there if other.stem == stem]
                assert any(re.search(rf"\b{name}\b", text) for text in same), f"{path.name}: {stem}.{name}"


def test_there_are_commands():
    assert len([command for command in COMMANDS if "python" in command]) >= 8


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, monkeypatch, capsys):
    """Commands of ours are parsed by the parser that they would meet; modules and files that others name are there."""
    words = [word for word in shlex.split(command.replace("<this repository>", "REPOSITORY")) if "=" not in word
             or word.startswith("-")]
    arguments = words[1:]
    if words[:2] == ["python3", "start.py"]:
        start = module_of("start", ROOT / "start.py")
        monkeypatch.setattr(sys, "argv", words[1:])
        options, rest = start.parse_arguments()
        assert not rest or options.job == "test"
    elif arguments[:2] == ["-m", "xdit_backend"]:
        main = importlib.import_module("xdit_backend.__main__").main
        monkeypatch.setattr(sys, "argv", ["xdit_backend", *arguments[2:], "--help"])
        with pytest.raises(SystemExit) as end:
            main()
        shown = capsys.readouterr().out
        assert end.value.code == 0
        assert all(word in shown for word in arguments if word.startswith("--"))
    elif arguments[:1] == ["-m"] and arguments[1] != "pip":
        assert ((ROOT / arguments[1].replace(".", "/")).with_suffix(".py").exists()
                or (ROOT / arguments[1].replace(".", "/")).is_dir())
    else:
        assert words[0] in ("cd", "git", "python"), command
        assert all((ROOT.parent / word.replace("xdit-comfyui", ROOT.name)).exists() for word in words
                   if word.endswith(".txt"))


def module_of(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_that_code_names_exist():
    """docs/page.md and docs/page.md#section in code, tests, messages and configuration files."""
    files = [ROOT / "start.py", *sources("xdit_backend"), *sources("nodes"), *sources("tests"),
             *sorted((ROOT / "web").glob("*.js")), *sorted((ROOT / "locales").rglob("*.json")),
             *sorted((ROOT / "web" / "docs").rglob("*.md")), *sorted((ROOT / ".github").rglob("*.*")),
             ROOT / ".ci" / "run"]
    named = {}
    for path in files:
        if path.exists() and path.name not in ("test_docs.py", "test_words.py"):
            text = path.read_text(encoding="utf-8")
            named.update(dict.fromkeys(re.findall(r"(?<![\w/])(docs/[\w/-]+\.(?:md|svg))(?:#([\w-]+))?", text), path))

    assert len(named) >= 12
    missing = {page: path for (page, anchor), path in named.items() if not (ROOT / page).exists()}
    missing.pop("docs/gguf.md", None)                          # ggml's
    assert missing == {}
    for (page, anchor), path in named.items():
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.M)
            assert anchor in map(slug, headings), f"{path}: {page}#{anchor}"


def test_tests_that_the_trust_model_names_exist():
    defined = {name for path in sources("tests")
               for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)}
    named = {path.name: set(re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8")))
             for path in (ROOT / "SECURITY.md", ROOT / "docs" / "guide" / "several-machines.md")}

    assert len(named["several-machines.md"]) >= 20 and all(named.values())
    assert set().union(*named.values()) <= defined


def test_the_number_of_families_in_the_models_page_is_current():
    assert f"31 of the {len(FAMILIES)} families" in MODELS


@pytest.mark.parametrize("page", GENERATED)
def test_generated_tables_are_current(page):
    text = (FOLDER / page).read_text(encoding="utf-8")

    assert GENERATED[page](text) == text, "run python -m tests.programs.reference_pages"


@pytest.mark.parametrize("path", ["XDiTLoadModel.md", "XDiTLoadModel/zh.md"])
def test_the_help_page_names_each_quantised_format(path):
    text = (ROOT / "web" / "docs" / path).read_text(encoding="utf-8")

    assert [name for name in FORMATS if f"`{name}`" not in text] == []


# the table's row of what is done with quantised models -> the test that runs it for each format
WITH = {"LoRA and other low-rank adapters, hooks that change them during a run":
        "quantisation.test_comfy_quant.test_a_lora_is_added_beside_a_quantised_weight",
        "merging another model, adapters of full rank":
        "quantisation.test_comfy_quant.test_a_lora_is_added_beside_a_quantised_weight",
        "saving": "", "parked or streamed from system RAM":
        "quantisation.test_comfy_quant.test_parked_weights_are_what_the_file_has_and_come_back "
        "offload.test_offloaded_files.test_quantised_weights_come_as_they_are_held",
        "compiled blocks": "quantisation.test_compiled_files.test_compiled_blocks_hold_weights_as_they_are"}


def test_what_is_done_with_each_format_is_tested_with_each():
    """Saving is rejected for every format: tests/integration/sampling/test_quantised.py."""
    table = MODELS.partition("| with | how |")[2].partition("\n\n")[0]
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == list(WITH)
    for name in " ".join(WITH.values()).split():
        file, function = name.rsplit(".", 1)
        marks = getattr(importlib.import_module(f"tests.unit.checkpoints.{file}"), function).pytestmark
        values = [value for mark in marks for value in mark.args[1]]
        run = {getattr(value, "values", (value,))[0] for value in values}
        assert set(WRITTEN) <= run, f"{name} leaves out {set(WRITTEN) - run}"


@pytest.mark.parametrize("path", ["XDiTParallelConfig.md", "XDiTParallelConfig/zh.md"])
def test_the_help_of_the_settings_begins_with_what_most_need(path):
    """A short text and a table of cases; the rest is folded."""
    text = (ROOT / "web" / "docs" / path).read_text(encoding="utf-8")
    open_, *folded = text.split("<details>\n<summary>")

    assert len(re.findall(r"^\| ", open_, re.M)) >= 8 and len(open_.split()) < 400
    assert len(folded) >= 5 and all(part.count("\n</details>\n") == 1 for part in folded)
    assert folded[-1].partition("</details>")[2].strip() == ""


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_set_up_commands_are_code_blocks_after_the_status(readme):
    """Each command can be copied as a whole block, and the status of multi-GPU runs precedes all commands."""
    text = (ROOT / readme).read_text(encoding="utf-8")

    assert code_blocks(text)[-2:] == ['python3 start.py --prompt "cat face on a blue background"',
                                      "python3 start.py test"]
    assert re.search(r"not yet run on two GPUs|还没有在两个 GPU 上运行过", text.partition("```")[0])


def test_the_readme_has_at_most_900_words():
    assert len(README.split()) <= 900


def test_the_translated_readme_has_the_structure_of_the_readme():
    """The same links in the same order (except to each other), heading levels, code blocks, list items and tables."""
    chinese = (ROOT / "README.zh.md").read_text(encoding="utf-8")

    assert structure(chinese) == structure(README)
    assert "README.zh.md" in README and "](README.md)" in chinese


def structure(text):
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text)
    return {"links": [link for link in map("".join, links) if not link.startswith("README")],
            "headings": re.findall(r"^#+ ", text, re.M), "code": code_blocks(text),
            "items": len(re.findall(r"^- ", text, re.M)),
            "tables": [line.count("|") for line in text.splitlines() if line.startswith("|")]}


def code_blocks(text):
    return re.findall(r"^```\n(.*?)\n```$", text, re.M | re.S)


def test_versions_agree():
    """Of requirements.txt, pyproject.toml, the README and what start.py installs."""
    start = module_of("start", ROOT / "start.py")
    required = [line for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
                if not line.startswith("#")]
    dependencies = re.search(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
                             re.M)[1]
    oldest = dict(package.split("==") for package in start.OLDEST)

    assert dependencies == ", ".join(f'"{line}"' for line in required)
    assert f"diffusers>={oldest['diffusers'].rpartition('.')[0]}" in required
    for name, version in (("PyTorch", oldest["torch"]), ("diffusers", oldest["diffusers"]),
                          ("PyTorch", start.TORCH[0].split("==")[1])):
        assert f"{name} {version.rpartition('.')[0]}" in README
    assert start.COMFYUI_TAG.removeprefix("v") in README


def test_environment_variables_are_listed():
    read = {name for path in [*sources("xdit_backend"), *sources("nodes"), *sources("tests"), ROOT / "start.py"]
            for name in re.findall(r"environ(?:\.get\(|\[)\"(XDIT_\w+)\"", path.read_text(encoding="utf-8"))}
    page = (ROOT / "docs" / "contribute" / "testing.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(XDIT_\w+)` \| (.*)", page, re.M))

    assert listed.keys() == read | TIMEOUTS.keys()
    assert all(f"({usual_s:g})" in listed[name] for name, (usual_s, _) in TIMEOUTS.items())


@pytest.mark.parametrize("page, most", [
    ("CHANGELOG.md", 900), ("CONTRIBUTING.md", 450), ("docs/design/architecture.md", 1500),
    *((path.relative_to(ROOT).as_posix(), 1500) for path in sorted((ROOT / "docs" / "guide").glob("*.md")))])
def test_pages_stay_short(page, most):
    """Words of a page; of the changelog, of each version's section."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for section in re.split(r"(?m)^(?=## \d)", text) if page == "CHANGELOG.md" else [text]:
        words = [word for word in section.split() if re.search(r"\w", word)]
        assert len(words) <= most, f"{len(words)} words, of {most} at most: {section.partition(chr(10))[0]}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guide").glob("*.md")), ids=lambda page: page.name)
def test_a_paragraph_of_a_guide_has_at_most_120_words(page):
    """Items of a list count one by one; tables and code blocks do not count."""
    text = re.sub(r"^```.*?^```|^\|.*$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        assert len(paragraph.split()) <= 120, f"{len(paragraph.split())} words: {paragraph.strip()[:60]}"
