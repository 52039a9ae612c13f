"""Chinese of what the backend says: errors and what nodes show while they run, translated by the page
(web/translate.js); and of the templates' notes. Lists what has none."""

import ast
import json
import re

import pytest

from tests.support.comfyui_server import ROOT
from tests.support.page_modules import evaluate
from xdit_backend.checkpoints.detection import OTHERS, article
from xdit_backend.config import ParallelConfig, validate
from xdit_backend.planner.cost_model import Degrees, Device, Job, Links, ModelDims
from xdit_backend.planner.descriptions import describe_plan
from xdit_backend.planner.layout_search import Machine, estimate
from xdit_backend.protocol import errors
from xdit_backend.protocol.errors import ConfigError

ERRORS = {name for name in vars(errors) if name.endswith("Error")}
# not met in the page: commands of a shell, and what connections say of a peer that is none of ours
ELSEWHERE = re.compile(r"xdit_backend/(tools/bench|tools/report|protocol|memory|worker/command_loop|"
                       r"multi_node/(connections|node_session|remote_workers|join|show_key|segment_transfer))")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
NEW = 8                                    # messages that may be newer than their translation
NAMES = ("ulysses_degree ring_degree mode auto cpu Ulysses PipeFusion CFG LoRA CLIP VAE GGUF ControlNet "
         "a.safetensors GB/s diffusers Flux. Wan gloo ring decode cuda models/diffusers config.json patch token latent "
         "GPU").split()                    # the same in both
WORDS = 12                                 # letters of a piece of text, from which on it is looked for in the sources


@pytest.fixture(scope="module")
def table(node, modules):
    return evaluate(node, modules / "zh.mjs", "ZH", "ZH")


def pattern_of(node):
    """The text of an expression, with {} for what is known at run time only."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else "{}"
    if isinstance(node, ast.JoinedStr):
        return "".join(map(pattern_of, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return pattern_of(node.left) + pattern_of(node.right)
    return "{}"


def sources():
    for folder in ("nodes", "xdit_backend"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def messages():
    """{pattern: file} of the errors that a person meets in the page."""
    found = {}
    for path, tree in sources():
        for call in ast.walk(tree):
            name = getattr(call.func, "id", getattr(call.func, "attr", "")) if isinstance(call, ast.Call) else ""
            pattern = pattern_of(call.args[0]) if name in ERRORS and call.args else ""
            if re.search("[A-Za-z]{3}", pattern.replace("{}", "")) and not ELSEWHERE.match(path):
                found[pattern] = path
    return found


def test_each_error_has_chinese(table):
    missing = [f"{path}: {pattern}" for pattern, path in messages().items() if pattern not in table]

    assert len(messages()) > 150
    assert len(missing) <= NEW, "no Chinese in web/zh.js:\n" + "\n".join(missing)


def test_a_translation_takes_over_what_is_filled_in(table):
    """Each once; but for the article before a model's name, which Chinese has none of."""
    for pattern, words in table.items():
        filled, used = pattern.count("{}"), [int(number) for number in re.findall(r"\{(\d+)\}", words)]
        articles = pattern.count("{} {} model")
        assert CHINESE.search(words) and len(set(used)) == len(used), pattern
        assert set(used) <= set(range(filled)) and len(used) >= filled - articles, pattern


def test_what_is_translated_is_still_said(table):
    """Each piece of it stands somewhere in the sources, but for what numbers decide ("1 patch")."""
    said = "\n".join(pattern_of(one) for _, tree in sources() for one in ast.walk(tree)
                     if isinstance(one, (ast.Constant, ast.JoinedStr, ast.BinOp)))
    stale = [pattern for pattern in table for piece in re.split(r"\{\}|(?<=[.:]) ", pattern)
             if len(re.sub("[^A-Za-z]", "", piece)) >= WORDS and piece.strip(" .:") not in said]

    assert len(stale) <= NEW + 1, stale


def translated(node, modules, *texts):
    given = json.dumps(texts)
    return evaluate(node, modules / "translate.mjs", "translated", f"{given}.map((text) => translated('zh', text))")


