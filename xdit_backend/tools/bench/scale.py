"""Say what the cost model expects of 1 to 1,024 devices in nodes, for one picture or video: a table, and a plot.

Nothing is measured: the devices are those of the options. For each number of devices the table has the best layout, the
best of those whose picture is one device's, what limits them, and from where on twice as many devices make a run less
than 5 % faster.
"""

import html
import math
from pathlib import Path

from ...planner.cost_model import DEVICES_PER_NODE, Device, Job, Links, ModelDims
from ...planner.descriptions import describe_seconds, layout_description
from ...planner.layout_search import Machine, estimates
from ...protocol.errors import ConfigError

# Flux.1 dev, and Wan 2.1 14B, as dims_of finds them; tokens of a megapixel, of 16 of them, and of five seconds of video
# at 720p.
FLUX = ModelDims(57, 3072, 24, 12.0, 11.9e9, text_once=True, branches_apart=True)
WAN = ModelDims(40, 5120, 40, 13.4, 14.3e9, joint=False, text_once=True, branches_apart=True)
JOBS = {"Flux.1 dev, 1024 px": (FLUX, Job(4096, 512, 28)), "Flux.1 dev, 4096 px": (FLUX, Job(65536, 512, 28)),
        "Wan 2.1 14B, 720p, 5 s": (WAN, Job(75600, 512, 50, branches=2, frames=21))}
COUNTS = [2 ** power for power in range(11)]
PAYS = 1.05                    # times as fast with twice the devices
WIDTH, HEIGHT, MARGIN, LEGEND = 720, 420, 56, 220
COLOURS = ("#1f5fa8", "#b0452c", "#3d7d3a")


def add_arguments(parser):
    parser.add_argument("--tflops", type=float, default=600,
                        help="10^12 operations a second of matrix multiplication, as measured")
    parser.add_argument("--attention-tflops", type=float, default=450, help="of attention")
    parser.add_argument("--memory", type=float, default=80, help="GB of a device")
    parser.add_argument("--memory-rate", type=float, default=3000, help="GB a second that a device moves in its memory")
    parser.add_argument("--inside", type=float, default=200, help="GB a second that a device sends in its node")
    parser.add_argument("--between", type=float, default=40, help="GB a second that a device sends to other nodes")
    parser.add_argument("--latency", type=float, default=20,
                        help="microseconds of a message in a node; between nodes twice, and in a "
                        "group of n devices log2(n) times as many")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the plot there (SVG)")


