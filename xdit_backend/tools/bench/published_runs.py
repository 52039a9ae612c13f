"""Published measurements, read from tables as rows of model, GPUs, degrees and seconds."""

import csv
import math
from dataclasses import dataclass, field, replace

from ...planner.cost_model import Degrees, Job, ModelDims
from ...protocol.errors import ConfigError

DEGREES = ("cfg", "ulysses", "ring", "pipefusion", "tensor", "distrifusion")           # column names of the tables
# from data sheets: dense 16-bit FLOP/s and memory bandwidth in bytes/s
GPUS = {"A100-80G": (312e12, 1.9e12), "A100": (312e12, 1.9e12), "L40": (181e12, 0.864e12), "L20": (119.5e12, 0.864e12),
         "H100": (989e12, 3.35e12), "H20": (148e12, 4.0e12), "T4": (65e12, 0.3e12), "V100": (125e12, 0.9e12),
         "RTX 2000 Ada": (48e12, 0.224e12), "H200": (989e12, 4.8e12), "H800": (989e12, 3.35e12),
         "A800": (312e12, 2.0e12), "L40S": (362e12, 0.864e12), "A10": (125e12, 0.6e12), "RTX 4090": (165e12, 1.008e12),
         "RTX 3090": (71e12, 0.936e12)}
USUAL_CELLS = {"id": "", "source": "", "resolution": "", "frames": "1", "text_tokens": "0", "cfg_branches": "1",
               "link": "", "machine": "",
               "layout": "", "patches": "0", "warmup": "1", "compiled": "0", "note": "", "exclude": "", "held_out": "0",
               **{prefix + name: "1" for name in DEGREES for prefix in ("", "deg_")}}
COLLECTIVES = {"ulysses": "all_to_all", "ring": "hop", "displaced": "gather", "tensor": "all_reduce"}


def positive(text):
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError(f"{text!r} is not a number above 0")
    return number


# models whose size or number of steps is unpublished: only ratios to their own single-device run can be predicted
WITHOUT_SIZE = ("stepvideo-30b", "mochi-1")
NEAR = 1.05                    # ratio to the best time up to which a choice counts as right


@dataclass(frozen=True)
class Block:
    """Structure of a transformer block in a table. feed_forward: inner width as a multiple of the width. joint, skips:
    as in ModelDims. mixers: attentions over image tokens, each with a feed-forward."""

    feed_forward: float = 4.0
    joint: bool = True
    mixers: int = 1
    skips: bool = False

    @property
    def elements(self):
        """ModelDims.elements. In addition to attentions and feed-forwards: queries and results of cross-attention, and
        with skips, in half of the blocks, a projection from two widths to one."""
        return self.mixers * (4 + 2 * self.feed_forward) + (0 if self.joint else 2) + (1 if self.skips else 0)


JOINT = Block()


