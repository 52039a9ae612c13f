"""Tell how well the cost model predicts published runs: errors of seconds and memory, and of the layout it would choose.

The model's constants are fitted on the rows that a probe of each machine would measure: one device, one row for each collective
and group size, and the smallest job. All others are predicted.
"""

import csv
import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..forecast.choice import candidates
from ..forecast.cost import Degrees, Device, Job, Links, Net, run_seconds
from ..forecast.memory import rank_memory
from ..protocol.errors import ConfigError

WITHOUT_SIZE = ("stepvideo-30b", "mochi-1")            # or without steps: only ratios to their one device can be predicted
NEAR = 1.05                    # times the best that a choice may take and count as right



def net(blocks, width, heads, billions, feed_forward=4.0, joint=True, mixers=1, skips=False, **more):
    """A transformer of a table. feed_forward: its inner width, in widths. mixers: attentions of image tokens a block, each with a
    feed-forward. Beside them blocks have queries and results of cross-attention, and half of those with skips a matrix that
    makes one width of two."""
    elements = mixers * (4 + 2 * feed_forward) + (0 if joint else 2) + (1 if skips else 0)
    return Net(blocks, width, heads, elements, billions * 1e9, joint=joint, skips=skips, **more)


NETS = {
    "pixart-alpha": net(28, 1152, 16, 0.61, joint=False),
    "sd3-medium": net(24, 1536, 24, 2.03, shards_text=False, kernels=1.3),
    "flux.1-dev": net(57, 3072, 24, 11.9),
    "flux.1-schnell": net(57, 3072, 24, 11.9),
    "hunyuandit": net(40, 1408, 16, 1.5, feed_forward=4.36, joint=False, skips=True, kernels=2.3),
    "cogvideox-2b": net(30, 1920, 30, 1.7),
    "cogvideox-5b": net(42, 3072, 48, 5.6),
    "cogvideox1.5-5b": net(42, 3072, 48, 5.6),
    "consisid": net(42, 3072, 48, 6.0, feed_forward=4.5),
    "latte-1": net(28, 1152, 16, 0.67, joint=False, mixers=2, attention="frame", kernels=2.0),
    "hunyuanvideo": net(60, 3072, 24, 12.8),
    "sana-1.6b-4k": net(20, 2240, 70, 1.6, feed_forward=3.75, joint=False, attention="linear", kernels=1.3),
    "mochi-1": net(48, 3072, 24, 10.0),
    "stepvideo-30b": net(48, 6144, 48, 30.0, joint=False),
    "wan2.1-1.3b": net(30, 1536, 12, 1.3, feed_forward=5.83, joint=False),
    "wan2.1-14b": net(40, 5120, 40, 14.3, feed_forward=2.7, joint=False),
    "chroma": net(57, 3072, 24, 8.9),
    "qwen-image": net(60, 3072, 24, 20.4),
}
RELATIVES = {"flux.1-schnell": "flux.1-dev", "chroma": "flux.1-dev", "qwen-image": "flux.1-dev", "consisid": "cogvideox-5b",
             "cogvideox1.5-5b": "cogvideox-5b", "cogvideox-2b": "cogvideox-5b", "wan2.1-1.3b": "wan2.1-14b"}
# Of the data sheets: dense 16-bit operations and bytes of memory a second.
CARDS = {"A100-80G": (312e12, 1.9e12), "A100": (312e12, 1.9e12), "L40": (181e12, 0.864e12), "L20": (119.5e12, 0.864e12),
         "H100": (989e12, 3.35e12), "H20": (148e12, 4.0e12), "T4": (65e12, 0.3e12), "V100": (125e12, 0.9e12),
         "RTX 2000 Ada": (48e12, 0.224e12), "H200": (989e12, 4.8e12), "H800": (989e12, 3.35e12), "A800": (312e12, 2.0e12),
         "L40S": (362e12, 0.864e12), "A10": (125e12, 0.6e12), "RTX 4090": (165e12, 1.008e12), "RTX 3090": (71e12, 0.936e12)}
DEGREES = ("cfg", "ulysses", "ring", "pipefusion", "tensor", "distrifusion")           # as the tables call them
MEMORY_COLUMNS = ("model", "tokens", "number", "gb")               # without which a table says nothing
COLUMNS = ("model", "tokens", "steps", "gpu", "number", "seconds")
USUAL_CELLS = {"id": "", "source": "", "resolution": "", "frames": "1", "text_tokens": "0", "cfg_branches": "1", "link": "", "machine": "",
               "layout": "", "patches": "0", "warmup": "1", "compiled": "0", "note": "", "exclude": "", "held_out": "0",
               **{prefix + name: "1" for name in DEGREES for prefix in ("", "deg_")}}
