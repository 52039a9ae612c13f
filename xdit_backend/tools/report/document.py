"""The files of a report: JSON, a Markdown page for a forum post, and its chart as PNG."""

import re
from pathlib import Path

from .results import layout_title, to_json, verdict

GB = 1e9
WIDTH, LEFT, BAR, GAP, TOP = 900, 250, 22, 8, 70           # pixels of the chart
COLORS = {"one": "#9aa5b1", "several": "#2f7ed8"}
STAGE = 34                                                 # pixels of a model's heading


def write(report, folder):
    """Write the three files; returns their paths. Raises OSError."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / f"xdit-report-{device_slug(report)}-{report.date}"
    paths = [base.with_name(f"{base.name}{ending}") for ending in (".json", ".md", ".png")]
    paths[0].write_text(to_json(report), encoding="utf-8")
    paths[1].write_text(markdown(report, paths[2].name if report.timings else ""), encoding="utf-8")
    if not report.timings:
        return paths[:2]
    chart(report).save(paths[2], optimize=True)
    return paths


def device_names(report):
    """"2 x NVIDIA GeForce RTX 4090", or "2 CPU workers on <processor>"."""
    gpus, count = report.machine["gpus"], len(report.devices)
    if not report.devices[0].startswith("cuda"):
        return f"{count} CPU workers on {report.machine['processor']}"
    indices = [int(device.partition(":")[2] or 0) for device in report.devices]
    names = [gpus[index]["name"] for index in sorted(set(indices))]
    shared = f", {count} workers" if len(names) < count else ""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) + shared


def device_slug(report):
    """The devices' names for a file name, "2-x-nvidia-geforce-rtx-4090"."""
    return re.sub(r"[^a-z0-9]+", "-", device_names(report).lower()).strip("-")[:60]


def markdown(report, chart_name):
    """The page. chart_name: file name of the chart; "": none."""
    lines = [f"# xDiT for ComfyUI {report.version}: {device_names(report)}", "", " ".join(verdict(report)), ""]
    lines += [*(f"- {note}" for note in report.notes), ""] if report.notes else []
    if chart_name:
        lines += [f"![Time of a step by method]({chart_name})", ""]
    lines += _machine_lines(report) + _timing_lines(report) + _link_lines(report) + _check_lines(report)
    lines += ["", f"Made by `python -m xdit_backend report` on {report.date} in {report.seconds:.0f} s"
              + ("." if report.is_complete else "; it was ended early.")]
    return "\n".join(lines) + "\n"


def _machine_lines(report):
    facts = report.machine
    packages = facts["packages"]
    lines = ["## Machine", "", f"- {device_names(report)}"]
    for gpu in facts["gpus"]:
        pcie = (f", PCIe {gpu['pcie_generation']} x{gpu['pcie_width']}" if "pcie_generation" in gpu else "")
        power = f", {gpu['power_limit_w']} W" if "power_limit_w" in gpu else ""
        lines.append(f"- {gpu['name']}, {gpu['memory_bytes'] / GB:.1f} GB, capability {gpu['capability']}{pcie}{power}"
                     + (f", driver {gpu['driver']}" if "driver" in gpu else ""))
    if facts["topology"]:
        lines.append("- links: " + ", ".join(f"{pair} {link}" for pair, link in facts["topology"].items()))
    lines += [f"- {facts['processor']}, {facts['cores']} cores, {facts['system_ram_bytes'] / GB:.0f} GB of system RAM, "
              f"{facts['system']}",
              f"- Python {facts['python']}, " + ", ".join(f"{name} {version}" for name, version in packages.items())]
    if facts["nccl"]:
        lines.append(f"- CUDA {facts['cuda']}, cuDNN {facts['cudnn']}, NCCL {facts['nccl']}")
    return [*lines, ""]


