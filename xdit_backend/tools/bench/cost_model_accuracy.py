"""Measure how well the cost model predicts published runs: errors of time and memory, and of the layout that it would
choose.

The model's constants are fitted on rows that a probe of each machine would measure: one device, one row per collective
and group size, and the smallest job. All others are predicted.
"""

import csv
import math
import statistics
from dataclasses import replace
from pathlib import Path

from ...planner.cost_model import Degrees, Device, Job, Links
from ...planner.layout_search import candidates
from ...planner.memory_model import MemorySettings, rank_memory
from ...planner.run_time import run_seconds
from ...protocol.errors import ConfigError
from .published_runs import (
    COLLECTIVES,
    GPUS,
    MODELS,
    NEAR,
    RELATIVES,
    TRAFFIC,
    collective_of,
    degrees_of,
    positive,
    read_lines,
    read_rows,
)

MEMORY_COLUMNS = ("model", "tokens", "number", "gb")               # required columns
COLUMNS = ("model", "tokens", "steps", "gpu", "number", "seconds")
GROUP_SIZES = (2, 4, 8, 16)
HIDDEN = {"NVLink": 0.75, "PCIe": 0.5}     # fraction of a hop that overlaps attention; PCIe goes through system RAM


# --- measurements of a probe ---

def probe_rows(rows):
    """The rows to fit on: a probe measures one device, each collective at each group size, and launch times."""
    order = sorted((row for row in rows if row.degrees and not row.held_out),
                   key=lambda row: (row.job.compiled, abs(row.job.tokens - 16384), row.name))
    chosen, seen, smallest = [], set(), {}
    for row in order:
        key = (row.machine, collective_of(row))
        if row.number == 1:
            chosen.append(row)
        elif key[1] and key not in seen:
            seen.add(key)
            chosen.append(row)
        if row.number > 1 and row.degrees.tensor == 1:
            best = smallest.setdefault((row.machine, row.job.compiled), row)
            if row.seconds / row.job.steps < best.seconds / best.job.steps:
                smallest[row.machine, row.job.compiled] = row
    return chosen + [row for row in smallest.values() if row not in chosen]


# --- constants: typical values and prior standard deviations of their logarithms ---

USUAL = {"half_rows": (300, 0.5), "kernel_bytes": (60, 0.5), "kernel_bytes compiled": (0.5, 0.5),
         "block_launch_s": (1.3e-3, 0.5),
         "block_launch_s compiled": (4e-4, 0.5), "collective_launch_s": (2e-4, 0.5), "round_launch_s": (3.5e-4, 0.5),
         "slot_launch_s": (2e-3, 0.5), "other launches compiled": (0.4, 0.5), "latency_s": (3e-5, 0.5),
         "busy_ring": (0.1, 0.5),
         "half_keys": (300, 0.5), "merge_bytes": (8, 0.5), "pack_bytes": (4, 0.5), "image_s": (0.3, 0.5),
         "video_s": (0.5, 0.5), "network": (1.2, 0.5)}
RATES = {"NVLink": {"all_to_all": 60, "hop": 80, "all_reduce": 40, "gather": 80},
         "PCIe": {"all_to_all": 10, "hop": 12, "all_reduce": 8, "gather": 6}}


def usual_constants(rows, probed):
    """{constant: (typical value, standard deviation of its logarithm)}. A constant is a tuple of a name and what it
    applies to."""
    constants: dict[tuple, tuple] = {(name,): value for name, value in USUAL.items()}
    for link, rates in RATES.items():
        constants |= {(collective, link): (rate, 0.2) for collective, rate in rates.items()}
    for row in rows:
        constants[("matrix share", row.gpu)] = (0.65, 0.25)
        constants[("attention share", row.gpu)] = (0.5, 0.25)
        family = RELATIVES.get(row.model, row.model)
        traffic = TRAFFIC.get(family, 0) / TRAFFIC["pixart-alpha"]
        constants[("kernels", family)] = (traffic or min(1.5, MODELS[family].kernels), 1.0)
        constants[("host", row.machine)] = (1.0, 0.6)
    for row in probed:
        measured = collective_of(row)
        if measured:
            collective, size = measured
            near = min(GROUP_SIZES, key=lambda known: abs(math.log(known / size)))
            link = link_of(row)
            slow = 4 if link == "PCIe" and size >= 8 else 1
            constants[(collective, near, row.machine)] = (RATES[link][collective] / slow, 1.2)
    return constants


def link_of(row):
    return "NVLink" if any(name in row.link.lower() for name in ("nvlink", "nvswitch", "sxm", "hccs")) else "PCIe"


