"""`bench planner` fits a table's machine on the rows that a probe would measure,
and tells how well the others are predicted."""

import argparse
import csv
import random
import re
from dataclasses import replace

import pytest

from tests.support.tolerances import within
from xdit_backend.planner.cost_model import Degrees, Job
from xdit_backend.planner.memory_model import MemorySettings, rank_memory
from xdit_backend.protocol.errors import ConfigError
from xdit_backend.tools.bench import cost_model_accuracy, published_runs
from xdit_backend.tools.bench.cost_model_accuracy import (
    fit,
    memory_errors,
    predict,
    probe_rows,
    read_memory_rows,
    score,
)
from xdit_backend.tools.bench.published_runs import MODELS, read_rows

COLUMNS = ("id,source,model,resolution,frames,tokens,text_tokens,steps,cfg_branches,gpu,number,link,machine,layout,"
           "deg_cfg,deg_ulysses,deg_ring,deg_pipefusion,deg_tensor,deg_distrifusion,patches,warmup,compiled,unit,"
           "seconds,read_from,note,exclude").split(",")
LAYOUTS = [{}, {"cfg": 2}, {"ulysses": 2}, {"ring": 2}, {"pipefusion": 2}, {"ulysses": 4}, {"ring": 4},
           {"pipefusion": 4}, {"tensor": 2},
           {"cfg": 2, "ulysses": 2}, {"cfg": 2, "pipefusion": 2}, {"ulysses": 2, "ring": 2}, {"distrifusion": 2}]