def dims(blocks, width, heads, billions, block=JOINT, **more):
    """ModelDims of a transformer in a table, with this many blocks and billions of parameters. more: fields of
    ModelDims."""
    return ModelDims(blocks, width, heads, block.elements, billions * 1e9, joint=block.joint,
               skips=(blocks - 1) // 2 if block.skips else 0, **more)


MODELS = {
    "pixart-alpha": dims(28, 1152, 16, 0.61, Block(joint=False)),
    "sd3-medium": dims(24, 1536, 24, 2.03, shards_text=False, kernels=1.3),
    "flux.1-dev": dims(57, 3072, 24, 11.9),
    "flux.1-schnell": dims(57, 3072, 24, 11.9),
    "hunyuandit": dims(40, 1408, 16, 1.5, Block(feed_forward=4.36, joint=False, skips=True), kernels=2.3),
    "cogvideox-2b": dims(30, 1920, 30, 1.7),
    "cogvideox-5b": dims(42, 3072, 48, 5.6),
    "cogvideox1.5-5b": dims(42, 3072, 48, 5.6),
    "consisid": dims(42, 3072, 48, 6.0, Block(feed_forward=4.5)),
    "latte-1": dims(28, 1152, 16, 0.67, Block(joint=False, mixers=2), attention="frame", kernels=2.0),
    "hunyuanvideo": dims(60, 3072, 24, 12.8),
    "sana-1.6b-4k": dims(20, 2240, 70, 1.6, Block(feed_forward=3.75, joint=False), attention="linear", kernels=1.3),
    "mochi-1": dims(48, 3072, 24, 10.0),
    "stepvideo-30b": dims(48, 6144, 48, 30.0, Block(joint=False)),
    "wan2.1-1.3b": dims(30, 1536, 12, 1.3, Block(feed_forward=5.83, joint=False)),
    "wan2.1-14b": dims(40, 5120, 40, 14.3, Block(feed_forward=2.7, joint=False)),
    "chroma": dims(57, 3072, 24, 8.9),
    "qwen-image": dims(60, 3072, 24, 20.4),
}
RELATIVES = {"flux.1-schnell": "flux.1-dev", "chroma": "flux.1-dev", "qwen-image": "flux.1-dev",
             "consisid": "cogvideox-5b",
             "cogvideox1.5-5b": "cogvideox-5b", "cogvideox-2b": "cogvideox-5b", "wan2.1-1.3b": "wan2.1-14b"}

# Memory traffic of a block's kernels as a multiple of its hidden states, as counted by the dry run of each published
# model's usual job. HunyuanDiT's is larger than PixArt's, Wan's the largest. CogVideoX 2B and Wan 2.1 1.3B: a video.
TRAFFIC = {"pixart-alpha": 70, "sd3-medium": 73, "flux.1-dev": 128, "hunyuandit": 108, "cogvideox-5b": 119,
           "latte-1": 124, "wan2.1-14b": 164, "sana-1.6b-4k": 159}


@dataclass(eq=False)
class Row:
    """A published run."""

    name: str
    source: str
    model: str
    resolution: str
    gpu: str
    number: int
    link: str
    machine: str
    layout: str
    degrees: Degrees | None        # None: the best hybrid, not named in the source
    job: Job
    seconds: float
    held_out: bool
    ratio_to: float | None = None  # size or steps unpublished: seconds of the source's single-device run
    predicted: float = field(default=math.nan)

    @property
    def group(self):
        return self.source, self.model, self.resolution, self.machine, self.number, self.job.compiled


def read_rows(path, left_out=None):
    """The runs of a table that the cost model can predict. left_out: a list that receives the reasons why other lines
    are left out."""
    rows = read_lines(path, row_of, [] if left_out is None else left_out)
    alone = {(row.model, row.job.compiled): row.seconds for row in rows if row.number == 1}
    for row in rows:
        if row.model in WITHOUT_SIZE:
            row.ratio_to = alone.get((row.model, row.job.compiled))
    return rows


def read_lines(path, read, left_out):
    """[read(line)] of a table, with USUAL_CELLS for empty or missing cells. Invalid lines are left out, with the
    reason."""
    rows = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        for number, cells in enumerate(csv.DictReader(file), 2):
            line = USUAL_CELLS | {name: cell.strip() for name, cell in cells.items() if isinstance(cell, str)
                                  and cell.strip()}
            if line["exclude"]:
                continue
            line["model"] = line.get("model", "").lower()
            unknown = [f"{column} {line[column]!r}" for column, known in (("model", MODELS), ("gpu", GPUS))
                       if line.get(column, "") not in
                       (*known, *([""] if column == "gpu" and "gb" in cells else []))]
            try:
                if unknown:
                    raise ValueError(f"unknown {' and '.join(unknown)}")
                rows.append(read(line))
            except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:
                what = f"there is no {error}" if isinstance(error, KeyError) else error
                left_out.append(f"line {number} ({line['id'] or line['model']}) is left out: {what}")
    if not rows:
        raise ConfigError(f"--csv {path}: no line can be read. {'; '.join(left_out[:3]) or 'It has none'}. Known "
                          f"models are {', '.join(MODELS)}; known GPUs {', '.join(GPUS)}.")
    return rows


def row_of(line):
    degrees = None
    if not line["layout"].startswith("best"):
        degrees = degrees_of(line, "deg_")
        # DistriFusion's authors, and others who copied them, run one more synchronous step than the warm-up has.
        warmup_steps = warmup_of(line) + (degrees.displaced > 1)
        degrees = replace(degrees, num_patches=int(line["patches"]), warmup_steps=warmup_steps)
    megapixels = 0.0
    if "end to end" in line["note"]:
        width, height = (int(size) for size in line["resolution"].split("x"))
        megapixels = width * height * int(line["frames"]) / 1e6
    job = Job(int(line["tokens"]), int(line["text_tokens"]), int(line["steps"]), int(line["cfg_branches"]),
              int(line["frames"]), line["compiled"] == "1", megapixels)
    return Row(line["id"], line["source"], line["model"], line["resolution"] or line["tokens"], line["gpu"],
               int(line["number"]),
               line["link"], line["machine"] or f"{line['gpu']}, {line['link']}", line["layout"] or str(degrees),
               degrees, job, positive(line["seconds"]), line["held_out"] == "1")


def degrees_of(line, prefix=""):
    cfg, ulysses, ring, pipefusion, tensor, displaced = (int(line[prefix + name]) for name in DEGREES)
    if min(cfg, ulysses, ring, pipefusion, tensor, displaced) < 1:
        raise ValueError("a degree is below 1")
    return Degrees(cfg, ulysses, ring, pipefusion, tensor, displaced)


def warmup_of(line):
    """Warm-up steps, corrected where the timings contradict the table: no schedule with that many could be as fast."""
    legacy = "legacy" in line["source"] or "arXiv 2405.14430" in line["source"]
    if "not given" in line["note"] or "warm-up steps no" in line["note"]:
        return 2
    if line["model"] == "pixart-alpha" and not legacy:
        return 0
    return int(line["warmup"])


def collective_of(row):
    """(collective, group size) of a run that uses a single method over all devices; None for others."""
    if row.degrees is None:
        return None
    used = [(name, getattr(row.degrees, name)) for name in (*COLLECTIVES, "cfg", "pipefusion")
            if getattr(row.degrees, name) > 1]
    if len(used) != 1 or used[0][0] not in COLLECTIVES:
        return None
    return COLLECTIVES[used[0][0]], used[0][1]