def machine_of(row, values):
    """(Device, Links) of a row's machine, for its model family, compiled or not."""
    matrix, memory = GPUS[row.gpu]
    host, compiled = values[("host", row.machine)], row.job.compiled
    others = host * (values[("other launches compiled",)] if compiled else 1)
    device = Device(
        matrix_flops_s=matrix * values[("matrix share", row.gpu)],
        attention_flops_s=matrix * values[("attention share", row.gpu)], memory_bytes_s=memory,
        half_rows=values[("half_rows",)], half_keys=values[("half_keys",)],
        kernel_bytes=values[("kernel_bytes",)] * (values[("kernel_bytes compiled",)] if compiled else 1)
        * values[("kernels", RELATIVES.get(row.model, row.model))],
        block_launch_s=host * values[("block_launch_s compiled",) if compiled else ("block_launch_s",)],
        collective_launch_s=others * values[("collective_launch_s",)],
        round_launch_s=others * values[("round_launch_s",)],
        slot_launch_s=host * values[("slot_launch_s",)], merge_bytes=values[("merge_bytes",)],
        busy_ring=values[("busy_ring",)], pack_bytes=values[("pack_bytes",)])
    rates = {}
    for collective in COLLECTIVES.values():
        rates |= {(collective, size): values[(collective, size, row.machine)] * 1e9 for size in GROUP_SIZES
                  if (collective, size, row.machine) in values}
        if not any(name == collective for name, _ in rates):
            rates[collective, 2] = values[(collective, link_of(row))] * 1e9
    network = values.get(("hop", 16, row.machine), values[("network",)]) * 1e9
    return device, Links(rates | {("network", 0): network}, values[("latency_s",)], HIDDEN[link_of(row)])



def predict(row, values):
    device, links = machine_of(row, values)
    job = replace(row.job, fixed_s=row.job.fixed_s * values[("video_s",) if row.job.frames > 1 else ("image_s",)])
    dims = MODELS[row.model]

    def seconds(degrees):
        return sum(run_seconds(dims, job, degrees, device, links).values())

    if row.degrees is None:
        return min(map(seconds, candidates(dims, job, row.number)))
    if row.ratio_to:
        return row.ratio_to * seconds(row.degrees) / seconds(Degrees())
    return seconds(row.degrees)


def fit(rows):
    """{constant: value} that best predicts the probe's rows while staying near the typical values; and those rows."""
    import numpy
    from scipy.optimize import least_squares
    from scipy.sparse import lil_matrix
    probed = probe_rows(rows)
    usual = usual_constants(rows, probed)
    names = list(usual)
    start = numpy.array([math.log(usual[name][0]) for name in names])
    placement = numpy.array([usual[name][1] for name in names])

    def residual(point):
        values = dict(zip(names, numpy.exp(point).tolist()))
        return numpy.concatenate([[math.log(predict(row, values) / row.seconds) / 0.06 for row in probed],
                                  (point - start) / placement])

    # sparsity: which rows each constant affects, so that constants with disjoint rows are varied at once
    pattern = lil_matrix((len(probed) + len(names), len(names)), dtype=int)
    for index, name in enumerate(names):
        of = name[-1] if len(name) > 1 else None
        for line, row in enumerate(probed):
            if of in (None, row.gpu, row.machine, RELATIVES.get(row.model, row.model), link_of(row)):
                pattern[line, index] = 1
        pattern[len(probed) + index, index] = 1
    found = least_squares(residual, start, loss="soft_l1", f_scale=2.0, max_nfev=22, jac_sparsity=pattern)
    return dict(zip(names, numpy.exp(found.x).tolist())), probed


def score(rows, probed):
    """({row that was not fitted: relative error of its seconds}, {rows of one job: ratio of the time of the layout with
    the lowest estimate to the best time})."""
    errors = {row: abs(row.predicted / row.seconds - 1) for row in rows if row not in probed}
    sets = {}
    for row in rows:
        if row.degrees:
            sets.setdefault(row.group, []).append(row)
    sets = {group: some for group, some in sets.items() if len({row.layout for row in some}) > 1}
    losses = {tuple(some): min(some, key=lambda row: row.predicted).seconds / min(row.seconds for row in some)
              for some in sets.values()}
    return errors, losses


# --- memory ---

def read_memory_rows(path, left_out=None):
    """[(model, is one device, gigabytes, estimate of the transformer's memory)]."""
    return read_lines(path, memory_row_of, [] if left_out is None else left_out)


def memory_row_of(line):
    job = Job(int(line["tokens"]), int(line["text_tokens"]), 1, int(line["cfg_branches"]))
    return (line["model"], line["number"] == "1" and line["held_out"] != "1", positive(line["gb"]),
            rank_memory(MODELS[line["model"]], job, degrees_of(line), MemorySettings(exchanged_copies=2)).total / 1e9)


