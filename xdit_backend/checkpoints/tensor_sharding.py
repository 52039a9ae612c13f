"""Shards of a model's layers under tensor parallelism, by the plan of the family. Arithmetic only.

weight_table.py has them of every weight, and hooks combine the shards' outputs (parallel/tensor_parallel.py).
docs/design/tensor.md.
"""

import math
from dataclasses import dataclass

import torch

from ..models.common.tp_plan import REPLICATED, ROWWISE, Fused, find_style
from ..partition import block_path, shard_sizes, shard_start
from ..protocol.errors import UnsupportedError
from .quantisation.layer_formats import BY_ROW

HEAD_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k", "q_rms_norm", "k_rms_norm", "q_rms_norm_t",
              "k_rms_norm_t", "norm_k_img")
# attributes of diffusers' attention modules, and of ComfyUI's
HEADS = "heads", "num_heads", "num_attention_heads", "n_local_heads"
ATTENTIONS_HAVE = ("processor", "to_q", "to_qkv", "q", "q_proj", "qkv", "qkv_x", "img_qkv", "img_attn_qkv", "img_attn",
                   "linear1", "proj_qkv")
MAX_TRIED = 16                             # degrees tried for suggestions in messages
SMALLEST_BLOCK = 32                        # of GGUF's types: Q8_0's
# attributes of attention modules and blocks that are divided by the degree
PER_RANK = (*HEADS, "kv_heads", "num_kv_heads", "n_local_kv_heads", "inner_dim", "inner_kv_dim", "mlp_hidden_dim",
            "mlp_hidden_dim_first", "hidden_size")


@dataclass(frozen=True)
class Split:
    """Sharding of one tensor along `dim`, each of its parts separately. parts: their sizes, which add up to the dim's.

    how: a style of models/common/tp_plan.py; "norm": an RMS norm over all heads, whose squares are summed by an
    all-reduce; "first": only the first rank has the tensor, so that a sum contains it once. block: (elements, bytes) of
    a block of a row, for quantised storage (uint8).
    """

    how: str
    dim: int = 0
    parts: tuple[int, ...] = ()
    block: tuple[int, int] = (1, 1)

    def own(self, tensor, degree, rank):
        """A rank's shard of the tensor, contiguous. None: it has none. Other regions of a mapped file are not read."""
        if self.how == "first":
            return tensor if rank == 0 else None
        numbers, num_bytes = self.block if self.dim == 1 and tensor.dtype == torch.uint8 else (1, 1)
        stored = lambda size: size // numbers * num_bytes  # noqa: E731
        shards = [part.narrow(self.dim, stored(shard_start(size, degree, rank)),
                               stored(shard_sizes(size, degree)[rank]))
                  for part, size in zip(tensor.split(list(map(stored, self.parts)), self.dim), self.parts)]
        return shards[0].contiguous() if len(shards) == 1 else torch.cat(shards, self.dim)

    def share(self, degree, rank=0):
        """Fraction of the tensor on a rank; the first has the most."""
        return self.sizes(degree)[rank] / sum(self.parts) if self.parts else float(rank == 0)

    def sizes(self, degree):
        """Every rank's size along dim."""
        return [sum(sizes) for sizes in zip(*(shard_sizes(part, degree) for part in self.parts))]


def tensor_splits(model, plan, degree=1):
    """{name of a parameter or buffer: Split} of all sharded tensors of a full model, which may be on the meta device.

    Tensors outside the blocks, norms over hidden states and tables are replicated. Raises UnsupportedError for a block
    with an unknown linear layer, which would otherwise be replicated without notice; and for a degree that would split
    quantisation blocks of a file.
    """
    splits = {}
    for name in (*(name for list_ in plan.blocks for name in list_.names), *plan.unstaged_blocks):
        for index, block in enumerate(model.get_submodule(name)):
            splits |= {f"{name}.{index}.{path}": split for path, split in _block_splits(block, plan).items()}
    _check_products(model, splits, degree)
    _check_stored(splits, degree)
    return splits


def _check_stored(splits, degree):
    """Reject a degree by which the inputs of a quantised layer are not a whole number of blocks."""
    cut = {name: split for name, split in splits.items() if split.dim == 1 and split.block[0] > 1}

    def fits(degree, most=math.inf):
        return all(part % (degree * min(split.block[0], most)) == 0 for split in cut.values() for part in split.parts)

    if fits(degree):
        return
    name, split = next((name, split) for name, split in cut.items()
                       if any(part % (degree * split.block[0]) for part in split.parts))
    usable = [other for other in range(2, MAX_TRIED + 1) if fits(other)]
    degrees = f"tensor_degree {' or '.join(map(str, usable))}, " if usable else ""
    types = ", int8 or Q8_0" if fits(degree, SMALLEST_BLOCK) else " or int8"
    raise UnsupportedError(f"Use {degrees}tensor_degree 1 with pipefusion_degree, or weights in bf16, fp16, fp8{types}"
                           f": tensor_degree={degree} cannot shard these quantised weights, as {name} has "
                           f"{' and '.join(map(str, split.parts))} inputs, in blocks of {split.block[0]}, and each "
                           f"device needs whole blocks.")


