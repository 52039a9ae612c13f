"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): communication of the ranks' weight shards, installed on a
model whose weights are sharded (checkpoints/tensor_sharding.py). docs/design/tensor.md.
"""

import collections
import functools

import torch

from ..distributed import custom_ops
from ..distributed.collectives import all_gather, start_all_reduce
from ..partition import block_indices, block_path, summed_modules

# norm of an attention -> the linear whose output it normalises
PROJECTED = {"norm_q": "to_q", "norm_k": "to_k", "norm_added_q": "add_q_proj", "norm_added_k": "add_k_proj",
             "q_rms_norm": "to_q", "norm_k_img": "to_k_img",
             "k_rms_norm": "to_k", "q_rms_norm_t": "to_q_t", "k_rms_norm_t": "to_k_t"}


def install_tensor_hooks(model, plan, splits, current):
    """Sum the ranks' results of attentions and feed-forwards, normalise over the heads of all ranks, and gather
    modulations.

    splits: from checkpoints.tensor_sharding.tensor_splits. current(): the ForwardContext of the running forward, whose
    mesh has the group.
    """
    weights = {name.removesuffix(".weight"): split for name, split in splits.items() if name.endswith(".weight")}
    gathered = {path: split for path, split in weights.items() if split.how == "colwise_gather_output"}
    _install_gathered(model, plan, gathered, current)
    norms = collections.defaultdict(dict)
    for path, split in weights.items():
        if split.how == "norm":
            attention, _, name = path.rpartition(".")
            norms[attention][name] = split.parts[0]
    for path, sizes in norms.items():
        _install_norms(model.get_submodule(path), path, sizes, current)
    for path in summed_modules(splits):
        module = model.get_submodule(path)
        only_first = getattr(module, "add_q_proj", None) is not None and getattr(module, "to_add_out", None) is None
        forward = _of_own_heads(module.forward, plan.of_heads, current) if plan.of_heads else module.forward
        module.forward = _summed(forward, only_first, current)


def _summed(forward, only_first, current):
    """Sum all outputs in one all-reduce. Biases are on the first rank only. only_first: the last block's text output is
    neither projected nor used."""
    @functools.wraps(forward)
    def summed(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        if torch.is_tensor(outputs):
            return _sums([outputs], current)[0] if outputs.numel() else outputs
        summed_outputs = outputs[:1] if only_first or outputs[-1] is None else outputs
        return (*_sums(list(summed_outputs), current), *outputs[len(summed_outputs):])
    return summed


def _sums(tensors, current):
    """Sum the ranks' tensors. Another forward that is interleaved with this one runs during the all-reduce."""
    if torch.compiler.is_compiling():
        return custom_ops.tensor_sums(tensors)
    context = current()
    wait = start_all_reduce(tensors, context.mesh.tensor_group, context.traffic)
    context.yield_turn()
    return wait()


def _of_own_heads(forward, names, current):
    """Slice these arguments, tensors or tuples of tensors, to this rank's heads."""
    @functools.wraps(forward)
    def own(*args, **kwargs):
        mesh = current().mesh

        def cut(tensor):
            return tensor.chunk(mesh.degrees["tensor"], 1 if tensor.ndim == 4 else -1)[mesh.ranks["tensor"]]
        for name in names:
            if kwargs.get(name) is not None:
                kwargs[name] = cut(kwargs[name]) if torch.is_tensor(kwargs[name]) else tuple(map(cut, kwargs[name]))
        return forward(*args, **kwargs)
    return own


