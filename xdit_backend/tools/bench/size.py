"""Estimate what a full-size model needs on each device, without running it: memory, communication, operations, kernels,
and the bottleneck of a step.

MODEL is the name of a published model (an unknown name lists the known ones), or a safetensors or GGUF file or a
diffusers folder, of which only the header is read. The workers' own code runs on tensors that have shapes but no
values; no GPU, no weights and no ComfyUI are needed. Without --machine the devices are eight RTX 4090 with 24 GB over
PCIe 4, with the rates of the data sheet.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.checkpoint import open_checkpoint
from ...checkpoints.model_dims import dims_of
from ...checkpoints.offload.offload_plan import offload_plan
from ...checkpoints.quantisation import gguf
from ...checkpoints.quantisation.layer_formats import FORMATS
from ...checkpoints.quantisation.quantise_on_load import TYPES
from ...checkpoints.tensor_sharding import possible_splits
from ...checkpoints.weight_table import weight_table
from ...config import ParallelConfig, check_weights_memory
from ...partition import FULL
from ...planner.cost_model import COLLECTIVES, Device, Links
from ...planner.descriptions import describe_layout
from ...planner.layout_search import Machine
from ...planner.machine_profile import read_machine
from ...planner.planner import EVERYWHERE, AttentionHeads, Devices, choose_layout, choose_placement, usual_branches
from ...protocol.errors import ConfigError, UnsupportedError
from ...protocol.specs import Layout
from ..dry_run.commands import Run
from ..dry_run.example_inputs import conditioning_shapes, latent_shape
from ..dry_run.published_models import PUBLISHED
from ..dry_run.simulated_rank import check_layout, count, outline, stage_ranks, world_size_of
from .fits import Fit, auto_fit, collective_of, config_of
from .plan import WEIGHT_TYPES, image_size, most_common
from .published_runs import GPUS

AXES = ("cfg", "data", "ulysses", "ring", "pipefusion", "tensor", "displaced")
AUTO = "auto"                              # the node's own choice
LAYOUTS = "one", "ulysses2", "ring2", "pipefusion2", "tensor2", "displaced2"
OF_UNETS = "one", "cfg2", "displaced2"
IN_FILES = *FORMATS, *gguf.PACKED        # types that weights can only have in a file
NUM_GPUS, GPU_BYTES = 8, 24e9
PCIE_BYTES_S = 12e9                        # of PCIe 4 through system RAM, for each of COLLECTIVES
# kernels of a block, to derive the host's launch time per kernel from the device's block_launch_s
LAUNCHES_OF_A_BLOCK = 130
GIB, MIB = 2 ** 30, 2 ** 20
# speedup over 16-bit matrix multiplications by the data sheet of an RTX 4090; formats without native support are
# unpacked, at the cost of memory traffic
PRODUCTS_4090 = {"float8_e4m3fn": 2.0, "float8_e5m2": 2.0, "int8_tensorwise": 4.0, "convrot_w4a4": 4.0}


def add_arguments(parser):
    parser.add_argument("model", metavar="MODEL", help="a published model's name, or a file or folder")
    parser.add_argument("--layouts", nargs="+", metavar="NAME",
                        help="one, or axes with degrees such as ulysses2 or pipefusion2-ulysses2, or auto: the choice "
                             "of xDiT Parallel Config on all devices of the machine before they are measured "
                             "(default: auto with --machine, one device, and each method on two)")
    add_run_arguments(parser)
    parser.add_argument("--patches", type=int, default=0, help="PipeFusion patches; 0: two per stage")
    parser.add_argument("--weight-dtype", choices=[*WEIGHT_TYPES, *TYPES, *IN_FILES], metavar="TYPE",
                        help="type of the weights; also a ComfyUI format or a GGUF type "
                             "(default: as in the file, or bf16)")
    parser.add_argument("--weights-memory", default=ParallelConfig().weights_memory, metavar="GB",
                        help="resident weights per device, as in xDiT Parallel Config; the others are offloaded to "
                             "system RAM and streamed at every step; auto: the memory that the run leaves")
    parser.add_argument("--machine", type=Path, metavar="FILE",
                        help="JSON description of devices and links, see docs/benchmarks.md")
    parser.add_argument("--waits", action="store_true",
                        help="also list where the host waits for the device, and synchronous copies")


def add_run_arguments(parser):
    """Add the options of a run that subject_of reads."""
    parser.add_argument("--size", metavar="WxH", help="image or video size in pixels (default: the model's usual size)")
    parser.add_argument("--frames", type=int, metavar="N", help="frames of the video (default: the model's usual)")
    parser.add_argument("--text", type=int, metavar="N", help="text tokens (default: the model's usual)")
    parser.add_argument("--branches", type=int, choices=(1, 2),
                        help="2 with classifier-free guidance (default: 1 if guidance is embedded)")


def main(options):
    machine = usual_machine() if options.machine is None else read_machine(options.machine)
    subject = dataclasses.replace(subject_of(options), capabilities=tuple(map(capability_of, machine.devices)))
    print(subject.title)
    print(f"on {len(machine.devices)} x {machine.devices[0].name or 'a device'}, "
          f"{machine.devices[0].memory_bytes / 1e9:.3g} GB. A step after the first; seconds are a lower bound, by the "
          f"bottleneck.")
    if subject.dims is not None and subject.dims.formats:
        print(describe_product(subject.dims, machine.devices[0]))
    print(f"{'layout':<24} {'rank':>4} {'weights':>8} {'cached':>7} {'peak':>7} GiB {'TFLOP':>9} {'MiB sent':>9} "
          f"{'exchanges':>9} {'kernels':>8} {'GB moved':>9} {'s':>8}  bound by")
    answers, waits = [], {}
    usual = LAYOUTS if subject.checkpoint.family.blocks else OF_UNETS
    for name in options.layouts or (usual if options.machine is None else (AUTO, *usual)):
        layout = parse_layout(name) if name != AUTO else None
        try:
            fit = auto_fit(subject, machine) if layout is None else Fit(subject, layout, machine)
            subject.check(fit.layout, machine)
            for line, found in rows(name, fit):
                print(line, flush=True)
                for where, times in found.items():
                    waits.setdefault(where, []).append(f"{name} x{times}")
            answers.append(f"{name}{'' if layout is not None else f' ({describe_layout(fit.layout)})'}: {fit.answer()}")
        except (ConfigError, UnsupportedError) as error:
            answers.append(f"{name}: {error}")
    print("\n".join(answers))
    if options.waits:
        print("\n".join(f"waits: {where}: {', '.join(who)}" for where, who in waits.items()) or "waits: none")


@dataclass(eq=False)
class Subject:
    """The model and run to be counted. checkpoint: a Checkpoint or published_models.Unwritten. title: text for the
    user."""

    checkpoint: Any
    storage: str
    compute: str
    quantisation: str
    run: Run
    text: int
    title: str
    weights_memory: str = ParallelConfig().weights_memory
    capabilities: tuple = (None,)                              # of the devices, as in kitchen_layers.products_on

    def spec(self, stages=None, tensor_degree=1, num_bytes=0):
        """The ModelSpec. num_bytes: ModelSpec.weights_memory."""
        return self.checkpoint.spec(self.storage, self.compute, stages, tensor_degree, self.quantisation,
                                    weights_memory=num_bytes)

    def plan_of(self, tensor_degree, budget_bytes, blocks=None):
        """The OffloadPlan of a rank whose weights may take budget_bytes of its device. blocks: None: all."""
        return offload_plan(self.table(tensor_degree), budget_bytes, blocks)

    def table(self, tensor_degree=1):
        """The WeightTable of a rank of this tensor degree."""
        return weight_table(self.model, self.checkpoint.family, self.spec(None, tensor_degree), self.checkpoint)

    @functools.cached_property
    def model(self):
        """diffusers' model on the meta device, with weights in their stored types."""
        return outline(self.checkpoint, self.spec())[0]

    @functools.cached_property
    def dims(self):
        """The ModelDims of the cost model; None for a U-Net."""
        family = self.checkpoint.family
        return dims_of(family, self.model, self.table(), self.capabilities)

    def placement(self, config, devices):
        """The node's WeightPlacement over devices under a ParallelConfig."""
        family = self.checkpoint.family
        if self.dims is None:
            return EVERYWHERE
        return choose_placement(
            config, self.dims, Devices([device.memory_bytes for device in devices]),
            lambda degree: "tensor" not in family.refused and possible_splits(self.model, family.plan, degree),
            "pipefusion" not in family.refused, usual_branches(self.checkpoint.config), has_own_memory=True)

    def layout_in(self, config, placement, devices, branches):
        """The node's Layout for a run with this many branches on devices that have not been measured."""
        family, model = self.checkpoint.family, self.checkpoint.config
        attention = AttentionHeads(family.name, family.num_heads(model), family.num_key_heads(model),
                                   "ulysses" not in family.refused)
        return choose_layout(config, len(devices), branches, attention, placement)

    def check(self, layout, machine):
        """Raise ConfigError if a layout is invalid for the model or on the machine."""
        if world_size_of(layout) > len(machine.devices):
            raise ConfigError(f"it takes {world_size_of(layout)} devices, and there are {len(machine.devices)}.")
        check_layout(self.checkpoint, layout)