COLLECTIVES = {"ulysses": "all_to_all", "ring": "hop", "displaced": "gather", "tensor": "all_reduce"}
GROUP_SIZES = (2, 4, 8, 16)
HIDDEN = {"NVLink": 0.75, "PCIe": 0.5}     # of a hop beside attention: over PCIe it goes through the host's memory


@dataclass(eq=False)
class Row:
    """A published run."""

    name: str
    source: str
    model: str
    resolution: str
    card: str
    number: int
    link: str
    machine: str
    layout: str
    degrees: Degrees | None        # None: the best hybrid, which is not named
    job: Job
    seconds: float
    held_out: bool
    ratio_to: float | None = None  # the size or steps are not published, only this one device's seconds beside it
    predicted: float = field(default=math.nan)

    @property
    def group(self):
        return self.source, self.model, self.resolution, self.machine, self.number, self.job.compiled


def read_rows(path, left_out=None):
    """The runs of a table that the cost model can be asked about. left_out: a list to which is added why others are not among them."""
    rows = read_lines(path, row_of, [] if left_out is None else left_out)
    alone = {(row.model, row.job.compiled): row.seconds for row in rows if row.number == 1}
    for row in rows:
        if row.model in WITHOUT_SIZE:
            row.ratio_to = alone.get((row.model, row.job.compiled))
    return rows


def read_lines(path, read, left_out):
    """[read(line)] of a table, an empty or missing cell being as USUAL_CELLS has it. What cannot be read is left out, with the reason."""
    rows = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        for number, cells in enumerate(csv.DictReader(file), 2):
            line = USUAL_CELLS | {name: cell.strip() for name, cell in cells.items() if isinstance(cell, str) and cell.strip()}
            if line["exclude"]:
                continue
            line["model"] = line.get("model", "").lower()
            unknown = [f"{column} {line[column]!r}" for column, known in (("model", NETS), ("gpu", CARDS)) if line.get(column, "") not in
                       (*known, *([""] if column == "gpu" and "gb" in cells else []))]
            try:
                if unknown:
                    raise ValueError(f"nothing is known of {' and '.join(unknown)}")
                rows.append(read(line))
            except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
                what = f"there is no {error}" if isinstance(error, KeyError) else error
                left_out.append(f"line {number} ({line['id'] or line['model']}) is left out: {what}")
    if not rows:
        raise ConfigError(f"--csv {path}: no line can be read. {'; '.join(left_out[:3]) or 'It has none'}. Known models are "
                          f"{', '.join(NETS)}; known cards {', '.join(CARDS)}.")
    return rows


def row_of(line):
    degrees = None
    if not line["layout"].startswith("best"):
        degrees = degrees_of(line, "deg_")
        # DistriFusion's authors, and who took it over from them, run one synchronous step more than the warm-up has.
        warmup_steps = warmup_of(line) + (degrees.displaced > 1)
        degrees = replace(degrees, num_patches=int(line["patches"]), warmup_steps=warmup_steps)
    megapixels = 0.0
    if "end to end" in line["note"]:
        width, height = (int(size) for size in line["resolution"].split("x"))
        megapixels = width * height * int(line["frames"]) / 1e6
    job = Job(int(line["tokens"]), int(line["text_tokens"]), int(line["steps"]), int(line["cfg_branches"]), int(line["frames"]),
              line["compiled"] == "1", megapixels)
    return Row(line["id"], line["source"], line["model"], line["resolution"] or line["tokens"], line["gpu"], int(line["number"]),
               line["link"], line["machine"] or f"{line['gpu']}, {line['link']}", line["layout"] or str(degrees), degrees, job,
               positive(line["seconds"]), line["held_out"] == "1")


def degrees_of(line, prefix=""):
    cfg, ulysses, ring, pipefusion, tensor, displaced = (int(line[prefix + name]) for name in DEGREES)
    if min(cfg, ulysses, ring, pipefusion, tensor, displaced) < 1:
        raise ValueError("a degree is below 1")
    return Degrees(cfg, ulysses, ring, pipefusion, tensor, displaced)


def warmup_of(line):
    """Warm-up steps, corrected where the timings prove the table's assumption wrong: no schedule with so many could be as fast."""
    legacy = "legacy" in line["source"] or "arXiv 2405.14430" in line["source"]
    if "not given" in line["note"] or "warm-up steps no" in line["note"]:
        return 2
    if line["model"] == "pixart-alpha" and not legacy:
        return 0
    return int(line["warmup"])


# --- what a probe would measure ---

def collective_of(row):
    """(collective, group size) of a run by one method that has the whole group; None of others."""
    if row.degrees is None:
        return None
    used = [(name, getattr(row.degrees, name)) for name in (*COLLECTIVES, "cfg", "pipefusion") if getattr(row.degrees, name) > 1]
    if len(used) != 1 or used[0][0] not in COLLECTIVES:
        return None
    return COLLECTIVES[used[0][0]], used[0][1]