def _install_gathered(model, plan, splits, current):
    """Gather the outputs of modulations, whose input (a time or pooled text embedding) is mostly the same tensor.

    The first one gathers those of all this rank's blocks in one all-gather; of its own block only, if weights are
    streamed block by block. A layer that gets another input computes with it in an all-gather of its own, and is not
    precomputed from then on.
    """
    linears = {path: model.get_submodule(path) for path in splits}
    forwards = {path: linear.forward for path, linear in linears.items()}
    indices, apart = block_indices(model, plan.blocks), set()

    def block_of(path, context):
        return indices.get(block_path(path), context.blocks.start)

    def is_here(other, path, context):
        block = block_of(other, context)
        return block == block_of(path, context) if context.weights_streamed else block in context.blocks

    def outputs(paths, tensor, context):
        degree = context.mesh.degrees["tensor"]
        sizes = [splits[path].sizes(degree) for path in paths]
        own = torch.cat([forwards[path](tensor) for path in paths], -1)
        joined = all_gather(own, [sum(of_rank) for of_rank in zip(*sizes)], own.ndim - 1, context.mesh.tensor_group,
                            context.traffic)
        chunks = joined.split([size for of_rank in zip(*sizes) for size in of_rank], -1)
        return [torch.cat(chunks[index::len(paths)], -1) for index in range(len(paths))]

    def requested(path, tensor):
        context = current()
        precomputed = context.state.precomputed
        known_input, output = precomputed.get(path, (None, None))
        if known_input is tensor and output is not None:
            precomputed[path] = (tensor, None)
            return output
        if output is not None:
            apart.add(path)
        paths = [path,
                 *(other for other, linear in linears.items() if other not in precomputed
                         and other not in apart and other != path
                         and linear.in_features == linears[path].in_features and is_here(other, path, context))]
        own, *others = outputs(paths, tensor, context)
        precomputed.update({other: (tensor, known) for other, known in zip(paths[1:], others)})
        precomputed[path] = (tensor, None)
        return own

    for path, linear in linears.items():
        linear.forward = _gathered(forwards[path], functools.partial(requested, path), splits[path].sizes, current)
        for module in model.get_submodule(path.rpartition(".")[0]).children():
            if type(module) is torch.nn.SiLU and not module.inplace:
                module.forward = _activated(module.forward, current)


def _gathered(forward, requested, sizes, current):
    """Forward of a modulation. A compiled graph serves every block, knows no other layers and gathers one by itself.
    sizes: (degree) -> outputs of each rank."""
    def gathered(tensor):
        if torch.compiler.is_compiling():
            return custom_ops.tensor_gathered(forward(tensor), sizes(current().mesh.degrees["tensor"]))
        return requested(tensor)
    return gathered


def _activated(forward, current):
    """A block's activation of the time embedding before a modulation, computed once for all blocks."""
    @functools.wraps(forward)
    def activated(tensor):
        if torch.compiler.is_compiling():
            return forward(tensor)
        precomputed = current().state.precomputed
        if id(tensor) not in precomputed:
            precomputed[id(tensor)] = (tensor, forward(tensor))  # the reference keeps the id from being reused
        return precomputed[id(tensor)][1]
    return activated


def _install_norms(attention, path, sizes, current):
    """RMS norms over the heads of all ranks, which sum their squares in one all-reduce for all linears that have run by
    then.

    sizes: {norm: number of elements on all ranks}.
    """
    def projected(name, forward):
        @functools.wraps(forward)
        def linear(tensor):
            output = forward(tensor)
            if torch.compiler.is_compiling():
                return output
            current().state.precomputed.setdefault(path, {})[name] = (output, None)
            return output
        return linear

    def norm_forward(name, norm):
        def forward(tensor):
            if torch.compiler.is_compiling():
                return scaled(tensor, custom_ops.tensor_sums([_squares(tensor)])[0], name, norm)
            return normed(name, norm, tensor)
        return forward

    def normed(name, norm, tensor):
        context = current()
        known = context.state.precomputed.get(path, {})
        known_input, squares = known.pop(name, (None, None))
        if known_input is not tensor or squares is None:
            waiting = {other: of_other for other, (of_other, squares) in known.items() if squares is None}
            squares, *others = _sums([_squares(each) for each in (tensor, *waiting.values())], current)
            known.update({other: (of_other, sums) for (other, of_other), sums in zip(waiting.items(), others)})
        return scaled(tensor, squares, name, norm)

    def scaled(tensor, squares, name, norm):
        result = torch.mul(tensor, torch.rsqrt(squares / sizes[name] + norm.eps), out=torch.empty_like(tensor))
        return result.mul_(norm.weight.to(squares.dtype))

    for name in sizes:
        norm, linear = getattr(attention, name), _projection(attention, name)
        linear.forward = projected(name, linear.forward)
        norm.forward = norm_forward(name, norm)


def _projection(attention, name):
    """The linear whose output a norm takes, by diffusers' or ComfyUI's name."""
    linear = getattr(attention, PROJECTED[name], None)
    return getattr(attention, PROJECTED[name].removeprefix("to_")) if linear is None else linear


def _squares(tensor):
    """Sum of squares over the last dim, in float32 or better."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dim=-1, keepdim=True, dtype=wide).square()