def subject_of(options):
    """The Subject of the command's options. Raises ConfigError for unknown values."""
    name = options.model.lower()
    published = PUBLISHED.get(name)
    if published is None and not Path(options.model).exists():
        raise ConfigError(f"{options.model}: there is no such file or folder, nor a published model of this name. "
                          f"Known are {', '.join(PUBLISHED)}.")
    wanted, quantisation = options.weight_dtype, options.weight_dtype if options.weight_dtype in TYPES else ""
    if published is None:
        checkpoint, storage = open_checkpoint(options.model), WEIGHT_TYPES.get(wanted)
        if wanted in IN_FILES:
            raise ConfigError(f"Use a file of type {wanted}, or the name of a published model: --weight-dtype {wanted} "
                              f"is a type of files, and weights are not converted to it when they are loaded.")
        storage = "bfloat16" if quantisation else storage or most_common(checkpoint)
    else:
        checkpoint = published.checkpoint(name, wanted if wanted in IN_FILES else "BF16")
        storage = WEIGHT_TYPES.get(wanted, "bfloat16")
    compute = "bfloat16" if storage.startswith("float8") else storage
    size = image_size(options.size) if options.size else published.size if published else (1024, 1024)
    frames = options.frames or (published.frames if published else 1)
    text = options.text or (published.tokens if published else 256)
    family, config = checkpoint.family, checkpoint.config
    branches = options.branches or (published.branches if published else 1 if config.get("guidance_embeds") else 2)
    shape = latent_shape(family, config, size, frames)
    run = Run(shape, *conditioning_shapes(family, config, shape, text), branches=branches,
              num_patches=options.patches, extrapolation=config_of(Layout()).forecast_keys_values)
    title = (f"{family.name}, {size[0]}x{size[1]}{f', {frames} frames' if frames > 1 else ''}, {text} text tokens, "
             f"{branches} branch{'es' if branches > 1 else ''}, weights {wanted or storage}")
    check_weights_memory(options.weights_memory)
    return Subject(checkpoint, storage, compute, quantisation, run, text, title, options.weights_memory)


