"""Tables of docs/reference that are generated; `python -m tests.programs.reference_pages` writes the pages.

docs/reference/models.md: tables between the markers `<!-- generated: NAME -->` and `<!-- end -->`, from the registries.
docs/results/README.md: the table of received reports.
docs/reference/nodes.md and templates.md: everything except the outcomes, which tests.programs.model_nodes and
tests.programs.stock_templates measure with --write.
"""

import re
from unittest.mock import patch

from tests.programs import model_nodes, stock_templates
from tests.support.architecture import ROOT
from xdit_backend.autoencoders import FAMILIES as VAE_FAMILIES
from xdit_backend.checkpoints.quantisation.layer_formats import FORMATS, Layer
from xdit_backend.models import FAMILIES
from xdit_backend.tools.report.document import device_names
from xdit_backend.tools.report.results import layout_title, read_report

FOLDER = ROOT / "docs" / "reference"
# column of the table of families -> the methods of Family.refused without which it is "no"
METHODS = {"Ulysses": ("ulysses",), "Ring": ("ring",), "USP (Ulysses x Ring)": ("ulysses", "ring"),
           "PipeFusion": ("pipefusion",), "DistriFusion": ("displaced",), "tensor": ("tensor",)}
UNET_REJECTS = "ulysses", "ring", "pipefusion", "tensor"
FORMAT_NAMES = {"int8_tensorwise": "`int8_tensorwise`, also rotated (ConvRot)"}
BLOCK = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(header, rows):
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows))


def families_table():
    """Each family's support for each method."""
    rows = []
    for family in FAMILIES.values():
        rejected = {*family.refused, *(UNET_REJECTS if family.plan.is_unet else ())}
        rows.append([family.title, family.cfg, "no" if "data" in rejected else "yes",
                     *("no" if rejected & {*needed} else "yes" for needed in METHODS.values())])
    return table(["model", "CFG", "data", *METHODS], rows)


def modules_list():
    """Families that run as ComfyUI's own modules."""
    return ", ".join(family.name for family in FAMILIES.values() if family.is_comfyuis) + ".\n"


def diffusers_table():
    """{version of diffusers: families that need it}, from the families' refusals under an old version."""
    needed = {}
    for family in FAMILIES.values():
        for refusal in family.detection.refusals:
            with patch("importlib.metadata.version", return_value="0.1"):
                try:
                    reason = refusal({}) or ""
                except (KeyError, IndexError, StopIteration, TypeError, ValueError):       # reads a file's shapes
                    continue
            for version in re.findall(r"needs diffusers (\S+) or newer", reason):
                needed.setdefault(version, []).append(family.name)
    return table(["diffusers", "families"], [[version, ", ".join(names)] for version, names in sorted(needed.items())])


def vaes_table():
    rows = []
    for family in VAE_FAMILIES.values():
        if family.models:
            split = "tiles" if family.tiles else "rows, columns or frames" if family.by_frames else "rows or columns"
            rows.append([", ".join(family.models), split])
    return table(["VAE of", "split by"], rows)


def formats_table():
    """Quantised formats: bits per weight, and where they are multiplied and sharded."""
    rows = []
    for name, how in FORMATS.items():
        layer = Layer(name, (4096, 4096), dict.fromkeys(how.scales, ""), 1)
        with_scale = how.block or how.group
        bits = 8 * how.held.itemsize / how.numbers + (8 / with_scale if with_scale else 0)
        multiplied = ("on all devices" if how.rounds_inputs
                      else f"on GPUs of capability {how.capability[0]}.{how.capability[1]} and above")
        tensor = ("yes; rotated: between the groups" if how.agreed == "each" else "rejected" if how.rounds_inputs
                  else f"yes, in blocks of {how.block}" if how.block else "yes")
        # ComfyUI recognises a U-Net by the shapes of its weights
        families = "all" if layer.stored_shape == layer.shape else "all except U-Nets"
        rows.append([FORMAT_NAMES.get(name, f"`{name}`"), f"{bits:g}", families, multiplied, "yes", tensor])
    return table(["format", "bits per weight", "families", "multiplied without dequantising",
                  "CFG, data, Ulysses, Ring, PipeFusion, DistriFusion", "`tensor_degree`"], rows)


def controlnets_list():
    return ", ".join(family.name for family in FAMILIES.values() if family.takes_controlnets) + ".\n"


TABLES = {"families": families_table, "modules": modules_list, "diffusers": diffusers_table, "vaes": vaes_table,
          "formats": formats_table, "controlnets": controlnets_list}


def models_page(text):
    """The page with every generated block filled in."""
    names = [match[2] for match in BLOCK.finditer(text)]
    if sorted(names) != sorted(TABLES):
        raise ValueError(f"Put one block of each of {', '.join(TABLES)} into models.md: it has {', '.join(names)}.")
    return BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", text)


def results_table():
    """A row per model of each report in docs/results, the newest first."""
    reports = sorted(map(read_report, (FOLDER.parent / "results").glob("*.json")), key=lambda report: report.date,
                     reverse=True)
    rows = []
    for report in reports:
        checks = f"{len(report.checks) - len(report.failed)} of {len(report.checks)}"
        for model in dict.fromkeys(timing.model for timing in report.timings):
            timings = report.of_model(model)
            best = min((timing for timing in timings.values() if timing.num_devices > 1),
                       key=lambda timing: timing.seconds.median, default=None)
            one = timings["one"].seconds.shown() if "one" in timings else ""
            fastest = "" if best is None else (f"{layout_title(best.layout)}: {best.seconds.shown()}, "
                                               f"{report.speedup(best) or 0:.2f}x")
            rows.append([device_names(report), report.date, checks, f"{model} ({report.sizes[model]})", one, fastest])
    return table(["devices", "date", "checks passed", "model", "one device, s/step", "fastest method"], rows)


def results_page(text):
    return BLOCK.sub(lambda match: f"{match[1]}\n{results_table()}\n{match[3]}", text)


PAGES = {"models.md": models_page, "nodes.md": model_nodes.render, "templates.md": stock_templates.render,
         "../results/README.md": results_page}


def main():
    for name, render in PAGES.items():
        path = FOLDER / name
        path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