def test_what_is_said_is_chinese_as_a_whole(node, modules):
    with pytest.raises(ConfigError) as refused:
        validate(ParallelConfig(mode="manual", ring_degree=3, devices="cpu,cpu"), 2)
    pair = Machine((Device(1e14, 1e14, 1e12, name="a card"),) * 2, Links({("all_to_all", 2): 1e10}))
    chosen, one = (estimate(ModelDims(57, 3072, 24, 12.0, 11.9e9), Job(4096, 512, 20), degrees, pair)
                   for degrees in (Degrees(ulysses=2), Degrees(data=2)))
    plans = [describe_plan(chosen, one, [chosen, one], measured_s) for measured_s in ((None, None), (9, None), (9, 18))]
    others = [f"a.safetensors is {what}." for _, what in OTHERS if ": " in what]
    texts = [str(refused.value), *(f"running on cpu, cpu: Ulysses 2. {plan}" for plan in plans), *others,
             "step 3 of 12, 0.50 s a step, 5 s left, CFG 2", "12 steps in 1.0 s, 0.09 s a step, one device",
             "12 steps in 9.0 s, 0.75 s a step, CFG 2; 1.8x one GPU, measured here on 2026-11-29 (estimate: 0.68 s a "
             "step)",
             "12 steps in 9.0 s, 0.75 s a step, CFG 2; 1.8x one device, measured here on 2026-11-29",
             "running on cuda:0: one device, compiled blocks (estimated to save 8 s in 60 steps; compiling takes 6 s)",
             "20 steps in 9.0 s, 0.45 s a step, CFG 2, compiled blocks (estimated to save 8 s in 60 steps)",
             "check 3 of 37: Flux.1 ring2", "Flux.1: ring2, round 1 of 3", "timing the links: gloo",
             "All 37 checks passed: every method gives one device's result on this machine.",
             "2 of 37 checks failed: Flux.1 ring2, VAE decode.",
             "The fastest method is Ulysses 2 for Flux.1, 1.50 times as fast as one device; CFG 2 for Wan 2.1 14B, "
             "1.90 times as fast as one device.",
             "3 of 9 estimates are within 10% (median error 12%), and auto mode would choose the fastest of the timed "
             "layouts for 2 of 3 models.",
             "running on cpu, cpu: PipeFusion 2, 4 patches", "decoded in 0.2 s on 2 devices",
             "loading weights 1.2 of 3.4 GB, 0.5 GB/s", "cancelled after 3 of 12 steps"]

    for text, words in zip(texts, translated(node, modules, *texts)):
        left = set(re.findall("[A-Za-z_./]{3,}", words)) - {*NAMES}
        assert CHINESE.search(words) and not left, (text, words)


def test_what_has_no_translation_stays_as_it_is(node, modules):
    told = ["A thing that nobody has translated.", "", "A thing that nobody has translated. Queue the prompt again."]

    assert translated(node, modules, *told)[:2] == told[:2]
    assert translated(node, modules, *told)[2].startswith(told[0])


@pytest.mark.parametrize("name", ["AuraFlow", "ERNIE-Image", "SD3", "LTX-2", "Ovis-Image"])
def test_models_that_begin_with_a_vowel_have_their_article(name):
    assert article(name) == "an" and article("Flux.1") == article("Wan") == article("Qwen-Image") == "a"


def test_titles_of_templates_have_chinese(node, modules):
    titles = {one["title"] for path in sorted((ROOT / "workflows").glob("*.json"))
              for one in json.loads(path.read_text(encoding="utf-8"))["nodes"] if one.get("title")}
    table = evaluate(node, modules / "zh_notes.mjs", "ZH_TITLES", "ZH_TITLES")

    assert set(table) == titles and all(map(CHINESE.search, table.values()))


def test_notes_of_templates_have_chinese(node, modules):
    notes = {path.stem: one["widgets_values"][0] for path in sorted((ROOT / "workflows").glob("*.json"))
             for one in json.loads(path.read_text(encoding="utf-8"))["nodes"] if one["type"] == "MarkdownNote"}
    words = evaluate(node, modules / "translate.mjs", "translatedNote",
                     f"{json.dumps(list(notes.values()))}.map((note) => translatedNote('zh', note))")

    assert len(notes) > 20
    assert [name for name, text in zip(notes, words) if text is None] == []
    for note, text in zip(notes.values(), words):
        assert sorted(re.findall("`.+?`", note)) == sorted(re.findall("`.+?`", text))
        assert note.count("\n") == text.count("\n")
    assert evaluate(node, modules / "translate.mjs", "translatedNote", "translatedNote('zh', 'A note.')") is None