def rows(name, fit):
    """(line of the table, waits) of a layout's first rank, its last, and the one whose stage has the most weights."""
    subject, layout, machine = fit.subject, fit.layout, fit.machine
    spec = subject.spec(fit.stages, layout.tensor_degree, fit.weights_memory)
    memory = [device.memory_bytes * FULL for device in machine.devices[:world_size_of(layout)]]
    for rank in stage_ranks(subject.checkpoint, spec, layout, memory):
        counted = count(subject.checkpoint, spec, layout, rank, fit.run, memory, subject.capabilities[0])
        seconds = bounds(counted, layout, machine, subject.dims)
        bound = max(seconds, key=lambda what: seconds[what])
        yield (f"{name:<24} {rank:>4} {counted.weight_bytes / GIB:>8.2f} {counted.cached_bytes / GIB:>7.2f} "
               f"{counted.peak_bytes / GIB:>7.2f}     {counted.flops / 1e12:>9.2f} {counted.sent_bytes / MIB:>9.1f} "
               f"{counted.num_exchanges:>9} {counted.kernels:>8} {counted.moved_bytes / 1e9:>9.1f} "
               f"{seconds[bound]:>8.3f}  {bound}"), counted.waits | counted.mixed


def describe_product(dims, device):
    """Text about the speed of matrix multiplications with a model's weights."""
    texts = [f"{format_} ({share:.0%} of their elements) {device.products.get(format_, 1.0):.3g} times as fast as in "
             "16 bits" for format_, share in dims.formats.items()]
    return f"Matrix multiplications with these weights: {'; '.join(texts)}."