def probe_rows(rows):
    """The rows to fit on: a probe measures one device, each collective in each group size, and what launching costs."""
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


# --- constants, their usual values and how far they may be from them, as logarithms ---

USUAL = {"half_rows": (300, 0.5), "kernel_bytes": (60, 0.5), "kernel_bytes compiled": (0.5, 0.5), "block_launch_s": (1.3e-3, 0.5),
         "block_launch_s compiled": (4e-4, 0.5), "collective_launch_s": (2e-4, 0.5), "round_launch_s": (3.5e-4, 0.5),
         "slot_launch_s": (2e-3, 0.5), "other launches compiled": (0.4, 0.5), "latency_s": (3e-5, 0.5), "busy_ring": (0.1, 0.5),
         "half_keys": (300, 0.5), "merge_bytes": (8, 0.5), "pack_bytes": (4, 0.5), "picture_s": (0.3, 0.5),
         "video_s": (0.5, 0.5), "network": (1.2, 0.5)}
RATES = {"NVLink": {"all_to_all": 60, "hop": 80, "all_reduce": 40, "gather": 80},
         "PCIe": {"all_to_all": 10, "hop": 12, "all_reduce": 8, "gather": 6}}


def usual_constants(rows, probed):
    """{constant: (its usual value, its spread as a logarithm)}. A constant is a name and what it is of."""
    constants: dict[tuple, tuple] = {(name,): value for name, value in USUAL.items()}
    for link, rates in RATES.items():
        constants |= {(collective, link): (rate, 0.2) for collective, rate in rates.items()}
    for row in rows:
        constants[("matrix share", row.card)] = (0.65, 0.25)
        constants[("attention share", row.card)] = (0.5, 0.25)
        family = RELATIVES.get(row.model, row.model)
        constants[("kernels", family)] = (min(1.5, NETS[family].kernels), 1.0)
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
    """(Device, Links) of a row's machine, for the family it runs and the way it is compiled."""
    matrix, memory = CARDS[row.card]
    host, compiled = values[("host", row.machine)], row.job.compiled
    others = host * (values[("other launches compiled",)] if compiled else 1)
    device = Device(
        matrix_flops_s=matrix * values[("matrix share", row.card)],
        attention_flops_s=matrix * values[("attention share", row.card)], memory_bytes_s=memory,
        half_rows=values[("half_rows",)], half_keys=values[("half_keys",)],
        kernel_bytes=values[("kernel_bytes",)] * (values[("kernel_bytes compiled",)] if compiled else 1)
        * values[("kernels", RELATIVES.get(row.model, row.model))],
        block_launch_s=host * values[("block_launch_s compiled",) if compiled else ("block_launch_s",)],
        collective_launch_s=others * values[("collective_launch_s",)], round_launch_s=others * values[("round_launch_s",)],
        slot_launch_s=host * values[("slot_launch_s",)], merge_bytes=values[("merge_bytes",)], busy_ring=values[("busy_ring",)],
        pack_bytes=values[("pack_bytes",)])
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
    job = replace(row.job, fixed_s=row.job.fixed_s * values[("video_s",) if row.job.frames > 1 else ("picture_s",)])
    net = NETS[row.model]

    def seconds(degrees):
        return sum(run_seconds(net, job, degrees, device, links).values())

    if row.degrees is None:
        return min(map(seconds, candidates(net, job, row.number)))
    if row.ratio_to:
        return row.ratio_to * seconds(row.degrees) / seconds(Degrees())
    return seconds(row.degrees)


def fit(rows):
    """{constant: value} that predicts the probe's rows best, while it stays near the usual values; and those rows."""
    import numpy
    from scipy.optimize import least_squares
    from scipy.sparse import lil_matrix
    probed = probe_rows(rows)
    usual = usual_constants(rows, probed)
    names = list(usual)
    start = numpy.array([math.log(usual[name][0]) for name in names])
    spread = numpy.array([usual[name][1] for name in names])

    def residual(point):
        values = dict(zip(names, numpy.exp(point).tolist()))
        return numpy.concatenate([[math.log(predict(row, values) / row.seconds) / 0.06 for row in probed], (point - start) / spread])

    # Which rows a constant can move: so columns that share no row are tried at once.
    pattern = lil_matrix((len(probed) + len(names), len(names)), dtype=int)
    for index, name in enumerate(names):
        of = name[-1] if len(name) > 1 else None
        for line, row in enumerate(probed):
            if of in (None, row.card, row.machine, RELATIVES.get(row.model, row.model), link_of(row)):
                pattern[line, index] = 1
        pattern[len(probed) + index, index] = 1
    found = least_squares(residual, start, loss="soft_l1", f_scale=2.0, max_nfev=22, jac_sparsity=pattern)
    return dict(zip(names, numpy.exp(found.x).tolist())), probed