def _timing_lines(report):
    if not report.timings:
        return []
    lines = ["## Time of a step", "",
             "Random weights. Median (minimum to maximum) of interleaved rounds, of a step with all guidance branches; "
             "a bold layout is what auto mode would use."]
    for model in dict.fromkeys(timing.model for timing in report.timings):
        lines += ["", f"**{model}** ({report.sizes[model]})", "",
                  "| layout | s/step | speedup | estimate | TFLOP/s | peak VRAM | estimated |",
                  "| --- | --- | --- | --- | --- | --- | --- |"]
        for name, timing in report.of_model(model).items():
            speedup, title = report.speedup(timing), layout_title(name)
            shown = f"**{title}**" if report.chosen.get(model) == name else title
            peak, guess = ("" if value is None else f"{(value + timing.weight_bytes) / GB:.2f} GB"
                           for value in (timing.peak_bytes, timing.estimated_bytes))
            estimate = "" if timing.estimate_s is None else (
                f"{timing.estimate_s:.3g} s ({timing.estimate_s / timing.seconds.median - 1:+.0%})")
            flops = "" if timing.flops_s is None else f"{timing.flops_s / 1e12:.3g}"
            lines.append(f"| {shown} | {timing.seconds.shown()} | {'' if speedup is None else f'{speedup:.2f}x'} | "
                         f"{estimate} | {flops} | {peak} | {guess} |")
    return [*lines, ""]


def _link_lines(report):
    if not report.links:
        return []
    lines = ["## Links between devices", "", "| backend | collective | size | time | rate |",
             "| --- | --- | --- | --- | --- |"]
    for link in report.links:
        lines.append(f"| {link.backend} | {link.collective} | {link.num_bytes // 2 ** 20} MiB | {link.seconds.shown()} "
                     f"| {link.bytes_s / GB:.2f} GB/s |")
    return [*lines, ""]


def _check_lines(report):
    lines = [f"## Checks: {len(report.checks) - len(report.failed)} of {len(report.checks)} passed", ""]
    lines += [f"- **{check.name} failed**: {check.message}. Repeat it: `{check.command}`" for check in report.failed]
    passed = [check for check in report.checks if check.passed]
    errors = [check.error for check in passed if check.error is not None]
    if errors:
        lines.append(f"- {len(errors)} comparisons with one device: largest difference {max(errors):.1e} of the "
                     f"largest value")
    return [*lines, "- passed: " + ", ".join(check.name for check in passed)] if passed else lines


def chart(report):
    """A bar per layout and model: time of a step relative to one device, as a PIL image."""
    from PIL import Image, ImageDraw, ImageFont
    names = list(dict.fromkeys(timing.model for timing in report.timings))
    height = TOP + sum(STAGE + len(report.of_model(name)) * (BAR + GAP) for name in names) + 30
    image = Image.new("RGB", (WIDTH, height), "white")
    pen, large, small = ImageDraw.Draw(image), ImageFont.load_default(20), ImageFont.load_default(14)
    pen.text((20, 14), "xDiT for ComfyUI: time of a step, shorter is better", fill="#1f2933", font=large)
    pen.text((20, 42), device_names(report), fill="#52606d", font=small)
    top, available = TOP, WIDTH - LEFT - 190
    for name in names:
        pen.text((20, top + 8), f"{name} ({report.sizes[name]})", fill="#1f2933", font=small)
        top += STAGE
        timings = report.of_model(name)
        longest = max(timing.seconds.median for timing in timings.values())
        for layout, timing in timings.items():
            length = round(available * timing.seconds.median / longest)
            color = COLORS["one" if timing.num_devices == 1 else "several"]
            pen.text((LEFT - 12, top + BAR / 2), layout_title(layout), fill="#323f4b", font=small, anchor="rm")
            pen.rectangle((LEFT, top, LEFT + length, top + BAR), fill=color)
            speedup = report.speedup(timing)
            label = f"{timing.seconds.median:.3g} s" + (
                f"  {speedup:.2f}x" if speedup is not None and timing.num_devices > 1 else "")
            pen.text((LEFT + length + 8, top + BAR / 2), label, fill="#323f4b", font=small, anchor="lm")
            top += BAR + GAP
    pen.text((20, top + 6), f"{report.date}, version {report.version}", fill="#7b8794", font=small)
    return image