def bounds(counted, layout, machine, dims=None):
    """{possible bottleneck: lower bound in seconds of a step}. dims: of the model; None: 16-bit weights."""
    device, degree = machine.devices[0], world_size_of(layout)
    flops = counted.flops - counted.attention_flops
    arithmetic_s = ((flops / device.matrix_flops_s if dims is None else device.product_s(dims, flops))
                    + counted.attention_flops / device.attention_flops_s)
    seconds = {"arithmetic": arithmetic_s, "memory": counted.moved_bytes / device.memory_bytes_s,
               "launches": counted.kernels * device.block_launch_s / LAUNCHES_OF_A_BLOCK}
    if counted.streamed_bytes and device.host_bytes_s:
        seconds["host memory"] = counted.streamed_bytes / device.host_bytes_s
    if counted.num_exchanges:
        collective = collective_of(layout)
        if not any(known == collective for known, _ in machine.links.rates):
            collective = "hop"
        seconds["link"] = ((counted.sent_bytes - counted.shared_bytes) / machine.links.rate(collective, degree)
                           + counted.num_exchanges * machine.links.latency(collective, degree))
    if counted.shared_bytes:
        seconds["link"] += counted.shared_bytes / machine.links.rate("gather", degree // layout.pipefusion_degree)
    return seconds


def capability_of(device):
    """(major, minor) of a cost_model.Device; None: unknown."""
    return divmod(round(10 * device.capability), 10) if device.capability else None


def usual_machine():
    """The Machine used without --machine."""
    matrix_flops_s, memory_bytes_s = GPUS["RTX 4090"]
    device = Device(matrix_flops_s, matrix_flops_s, memory_bytes_s, name="RTX 4090", memory_bytes=GPU_BYTES,
                    host_bytes_s=PCIE_BYTES_S, products=PRODUCTS_4090, capability=8.9)
    return Machine((device,) * NUM_GPUS, Links({(collective, 2): PCIE_BYTES_S for collective in COLLECTIVES}))


def parse_layout(name):
    """The Layout for a name such as "one" or "pipefusion2-ulysses2". Raises ConfigError for others."""
    degrees = {}
    for part in [] if name == "one" else name.split("-"):
        axis = part.rstrip("0123456789")
        if axis not in AXES or axis == part or not int(part[len(axis):]):
            raise ConfigError(f'layout "{name}": "{part}" is not an axis and a degree. Use one, auto, or '
                              f'{", ".join(AXES)} with a degree.')
        degrees[f"{axis}_degree"] = int(part[len(axis):])
    return Layout(**degrees)
