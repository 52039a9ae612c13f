"""Dimensions of a family's model for the cost model, derived from its config and its modules' shapes."""

import collections
import functools
import math
from dataclasses import replace

import torch

from ..models.common.family import Family
from ..models.common.tp_plan import REPLICATED, find_style
from ..partition import attended, cut_bands, halved, level_of, slot_bytes, summed_modules
from ..planner.cost_model import Job, ModelDims
from ..planner.memory_model import ActivationFootprint, unet_memory
from ..planner.quantised_matmul_memory import Product
from .quantisation import kitchen_layers
from .quantisation.layer_formats import FORMATS
from .quantisation.quantised_weights import WITH_LORA
from .tensor_sharding import possible_splits

OF_TEXT = ("attn2.to_k", "attn2.to_v")                         # cross-attention layers, which image tokens do not pass
EAGER = "int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8"      # comfy-kitchen may or may not have kernels for these
USUAL_TEXT = 77                                                # tokens of a U-Net's prompt


def dims_of(family: Family, model, table=None, capabilities=(None,)):
    """The ModelDims of a family's model, which may be on the meta device; None for a U-Net. table: its WeightTable;
    None: weights of 16 bits. capabilities: of the devices, as in kitchen_layers.products_on."""
    if not family.blocks:
        return None
    blocks = [(list_.image_fraction, block_copies) for list_ in family.blocks
              for block_copies in zip(*map(model.get_submodule, list_.names))]
    width, num_blocks = family.width(model.config), len(blocks)
    elements = sum(share * _matrix_elements(block, family.plan.cacheable) for share, block_copies in blocks
                   for block in block_copies) / num_blocks
    heads = family.num_heads(model.config)
    joint = any("text" in streams for streams in family.plan.attention.values())
    dims = ModelDims(blocks=num_blocks, width=width, heads=heads, elements=elements / width ** 2,
              parameters=sum(parameter.numel() for parameter in model.parameters()), joint=joint,
              key_heads=family.num_key_heads(model.config) or heads, skips=len(family.plan.skips(num_blocks)),
              replicated_attention=any(find_style(family.plan.tp_plan, f"{name}.{leaf}") == REPLICATED
                                       for name in family.plan.attention for leaf in ("to_q", "qkv")),
              text_once=True, branches_apart=True, sums=_sums(model, family.plan, joint, num_blocks),
              agreed=_sums(model, family.plan, joint, num_blocks, True),
              formats=_formats(blocks, family.plan.cacheable),
              usual_tokens=usual_tokens(family, model.config),
              footprint=ActivationFootprint(**family.activation_factors) if family.activation_factors else None)
    if table is None:
        return dims
    spec = table.spec
    unpack_bytes = functools.partial(_unpack_bytes, blocks, family.plan.cacheable, spec, capabilities)
    products = _products(blocks, family.plan.cacheable, capabilities)
    return replace(dims, element_bytes=getattr(torch, spec.compute_dtype).itemsize,
                   unpack_bytes=unpack_bytes(), lora_unpack_bytes=(unpack_bytes(True), unpack_bytes(True, False)),
                   rounded_bytes=max((product.input_bytes for product in products if product.format not in EAGER),
                                     default=0.0),
                   rounded_products=tuple(product for product in products if product.rows <= product.columns),
                   eager_products=tuple(product for product in products if product.format in EAGER
                                        and not kitchen_layers.has_kernels()),
                   weight_bytes=float(table.resident_bytes), outside_bytes=float(table.outside_bytes),
                   block_bytes=tuple(map(float, table.block_bytes)), block_costs=table.block_costs)


