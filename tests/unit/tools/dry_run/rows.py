"""Rows that tests count: tiny models of every family under every method, published ones at their size, and where a
forward may wait for its device."""

import dataclasses
import functools
import importlib.metadata
import json
import re
from pathlib import Path

import torch

from tests.support.model_zoo import ALIKE
from xdit_backend.checkpoints.quantisation.layerwise_casting import add_at_use
from xdit_backend.comfyui.install_location import comfyui_version, find_comfyui
from xdit_backend.models import FAMILIES
from xdit_backend.models.common.example_inputs import pixels_a_side
from xdit_backend.models.common.family import Family
from xdit_backend.protocol.specs import Stages
from xdit_backend.tools.bench.size import parse_layout
from xdit_backend.tools.dry_run.commands import Run
from xdit_backend.tools.dry_run.example_inputs import conditioning_shapes, latent_shape
from xdit_backend.tools.dry_run.fake_cuda import CUDA
from xdit_backend.tools.dry_run.published_models import PUBLISHED, Unwritten
from xdit_backend.tools.dry_run.simulated_rank import count, load, outline, own_blocks, table_of, world_size_of

TRANSFORMERS = ("one", "ulysses2", "ring2", "pipefusion2", "tensor2", "displaced2", "ulysses2-ring2",
                "pipefusion2-ulysses2", "tensor2-ring2")
UNETS = ("one", "cfg2", "displaced2")
# Blocks of a published model that is not alike in all of them, None: all. Every fifth of VACE has one more, every fifth
# of Wan Animate reads faces, and a fifth of Boogu's have two attentions.
FEWEST = {"wan2.1-vace-14b-480p": 5, "wan2.2-animate-14b-480p": 5, "boogu-image": None}
LAYOUTS = {name: [layout for layout in (UNETS if family.plan.is_unet else TRANSFORMERS)
                  if not any(getattr(parse_layout(layout), f"{method}_degree") > 1 for method in family.refused)
                  and ("-" not in layout or name not in ALIKE)]
           for name, family in FAMILIES.items()}
# {family: {layout: kernels of a step of its tiny model}}, written by python -m tests.unit.tools.dry_run.kernels
KERNELS = Path(__file__).with_name("kernels.json")
# "operation at file.py function", as far as it is the same in all releases of diffusers and ComfyUI: why it is allowed
ALLOWED_WAITS = {
    "_local_scalar_dense at transformer_lumina2.py forward": "diffusers makes tables for as much text as is not masked",
    "copy at transformer_lumina2.py _get_freqs_cis": "diffusers has its tables on the host, and takes rows by number",
    "_local_scalar_dense at transformer_hunyuan_video15.py forward": "diffusers looks whether a picture is given",
    "index at transformer_hunyuan_video15.py forward": "diffusers puts text that is not masked first",
    "index at transformer_hunyuanimage.py forward": "the same",
    "copy at transformer_hidream_image.py moe_infer": "diffusers sends tokens to experts by number",
    "copy at hunyuandit.py moe_infer": "so does ComfyUI's Hunyuan3D 2.1",
    "copy at model_wandancer.py rope_encode": "ComfyUI's WanDancer fills in the place of the last frame by number",
    "copy at ace_step15.py forward": "ComfyUI's ACE-Step makes the zero that codes are added to on the host",
    "copy at model.py sinusoidal_embedding_1d": "ComfyUI's Wan counts the frequencies of a time on the host",
    "copy at model.py get_timestep_embedding": "so does its SeedVR2",
    **{f"{what} at model.py {where}": "and has the sizes of its windows on the device" for what, where in (
        ("copy", "flatten"), ("copy", "window"), *(("_local_scalar_dense", where) for where in (
            "unflatten", "window_idx", "get_freqs", "repeat_concat", "repeat_concat_idx", "<lambda>", "<listcomp>")))},
}
LORA_RANK = 16
SMALL_ROWS, SMALL_COLUMNS, TEXT_TOKENS = 16, 20, 7


def place_of(wait):
    """A wait of op_counter.DeviceWork without what changes with the release or the size."""
    return re.sub(r" of \d+ bytes|(?<=\.py):\d+", "", wait)


