"""`python -m xdit_backend bench size`: rows for a published model by its name and for a file, without a device; what it
cannot count is refused."""

import json
import re

import pytest

from xdit_backend.__main__ import make_parser
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.tools.bench import size
from xdit_backend.tools.dry_run import published_models

MACHINE = {"devices": [{"name": "a card", "count": 2, "memory_bytes": 16e9, "matrix_flops_s": 60e12,
                        "attention_flops_s": 50e12, "memory_bytes_s": 936e9}],
           "links": {"all_to_all": {"2": {"bytes_s": 9e9}}, "hop": {"2": {"bytes_s": 12e9}}}}
ROW = re.compile(r"^(?P<layout>\S+) +(?P<rank>\d+) +(?P<weights>[\d.]+) +[\d.]+ +[\d.]+ +(?P<tflop>[\d.]+) +"
                 r"(?P<sent>[\d.]+) +\d+ +(?P<kernels>\d+) +[\d.]+ +(?P<seconds>[\d.]+)  (?P<bound>\w+)$", re.MULTILINE)


@pytest.fixture
def short(monkeypatch):
    """Of Flux.1 dev one block of each kind."""
    flux = published_models.PUBLISHED["flux.1-dev"]
    model = published_models.Published(flux.family, branches=1,
                                       arguments=flux.arguments | {"num_layers": 1, "num_single_layers": 1})
    monkeypatch.setitem(published_models.PUBLISHED, "flux.1-dev", model)


def said(capsys, *arguments):
    size.main(make_parser().parse_args(["bench", "size", *map(str, arguments)]))
    return capsys.readouterr().out


def test_rows_say_what_a_model_asks_of_each_device(short, tmp_path, capsys):
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE))
    text = said(capsys, "flux.1-dev", "--machine", tmp_path / "machine.json", "--layouts", "one", "ulysses2",
                "ulysses5", "ulysses4", "--waits")

    rows = {(row["layout"], row["rank"]): row for row in ROW.finditer(text)}
    assert set(rows) == {("one", "0"), ("ulysses2", "0"), ("ulysses2", "1")}
    assert float(rows["ulysses2", "0"]["tflop"]) == pytest.approx(float(rows["one", "0"]["tflop"]) / 2, rel=0.02)
    assert float(rows["one", "0"]["sent"]) == 0 < float(rows["ulysses2", "0"]["sent"])
    # of attention operations are slower here than of the rest
    assert rows["one", "0"]["bound"] == "arithmetic" and 0.03 < float(rows["one", "0"]["seconds"]) < 0.2
    assert re.search(r"^one: fits: [\d.]+ GB of 16$", text, re.MULTILINE)
    assert "ulysses5: it takes 5 devices, and there are 2." in text and "ulysses4: it takes 4 devices" in text
    assert text.endswith("waits: none\n")


def test_auto_is_what_the_node_takes_by_itself(short, tmp_path, capsys):
    """On the two cards of the machine: of one branch and of both."""
    (tmp_path / "machine.json").write_text(json.dumps(MACHINE))
    text = {branches: said(capsys, "flux.1-dev", "--machine", tmp_path / "machine.json", "--layouts", "auto",
                           "--branches", branches) for branches in (1, 2)}

    assert all({row["rank"] for row in ROW.finditer(shown)} == {"0", "1"} for shown in text.values())
    assert "\nauto (Ulysses 2): fits: " in text[1] and "\nauto (CFG 2): fits: " in text[2]


def test_weights_of_each_type_take_their_bytes(short, capsys):
    """What a linear weight of 16 bits is held in, as its type says."""
    text = {type_: said(capsys, "flux.1-dev", "--weight-dtype", type_, "--layouts", "one")
            for type_ in ("bf16", "fp8_e4m3fn", "float8_e4m3fn", "nvfp4", "Q4_K")}
    weights = {type_: float(ROW.search(shown)["weights"]) for type_, shown in text.items()}

    assert weights["fp8_e4m3fn"] == pytest.approx(weights["bf16"] / 2, rel=0.02)
    assert weights["float8_e4m3fn"] == pytest.approx(weights["bf16"] / 2, rel=0.02)
    assert weights["nvfp4"] == pytest.approx(weights["bf16"] * 4.5 / 16, rel=0.03)
    assert weights["Q4_K"] == pytest.approx(weights["bf16"] * 4.5 / 16, rel=0.03)


def test_rates_of_a_format_are_said_and_counted(short, tmp_path, capsys):
    """A step of arithmetic alone takes as long as its products in that format, and its attention."""
    seconds = {}
    for times in (1, 4):
        device = MACHINE["devices"][0] | {"memory_bytes_s": 1e15, "products": {"mxfp8": times}}
        (tmp_path / "machine.json").write_text(json.dumps(MACHINE | {"devices": [device]}))
        text = said(capsys, "flux.1-dev", "--machine", tmp_path / "machine.json", "--layouts", "one", "--weight-dtype",
                    "mxfp8")
        assert f"with these weights: mxfp8 (100% of their elements) {times} times as fast as in 16 bits." in text
        row = ROW.search(text)
        assert row["bound"] == "arithmetic"
        seconds[times] = float(row["seconds"])

    assert 0.3 * seconds[1] < seconds[4] < 0.6 * seconds[1]


def test_what_does_not_fit_says_what_would(short, capsys):
    text = said(capsys, "flux.1-dev", "--size", "16384x16384", "--layouts", "one")

    assert re.search(r"one: Use at most \d+ x .*: this run \(one device\) needs about [\d.]+ GB on cuda:0 ",
                     text)


@pytest.mark.parametrize("arguments, message", [
    (["nobody's model"], "no such file or folder, nor a published model of this name. Known are flux.1-dev, "),
    (["flux.1-dev", "--layouts", "sideways2"], '"sideways2" is not an axis and a degree'),
    (["flux.1-dev", "--size", "large"], "give width and height in pixels")])
def test_what_is_not_known_is_refused(arguments, message, capsys):
    with pytest.raises(ConfigError, match=re.escape(message)):
        said(capsys, *arguments)