def write(path, columns, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Runs on two machines whose constants are off the usual ones, timed within 2 %."""
    lines = []
    for gpu, machine, link in (("A100", "nv", "NVLink"), ("L40", "pc", "PCIe Gen4")):
        for model, tokens in (("sd3-medium", 4096), ("sd3-medium", 16384), ("flux.1-dev", 4096), ("flux.1-dev", 16384)):
            for layout in LAYOUTS:
                number = 1
                for degree in layout.values():
                    number *= degree
                lines.append({
                    "id": f"R{len(lines)}", "source": "made", "model": model, "resolution": str(tokens), "frames": 1,
                    "tokens": tokens,
                    "text_tokens": 512, "steps": 20, "cfg_branches": 2, "gpu": gpu, "number": number, "link": link,
                    "machine": machine,
                    "layout": str(layout), **{f"deg_{name}": layout.get(name, 1) for name in published_runs.DEGREES},
                    "warmup": 1, "compiled": 0, "seconds": 1.0})
    path = write(tmp_path_factory.mktemp("planner") / "runs.csv", COLUMNS, lines)
    rows, chance = read_rows(path), random.Random(0)
    truth = {name: usual * (1 if name[0] == "host" else 2 ** chance.uniform(-0.8, 0.8) if placement > 1
                            else 2 ** chance.uniform(-0.2, 0.2))
             for name, (usual, placement) in cost_model_accuracy.usual_constants(rows, probe_rows(rows)).items()}
    for line, row in zip(lines, rows):
        line["seconds"] = predict(row, truth) * chance.uniform(0.98, 1.02)
    return write(path, COLUMNS, lines)


def test_a_machine_is_found_from_what_a_probe_measures(table):
    rows = read_rows(table)
    values, probed = fit(rows)
    for row in rows:
        row.predicted = predict(row, values)
    errors, losses = score(rows, set(probed))

    assert len(probed) < len(rows) / 2 and len(errors) == len(rows) - len(probed)
    assert all(row.number == 1 or published_runs.collective_of(row) or row.seconds < 60 for row in probed)
    within(sorted(errors.values())[len(errors) // 2], 0.05)
    assert max(losses.values()) < 1.1 and len(losses) == 16


def test_rows_that_are_held_out_are_never_fitted(table):
    rows = read_rows(table)
    for row in rows[::2]:
        row.held_out = True

    assert not [row for row in probe_rows(rows) if row.held_out] and probe_rows(rows)


def test_what_is_not_measured_does_not_move_the_fit(table):
    """Seconds of rows that are predicted may be anything."""
    rows = read_rows(table)
    probed = set(probe_rows(rows))
    values = fit(rows)[0]
    for row in rows:
        if row not in probed:
            row.seconds *= 1.2

    assert fit(rows)[0] == values


def test_the_command_prints_all_models_and_links(table, tmp_path, capsys):
    names = ("model", "number", "tokens", "text_tokens", "cfg_branches", *published_runs.DEGREES, "gb")
    lines = []
    for layout in ({}, {"pipefusion": 4}, {"ulysses": 4}):
        degrees = Degrees(**layout)
        formula = 7 + rank_memory(MODELS["flux.1-dev"], Job(4096, 512, 1), degrees,
                                  MemorySettings(exchanged_copies=2)).total / 1e9
        lines.append({"model": "flux.1-dev", "number": degrees.devices, "tokens": 4096, "text_tokens": 512,
                      "cfg_branches": 1, "gb": formula,
                      **{name: layout.get(name, 1) for name in published_runs.DEGREES}})
    memory = write(tmp_path / "memory.csv", names, lines)

    cost_model_accuracy.print_seconds(table)
    cost_model_accuracy.print_memory(memory)
    shown = capsys.readouterr().out

    assert [re.search(rf"^{name} .*%", shown, re.MULTILINE) is not None for name in
            ("all", "flux.1-dev", "sd3-medium", "link: NVLink", "link: PCIe")] == [True] * 5
    assert re.search(r"^memory.csv: 3 rows; .* 2 others", shown, re.MULTILINE)
    assert max(error for some in memory_errors(read_memory_rows(memory)).values() for error in some) < 1e-9


@pytest.mark.parametrize("changed, message", [
    ({"model": "sd9"}, "line 2 .R0. is left out: unknown model 'sd9'"),
    ({"gpu": "TPU"}, "unknown gpu 'TPU'"),
    ({"seconds": "fast"}, "line 2 .R0. is left out: could not convert string"),
    ({"seconds": "0"}, "not a number above 0"),
    ({"seconds": "nan"}, "not a number above 0"), ({"tokens": ""}, "line 2 .R0. is left out: there is no 'tokens'"),
    ({"deg_cfg": "0"}, "a degree is below 1")], ids=str)
def test_rows_that_cannot_be_read_are_left_out_by_name(table, tmp_path, changed, message):
    with open(table, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    path, left_out = write(tmp_path / "runs.csv", COLUMNS, [lines[0] | changed, *lines[1:]]), []

    assert len(read_rows(path, left_out)) == len(lines) - 1 and len(left_out) == 1 and re.search(message, left_out[0])
    assert len(read_rows(write(path, COLUMNS, [lines[0] | changed | {"exclude": "odd"}, *lines[1:]]), left_out)) == len(
        lines) - 1
    assert len(left_out) == 1
    with pytest.raises(ConfigError, match="no line can be read"):
        read_rows(write(path, COLUMNS, [lines[0] | changed]))


def test_a_table_of_fewer_columns_and_empty_cells_is_read(table, tmp_path):
    """What a run usually is stands for what is not said; links go by other names, models in capitals."""
    with open(table, newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    few = ["model", "tokens", "text_tokens", "steps", "gpu", "number", "seconds", "link",
           *(f"deg_{name}" for name in published_runs.DEGREES)]
    bare = [{name: "" if line[name] == "1" and name.startswith("deg_") else line[name] for name in few}
            for line in lines]
    bare = [line | {"model": line["model"].upper(), "link": "SXM4" if line["link"] == "NVLink" else ""}
            for line in bare]

    rows, whole = read_rows(write(tmp_path / "runs.csv", few, bare)), read_rows(table)

    assert [replace(row.degrees, warmup_steps=1)
            for row in rows] == [replace(row.degrees, warmup_steps=1) for row in whole]
    assert [cost_model_accuracy.link_of(row) for row in rows] == [cost_model_accuracy.link_of(row) for row in whole]
    errors, losses = score([replace(row, predicted=row.seconds) for row in rows], set())
    assert len(losses) == 16 and len({row.machine for row in rows}) == 2


@pytest.mark.parametrize("text, message",
                         [(None, "there is no such file"), ("model,seconds\n", "lacks the columns tokens, steps"),
                          ("gb,model\n", "lacks the columns tokens, number")])
def test_what_is_no_table_is_refused(tmp_path, text, message):
    path = tmp_path / "table.csv"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=message):
        cost_model_accuracy.main(argparse.Namespace(csv=[path], hold_out=()))