def usual_tokens(family, config):
    """Tokens of an image of 1024 x 1024 pixels; for a video model, of 81 frames of 832 x 480."""
    frames, rows, columns = family.pixels(config)
    size = (1 + 80 // frames, 480, 832) if frames > 1 else (1, 1024, 1024)
    patch = (1, 1, 1, *family.inputs.latent.patch)[-3:]
    return (-(-size[0] // patch[0]) * -(-size[1] // (rows * patch[1])) * -(-size[2] // (columns * patch[2])))


def job_of(family, dims, shape, conditioning, steps, branches=1):
    """The Job of a run. shape: of the latents of one branch. conditioning: {name: tensor} of the full forward, as
    workers get it."""
    counts = family.token_counts(shape, conditioning)
    images, sequences = shape[0], family.inputs.latent.sequences(shape)
    if "data" in family.refused:                               # joint sequences are not split then
        images, sequences = 1, images * sequences
    tokens, text = counts.pop("image") * sequences, sum(counts.values())
    if not dims.joint:
        tokens += sum(count for stream, count in counts.items() if stream != "text")           # the model's own tokens
        lengths = family.inputs.lengths
        text = lengths["text"](conditioning) if "text" in lengths else conditioning["context"].shape[1]
    a_row = family.tokens_a_row(shape)
    rows = None if a_row == 1 else family.inputs.latent.num_tokens(shape) // a_row
    return Job(tokens, text, max(1, steps), branches, shape[2] if len(shape) == 5 else 1, images=images,
               sequences=sequences, rows=rows)


def unet_run_memory(family, model, sizes, batch, degrees, dtype, **cached):
    """Memory of a U-Net's rank without weights, in a run on latents with these rows and columns. batch: (images,
    guidance branches). cached: cached_steps and num_tokens of cached_bytes."""
    images, branches = batch
    own = -(-images // degrees.data) * -(-branches // degrees.cfg)
    hidden_bytes = math.prod(sizes) * family.width(model.config) * dtype.itemsize
    cached_in_all = cached_bytes(model, sizes, degrees.displaced, dtype, own, **cached)
    if family.has_frames_as_batch:                             # all frames of a video are computed together
        own, hidden_bytes = own // images, images * hidden_bytes
    return unet_memory(ActivationFootprint(**family.activation_factors), hidden_bytes, own, cached_in_all, degrees)


def cached_bytes(model, shape, num_ranks, dtype, batch=1, cached_steps=1, num_tokens=USUAL_TEXT):
    """Bytes that a U-Net's rank caches with displaced patches: exchanged tensors of all ranks, for this many steps, and
    keys and values of this many text tokens. 0 with one rank. Other arguments: as in exchanged_bytes."""
    if num_ranks == 1:
        return 0
    of_text = sum(2 * model.get_submodule(name).to_k.out_features for name, what in attended(model).items()
                  if what == "text")
    return (cached_steps * num_ranks * exchanged_bytes(model, shape, num_ranks, dtype, batch)
            + batch * num_tokens * of_text * dtype.itemsize)


def exchanged_bytes(model, shape, num_ranks, dtype, batch=1):
    """Bytes that a rank sends to the others in a call (docs/design/displaced.md). model: a U-Net of diffusers, on
    any device.

    shape: rows and columns of the latent. Returns 0 if there are too few rows for all ranks.
    """
    num_levels, total = len(model.config.block_out_channels), 0
    bands = cut_bands(shape[0], num_ranks, 2 ** (num_levels - 1))
    if bands is None:
        return 0
    attentions = attended(model)
    for name, module in model.named_modules():
        level = level_of(name, num_levels)
        starts, columns = halved(bands, level), -(-shape[1] // 2 ** level)
        sizes = [end - start for start, end in zip(starts, starts[1:])]
        if isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1) and name != "conv_in":
            # a row to the rank above, unless the convolution has stride 2, and a row to the rank below
            rows = [min(size, (rank > 0 and module.stride[0] == 1) + (rank < num_ranks - 1))
                    for rank, size in enumerate(sizes)]
            total += slot_bytes([(batch, module.in_channels, count, columns) for count in rows], dtype)
        elif isinstance(module, torch.nn.GroupNorm):
            # normalised over the frames of a video
            count = 1 if ".temporal_res_block." in name else batch
            total += slot_bytes([(2, count, module.num_groups)], torch.promote_types(dtype, torch.float32))
        elif attentions.get(name) == "rows":
            total += slot_bytes([(2, batch, size * columns, module.to_k.out_features) for size in sizes], dtype)
    return total


def _sums(model, plan, joint, num_blocks, agreed=False):
    """All-reduces over tensor ranks in a block; agreed: only those preceded by one that agrees on a number. In joint
    blocks one feed-forward belongs to the image and the other to the text."""
    splits = possible_splits(model, plan)
    if not splits:
        return 0.0 if agreed else ModelDims.sums
    if agreed:
        splits = {name: split for name, split in splits.items() if name.endswith(".weight") and split.how == "rowwise"
                  and getattr(model.get_submodule(name.removesuffix(".weight")), "agreed", "") == "each"}
    of_blocks = collections.Counter(name.rpartition(".")[0] for name in summed_modules(splits)
                                    if name.partition(".")[0] in {
                                        name for list_ in plan.blocks for name in list_.names})
    return sum(min(2, count) if joint else count for count in of_blocks.values()) / num_blocks


def _matrix_elements(block, once):
    """Elements of the matrices that every token passes."""
    return sum(module.in_features * module.out_features for module in _matrices(block, once))


def _matrices(block, once):
    """The linear layers that every token passes, without those that run once per step or run, or on text only."""
    return [module for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)
            and not any(name == part or name.startswith(f"{part}.") for part in (*once, *OF_TEXT))]


def _unpack_bytes(blocks, once, spec, capabilities, has_lora=False, narrows=True):
    """ModelDims.unpack_bytes: for down-projections, during which most memory is in use, or for the other layers.
    blocks: as in _formats. has_lora: whether a LoRA is applied to unpacked weights. Layers that devices multiply in
    their stored format are not unpacked."""
    stored, computed = (getattr(torch, dtype).itemsize for dtype in (spec.storage_dtype, spec.compute_dtype))
    matrices = [module for _, block_copies in blocks for block in block_copies for module in _matrices(block, once)]
    is_cast = stored < computed and not any(getattr(module, "format", "") for module in matrices)
    cast = float(computed) if is_cast else 0.0

    def a_number(module):
        if not hasattr(module, "unpacking"):
            return cast
        if not kitchen_layers.products_on(module, capabilities)[0]:
            return 0.0
        return max(module.unpacking, WITH_LORA) if has_lora else module.unpacking
    return max((a_number(module) * module.in_features * module.out_features
                for module in matrices if (module.out_features <= module.in_features) == narrows), default=0.0)


def _products(blocks, once, capabilities):
    """A Product for each kind of layer that devices may multiply in its stored format. blocks: as in _formats."""
    found = set()
    for share, module in ((share, module) for share, block_copies in blocks for block in block_copies
                          for module in _matrices(block, once) if getattr(module, "format", "")):
        if kitchen_layers.products_on(module, capabilities)[1]:
            how = FORMATS[module.format]
            found.add(Product(module.in_features, module.out_features, share == 1, module.format,
                              how.held.itemsize / how.numbers, how.rounds_inputs and module.weight_block[0] > 1,
                              bool(how.group) or how.rounds_inputs and module.weight_scale.numel() > 1))
    return sorted(found)


def _formats(blocks, once):
    """ModelDims.formats. blocks: [(fraction of a block's copies that an image token passes, copies of the block)]."""
    elements: collections.Counter = collections.Counter()
    for share, block_copies in blocks:
        for module in (module for block in block_copies for module in _matrices(block, once)):
            elements[getattr(module, "format", "")] += share * module.in_features * module.out_features
    return {format_: number / elements.total() for format_, number in elements.items() if format_}