def _check_products(model, splits, degree):
    """Reject sharding the inputs of a layer that rounds each token's inputs by their maximum and has no way to use an
    agreed maximum."""
    for name, split in splits.items() if degree > 1 else ():
        path, _, leaf = name.rpartition(".")
        linear = model.get_submodule(path)
        if leaf == "weight" and split.how == ROWWISE and getattr(linear, "rounds_inputs", False) and not linear.agreed:
            raise UnsupportedError(
                f"Use tensor_degree 1 with pipefusion_degree, cfg_degree, ulysses_degree or ring_degree, or the bf16, "
                f"fp16, fp8, int8, mxfp8 or nvfp4 file of the same model: tensor_degree={degree} cannot shard "
                f"{name}, whose matrix multiplications round each token's inputs by their maximum, since each device "
                f"would have only some of the inputs.")


def possible_splits(model, plan, degree=1):
    """tensor_splits, or {} if the layers of this model cannot be sharded by this degree."""
    try:
        return tensor_splits(model, plan, degree)
    except UnsupportedError:
        return {}


def _block_splits(block, plan):
    splits = {}
    for path, module in block.named_modules():
        if isinstance(module, torch.nn.Linear):
            style = find_style(plan.tp_plan, path)
            if style is None:
                raise _unknown(block, path)
            if style == REPLICATED:
                continue
            how = style.style if isinstance(style, Fused) else style
            sizes = (style.split(block, path, module) if isinstance(style, Fused)
                     else (module.in_features if how == ROWWISE else module.out_features,))
            splits[f"{path}.weight"] = Split(how, int(how == ROWWISE), sizes, getattr(module, "weight_block", (1, 1)))
            splits |= {f"{path}.{name}": split for name, split in _auxiliary(module, how, sizes).items()}
            if module.bias is not None:
                splits[f"{path}.bias"] = Split("first") if how == ROWWISE else Split(how, 0, sizes)
        elif is_attention(module):
            for name in HEAD_NORMS:
                norm = getattr(module, name, None)
                weight = getattr(norm, "weight", None)
                size = (weight is not None and (getattr(module, "head_dim", None) or getattr(module, "dim_head", None)
                                                or module.to_q.out_features // module.heads))
                if weight is not None and weight.shape[0] > size:
                    if "RMSNorm" not in type(norm).__name__:
                        raise _unknown(block, f"{path}.{name}")
                    splits[f"{path}.{name}.weight"] = Split("norm", 0, (weight.shape[0],))
    return splits


def _auxiliary(linear, how, sizes):
    """{buffer: Split} of a quantised layer's auxiliary tensors. Values common to all rows are replicated."""
    scale, splits = getattr(linear, "weight_scale", None), {}
    if scale is not None and len(scale) > 1 and how != ROWWISE:                 # per row, or per block of each row
        splits["weight_scale"] = Split(how, 0, sizes)
    elif scale is not None and scale.dtype == torch.uint8 and how == ROWWISE:               # one byte per block
        splits["weight_scale"] = Split(how, 1, sizes, (linear.in_features // scale.shape[1], 1))
    if how != ROWWISE:
        splits |= {name: Split(how, 0, sizes) for name in BY_ROW if getattr(linear, name, None) is not None}
    if getattr(linear, "pre_quant_scale", None) is not None and how == ROWWISE:
        splits["pre_quant_scale"] = Split(how, 0, sizes)
    return splits


def is_attention(module):
    return (any(hasattr(module, name) for name in HEADS)
            and any(hasattr(module, name) for name in ATTENTIONS_HAVE))


def _unknown(block, path):
    return UnsupportedError(f"Use tensor_degree 1, and pipefusion_degree to split the weights: tensor parallelism does "
                            f"not know layer {path} of a {type(block).__name__}.")


def narrow(model, splits, degree, rank):
    """Update modules whose weights are a rank's shards: numbers of heads, sizes, biases that the rank does not have."""
    blocks = {block_path(name) for name in splits}
    split_ones = {model.get_submodule(path) for name in splits for path in _parents(name)}
    for block in blocks:
        for module in model.get_submodule(block).modules():
            if module in split_ones and (is_attention(module) or hasattr(module, "proj_mlp")):
                for name in PER_RANK:
                    if getattr(module, name, None) is not None:
                        setattr(module, name, shard_sizes(getattr(module, name), degree)[rank])
    for name, split in splits.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if split.how == "first" and rank:
            module.register_parameter(leaf, None)
        elif leaf == "weight" and isinstance(module, torch.nn.Linear):
            numbers, num_bytes = split.block
            module.out_features, module.in_features = module.weight.shape[0], module.weight.shape[
                1] // num_bytes * numbers


def _parents(name):
    """Paths of the modules that contain a tensor."""
    names = name.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]