def main(options):
    machine = machine_of(options)
    print(f"nodes of {DEVICES_PER_NODE} devices: {options.tflops:g} and {options.attention_tflops:g} TFLOP/s of "
          f"matrices and attention, {options.memory:g} GB at {options.memory_rate:g} GB/s; {options.inside:g} GB/s of "
          f"each in its node, {options.between:g} GB/s to others; {options.latency:g} us a message")
    lines = {name: simulated(dims, job, machine) for name, (dims, job) in JOBS.items()}
    for name, rows in lines.items():
        print_table(name, rows)
    if options.plot:
        try:
            options.plot.write_text(plot(lines), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--plot {options.plot}: cannot be written ({error.strerror}).") from error


def machine_of(options):
    """A function of a number of devices: the Machine."""
    for name in ("tflops", "attention_tflops", "memory", "memory_rate", "inside", "between", "latency"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give a number above 0.")
    device = Device(options.tflops * 1e12, options.attention_tflops * 1e12, options.memory_rate * 1e9,
                    memory_bytes=options.memory * 1e9)
    sizes = [2 ** power for power in range(1, 11)]
    latencies = {size: options.latency * 1e-6 * math.log2(size) * (1 if size <= DEVICES_PER_NODE else 2)
                 for size in sizes}
    inside = [size for size in sizes if size <= DEVICES_PER_NODE]
    rates = {(collective, size): options.inside * 1e9 for collective in ("all_to_all", "hop", "all_reduce", "gather")
             for size in inside}
    links = Links(rates | {("network", 0): options.between * 1e9},
                  latencies={(collective, size): latency for collective, _ in rates
                             for size, latency in latencies.items()})
    return lambda count: Machine((device,) * count, links)


def simulated(dims, job, machine):
    """[(number of devices, best Forecast, best exact Forecast)]"""
    rows = []
    for count in COUNTS:
        ordered = [one for one in estimates(dims, job, machine(count)) if one.fits and one.working == count]
        if ordered:
            rows.append((count, ordered[0], next((one for one in ordered if one.is_exact), None)))
    return rows


def print_table(name, rows):
    alone_s = rows[0][1].seconds
    print(f"\n{name}: {rows[0][0]} device{'s' if rows[0][0] > 1 else ''} {describe_seconds(alone_s)}\n"
          f"{'devices':>8} {'seconds':>8} {'faster':>7} {'each does':>10}  {'layout':<46} {'limited by':<11} "
          f"{'exact: s':>9}  layout")
    for count, best, exact in rows:
        faster = alone_s / best.seconds
        print(f"{count:>8} {best.seconds:>8.2f} {faster:>6.1f}x {faster * rows[0][0] / count:>9.0%}  "
              f"{layout_description(best):<46} {best.limited_by:<11} "
              + ("" if exact is None else f"{exact.seconds:>9.2f}  {layout_description(exact)}"))
    last = stops_paying(rows)
    print(f"Twice as many are less than {PAYS - 1:.0%} faster from {last} devices on." if last else
          "Twice as many are always worth having, as far as this goes.")


def stops_paying(rows):
    """The number of devices from which on twice as many are hardly faster; None: it is not among these."""
    for (count, best, _), *more in (rows[index:] for index in range(len(rows) - 1)):
        if all(best.seconds < PAYS * other.seconds for _, other, _ in more):
            return count
    return None


def plot(lines):
    """An SVG: times as fast as the fewest devices that hold the model, over the number of devices, both doubling."""
    most = max(math.log2(rows[0][1].seconds / best.seconds) for rows in lines.values() for _, best, _ in rows)
    last = math.log2(COUNTS[-1])

    def place(count, faster):
        return (MARGIN + math.log2(count) / last * (WIDTH - MARGIN - LEGEND),
                HEIGHT - MARGIN - max(0.0, math.log2(faster)) / math.ceil(most) * (HEIGHT - 2 * MARGIN))

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             f'font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for count in COUNTS:
        x, y = place(count, 1)
        parts.append(f'<line x1="{x:.1f}" y1="{MARGIN}" x2="{x:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>'
                     f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{count}</text>')
    for power in range(math.ceil(most) + 1):
        x, y = place(1, 2 ** power)
        end, _ = place(COUNTS[-1], 1)
        parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>'
                     f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{2 ** power}x</text>')
    for index, ((name, rows), colour) in enumerate(zip(lines.items(), COLOURS)):
        alone_s = rows[0][1].seconds
        for kind, dash in (("best", ""), ("exact", ' stroke-dasharray="5 4"')):
            points = [place(count, alone_s / one.seconds) for count, best, exact in rows
                      if (one := best if kind == "best" else exact)]
            parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dash} points="'
                         + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>')
        y = MARGIN + 22 * index
        parts.append(f'<line x1="{WIDTH - LEGEND + 14}" y1="{y}" x2="{WIDTH - LEGEND + 40}" y2="{y}" stroke="{colour}" '
                     f'stroke-width="2"/><text x="{WIDTH - LEGEND + 48}" y="{y + 4}">{html.escape(name)}</text>')
    parts.append(f'<text x="{WIDTH - LEGEND + 14}" y="{MARGIN + 22 * len(lines) + 8}">dashed: exactly one device\'s '
                 f'picture</text><text x="{MARGIN}" y="{HEIGHT - 12}">devices, in nodes of {DEVICES_PER_NODE}</text>'
                 f'<text x="{MARGIN}" y="{MARGIN - 24}">times as fast as the fewest that hold the model, by '
                 f'forecast</text></svg>\n')
    return "\n".join(parts)