def memory_errors(rows):
    """{model: [errors]}. Memory outside the transformer (text encoders, VAE) is taken from one device's row."""
    others = {}
    for model, is_one, gigabytes, formula in rows:
        if is_one:
            others.setdefault(model, []).append(gigabytes - formula)
    errors = {}
    for model, is_one, gigabytes, formula in rows:
        if not is_one and model in others:
            errors.setdefault(model, []).append(abs((formula + statistics.mean(others[model])) / gigabytes - 1))
    return errors


# --- the command ---

def add_arguments(parser):
    parser.add_argument("--csv", type=Path, nargs="+", required=True, metavar="FILE",
                        help="tables of published runs: one row per run, with seconds or (in a column `gb`) memory per "
                             "rank")
    parser.add_argument("--hold-out", nargs="+", default=(), metavar="NAME",
                        help="fit no rows of these models, GPUs, machines or links (NVLink, PCIe), and report how well "
                             "they are predicted")


def main(options):
    for path in options.csv:
        if not path.is_file():
            raise ConfigError(f"--csv {path}: there is no such file.")
        with open(path, newline="", encoding="utf-8") as file:
            columns = next(csv.reader(file), [])
        needed = MEMORY_COLUMNS if "gb" in columns else COLUMNS
        missing = [name for name in needed if name not in columns]
        if missing:
            raise ConfigError(f"--csv {path}: the table lacks the columns {', '.join(missing)}.")
        if "gb" in columns:
            print_memory(path)
        else:
            print_seconds(path, options.hold_out)


def print_seconds(path, hold_out=()):
    left_out: list[str] = []
    rows = read_rows(path, left_out)
    print("\n".join(left_out), end="\n" if left_out else "")
    for row in rows:
        row.held_out = row.held_out or bool({row.model, row.gpu, row.machine, link_of(row)} & set(hold_out))
    values, probed = fit(rows)
    for row in rows:
        row.predicted = predict(row, values)
    errors, losses = score(rows, set(probed))
    print(f"{path.name}: {len(rows)} rows, of which {len(probed)} were fitted with {len(values)} constants near their "
          f"typical values; the others are predicted.")
    print(f"{'':<20} {'rows':>5} {'median':>7} {'90th':>7} {'sets':>5} {'best or within 5 %':>19} {'mean loss':>10}")
    print_line("all", errors, losses, lambda row: True)
    if any(row.held_out for row in rows):
        print_line("hold-out", errors, losses, lambda row: row.held_out)
    for of in (lambda row: row.model, lambda row: "link: " + link_of(row)):
        for name in sorted({of(row) for row in rows}):
            print_line(name, errors, losses, lambda row, of=of, name=name: of(row) == name)
    print("median, 90th: percentiles of the relative error of seconds, over rows that were not fitted. sets: runs of "
          "one job on the\nsame number of devices under several layouts. loss: extra time of the layout with the "
          "lowest estimate over the best one.")


def print_line(name, errors, losses, belongs):
    some = [error for row, error in errors.items() if belongs(row)]
    lost = [loss for rows, loss in losses.items() if belongs(rows[0])]
    near = sum(loss <= NEAR for loss in lost)
    print(f"{name:<20} {len(some):>5} {percentile(some, 0.5):>7} {percentile(some, 0.9):>7} {len(lost):>5} "
          f"{f'{near} ({near / len(lost):.0%})' if lost else '':>19} "
          f"{f'{statistics.mean(lost) - 1:.1%}' if lost else '':>10}")


def percentile(errors, share):
    """As NumPy's, for a list; "" if it is empty."""
    if not errors:
        return ""
    position = share * (len(errors) - 1)
    low, ordered = int(position), sorted(errors)
    return f"{ordered[low] + (position - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]):.1%}"


def print_memory(path):
    left_out: list[str] = []
    rows = read_memory_rows(path, left_out)
    print("\n".join(left_out), end="\n" if left_out else "")
    errors = memory_errors(rows)
    predicted = [error for some in errors.values() for error in some]
    print(f"{path.name}: {len(rows)} rows; memory outside the transformer is taken from one device's, {len(predicted)} "
          f"others are predicted.")
    print(f"{'':<20} {'rows':>5} {'median':>7} {'90th':>7}")
    for name, some in {"all": predicted, **dict(sorted(errors.items()))}.items():
        print(f"{name:<20} {len(some):>5} {percentile(some, 0.5):>7} {percentile(some, 0.9):>7}")