def score(rows, probed):
    """({rows that were not fitted: error of their seconds}, {set: times that the layout with the least forecast takes of the best})."""
    errors = {row: abs(row.predicted / row.seconds - 1) for row in rows if row not in probed}
    sets = {}
    for row in rows:
        if row.degrees:
            sets.setdefault(row.group, []).append(row)
    sets = {group: some for group, some in sets.items() if len({row.layout for row in some}) > 1}
    losses = {tuple(some): min(some, key=lambda row: row.predicted).seconds / min(row.seconds for row in some) for some in sets.values()}
    return errors, losses


# --- memory ---

def read_memory_rows(path, left_out=None):
    """[(model, is one device, gigabytes, memory's formula without what lies beside the transformer)]"""
    return read_lines(path, memory_row_of, [] if left_out is None else left_out)


def memory_row_of(line):
    job = Job(int(line["tokens"]), int(line["text_tokens"]), 1, int(line["cfg_branches"]))
    return (line["model"], line["number"] == "1" and line["held_out"] != "1", positive(line["gb"]),
            rank_memory(NETS[line["model"]], job, degrees_of(line), told_copies=2).total / 1e9)


def positive(text):
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(f"{text!r} is not a number above 0")
    return number


def memory_errors(rows):
    """{model: [errors]}. What lies beside the transformer, text encoders and VAE, is what one device's row shows of it."""
    beside = {}
    for model, is_one, gigabytes, formula in rows:
        if is_one:
            beside.setdefault(model, []).append(gigabytes - formula)
    errors = {}
    for model, is_one, gigabytes, formula in rows:
        if not is_one and model in beside:
            errors.setdefault(model, []).append(abs((formula + statistics.mean(beside[model])) / gigabytes - 1))
    return errors


# --- the command ---

def add_arguments(parser):
    parser.add_argument("--csv", type=Path, nargs="+", required=True, metavar="FILE",
                        help="tables of published runs: one row a run, of seconds or (with a column `gb`) of memory a rank")


    parser.add_argument("--hold-out", nargs="+", default=(), metavar="NAME", help="fit no row of these models, cards, machines or links "
                        "(NVLink, PCIe), and tell how well they are predicted")


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
        row.held_out = row.held_out or bool({row.model, row.card, row.machine, link_of(row)} & set(hold_out))
    values, probed = fit(rows)
    for row in rows:
        row.predicted = predict(row, values)
    errors, losses = score(rows, set(probed))
    print(f"{path.name}: {len(rows)} rows, of which {len(probed)} were fitted with {len(values)} constants near their usual values; "
          f"the others are predicted.")
    print(f"{'':<20} {'rows':>5} {'median':>7} {'90th':>7} {'sets':>5} {'best or within 5 %':>19} {'mean loss':>10}")
    print_line("all", errors, losses, lambda row: True)
    if any(row.held_out for row in rows):
        print_line("held out", errors, losses, lambda row: row.held_out)
    for of in (lambda row: row.model, lambda row: "link: " + link_of(row)):
        for name in sorted({of(row) for row in rows}):
            print_line(name, errors, losses, lambda row, of=of, name=name: of(row) == name)
    print("median, 90th: percentiles of the error of the seconds, of rows that were not fitted. sets: runs of one job on as many devices\n"
          "under several layouts. loss: what the layout with the least forecast takes longer than the best one.")


def print_line(name, errors, losses, belongs):
    some = [error for row, error in errors.items() if belongs(row)]
    lost = [loss for rows, loss in losses.items() if belongs(rows[0])]
    near = sum(loss <= NEAR for loss in lost)
    print(f"{name:<20} {len(some):>5} {percentile(some, 0.5):>7} {percentile(some, 0.9):>7} {len(lost):>5} "
          f"{f'{near} ({near / len(lost):.0%})' if lost else '':>19} {f'{statistics.mean(lost) - 1:.1%}' if lost else '':>10}")


def percentile(errors, share):
    """As NumPy's, of a list; "" of an empty one."""
    if not errors:
        return ""
    place = share * (len(errors) - 1)
    low, ordered = int(place), sorted(errors)
    return f"{ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low]):.1%}"


def print_memory(path):
    left_out: list[str] = []
    rows = read_memory_rows(path, left_out)
    print("\n".join(left_out), end="\n" if left_out else "")
    errors = memory_errors(rows)
    predicted = [error for some in errors.values() for error in some]
    print(f"{path.name}: {len(rows)} rows; one device's show what lies beside the transformer, {len(predicted)} others are predicted.")
    print(f"{'':<20} {'rows':>5} {'median':>7} {'90th':>7}")
    for name, some in {"all": predicted, **dict(sorted(errors.items()))}.items():
        print(f"{name:<20} {len(some):>5} {percentile(some, 0.5):>7} {percentile(some, 0.9):>7}")