def tiny(name):
    """(checkpoint, Run without branches of guidance) of a family's tiny model."""
    family, config = FAMILIES[name], dict(FAMILIES[name].testing.config)
    columns = SMALL_COLUMNS + (60 if name.startswith("PixArt") else 0)         # less has no positions there
    rows, columns = SMALL_ROWS * pixels_a_side(family), columns * pixels_a_side(family)
    size = {1: (rows * columns,), 2: (rows, columns), 3: (family.testing.frames, rows, columns)}[
        len(family.patch_size(config))]
    size = size if family.testing.rows is None else (family.testing.rows, rows * columns)
    shape = (family.testing.frames if family.has_frames_as_batch else 1, family.taken_channels(config), *size)
    return Unwritten(name, family, config), Run(shape, *conditioning_shapes(family, config, shape, TEXT_TOKENS))


@functools.cache
def published(name, blocks=2):
    """(checkpoint, Run of one branch) of a published model at its usual size, with so many blocks of each kind; None:
    all. What lives at once does not depend on their number, but for what is kept of each, and where FEWEST says so."""
    model, blocks = PUBLISHED[name], blocks and FEWEST.get(name, blocks)
    family: Family = FAMILIES[model.family]
    config = model.config | ({} if blocks is None else {list_.count: blocks for list_ in family.blocks})
    if "vace_layers" in config:
        config["vace_layers"] = [layer for layer in config["vace_layers"] if layer < config["num_layers"]]
    if "pos_embed_max_size" in config:                         # a table of weights alone, which takes seconds to make
        config["pos_embed_max_size"] = 64
    shape = latent_shape(family, config, model.size, model.frames)
    return Unwritten(name, family, config), Run(shape, *conditioning_shapes(family, config, shape, model.tokens))


def spec_of(checkpoint, layout, storage="bfloat16", quantisation=""):
    sequence = layout.ring_degree * layout.ulysses_degree * layout.tensor_degree
    stages = Stages(layout.pipefusion_degree, sequence) if layout.pipefusion_degree > 1 else None
    return checkpoint.spec(storage, "bfloat16", stages, layout.tensor_degree, quantisation)


def counted(row, layout_name, rank=-1, storage="bfloat16", quantisation=""):
    """The Counted of a rank, the last one if it is not said. row: of tiny() or published()."""
    (checkpoint, run), layout = row, parse_layout(layout_name)
    run = dataclasses.replace(run, branches=max(run.branches, layout.cfg_degree))
    return count(checkpoint, spec_of(checkpoint, layout, storage, quantisation), layout,
                 rank % world_size_of(layout), run)


def with_lora(checkpoint, table, model, packed, part):
    """simulated_rank.load, with the factors of a LoRA beside each weight that is packed, as workers hold them."""
    loaded = load(checkpoint, table, model, packed, part)
    for name in packed:
        linear = model.get_submodule(name.removesuffix(".weight"))
        if not linear.weight.is_meta:                          # of another stage
            sizes = (linear.out_features, LORA_RANK), (LORA_RANK, linear.in_features)
            add_at_use(linear, *(torch.empty(size, dtype=torch.float32, device=CUDA) for size in sizes))
    return loaded


def weights_of(row, layout_name, rank=-1, storage="bfloat16", item_bytes=0):
    """Bytes of the weights that a rank has to hold, by arithmetic on the model's shapes. item_bytes: of
    those of a file whose numbers all take so many, as they come from it."""
    (checkpoint, _), layout = row, parse_layout(layout_name)
    family, spec, rank = checkpoint.family, spec_of(checkpoint, layout, storage), rank % world_size_of(layout)
    model, _ = outline(checkpoint, spec)
    table, in_file, total = table_of(checkpoint, spec), model.state_dict().keys() if item_bytes else (), 0
    here = own_blocks(table, rank)
    for weight in table.weights:
        if weight.block is None or family.plan.is_unet or weight.block in here:
            size = weight.num_bytes(spec.tensor_degree, rank % spec.tensor_degree)
            total += size // weight.dtype.itemsize * item_bytes if weight.name in in_file else size
    return total


def known_kernels():
    return json.loads(KERNELS.read_text(encoding="utf-8"))


def most_kernels(name, layout):
    """As many as there were; other releases of torch, diffusers and ComfyUI may launch a tenth more."""
    known = known_kernels()
    return known[name][layout] * (1.0 if known["of"] == releases() else 1.1)


def releases():
    return {package: importlib.metadata.version(package) for package in ("torch", "diffusers")} | {
        "ComfyUI": comfyui_version(find_comfyui())}
