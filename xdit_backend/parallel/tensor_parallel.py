"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): puts together what the ranks' shares of layers give.

Installed by the hooks on a model that holds a rank's share of its weights (checkpoints/tensor_sharding.py).
docs/design/tensor.md.
"""

import collections
import functools

import torch

from ..distributed import custom_ops
from ..distributed.collectives import all_gather, start_all_reduce
from ..partition import block_indices, block_path, summed_modules

PROJECTED = {"norm_q": "to_q", "norm_k": "to_k", "norm_added_q": "add_q_proj", "norm_added_k": "add_k_proj",
             "q_rms_norm": "to_q", "norm_k_img": "to_k_img",
             # norm of an attention -> what it norms
             "k_rms_norm": "to_k", "q_rms_norm_t": "to_q_t", "k_rms_norm_t": "to_k_t"}


def install_tensor_hooks(model, plan, splits, current):
    """Have attentions and feed-forwards add up the ranks' results, norms over all heads see all heads, and modulations
    be gathered.

    splits: of checkpoints.tensor_sharding.tensor_splits. current(): the ForwardContext of the forward that runs, whose
    mesh has the group.
    """
    weights = {name.removesuffix(".weight"): split for name, split in splits.items() if name.endswith(".weight")}
    _install_gathered(model, plan, {path: split for path, split in weights.items() if split.how == "gathered"}, current)
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
    """Sum all outputs in one exchange. The first rank alone has the biases. only_first: the last block's text is not
    projected, nor used."""
    @functools.wraps(forward)
    def summed(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        if torch.is_tensor(outputs):
            return _sums([outputs], current)[0] if outputs.numel() else outputs
        parts = outputs[:1] if only_first or outputs[-1] is None else outputs
        return (*_sums(list(parts), current), *outputs[len(parts):])
    return summed


def _sums(tensors, current):
    """The sums of the ranks' tensors. While they travel, another forward computes, where one takes turns with this
    one."""
    if torch.compiler.is_compiling():
        return custom_ops.tensor_sums(tensors)
    context = current()
    wait = start_all_reduce(tensors, context.mesh.tensor_group, context.traffic)
    context.yield_turn()
    return wait()


def _of_own_heads(forward, names, current):
    """Cut these arguments, tensors or tuples of them, to this rank's heads."""
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
    """Modulations, whose input (a time or a pooled text) is mostly the same: the first one gathers all that this rank's
    blocks need, at once; all that its own block needs, where weights come from host memory block by block.

    A layer that gets another input after all computes with that, in an exchange of its own, and from then on is not
    computed ahead.
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
        pieces = joined.split([size for of_rank in zip(*sizes) for size in of_rank], -1)
        return [torch.cat(pieces[index::len(paths)], -1) for index in range(len(paths))]

    def requested(path, tensor):
        context = current()
        given, output = context.precomputed.get(path, (None, None))
        if given is tensor and output is not None:
            context.precomputed[path] = (tensor, None)
            return output
        if output is not None:
            apart.add(path)
        paths = [path,
                 *(other for other, linear in linears.items() if other not in context.precomputed and other not in apart
                         and other != path
                         and linear.in_features == linears[path].in_features and is_here(other, path, context))]
        own, *others = outputs(paths, tensor, context)
        context.precomputed.update({other: (tensor, known) for other, known in zip(paths[1:], others)})
        context.precomputed[path] = (tensor, None)
        return own

    for path, linear in linears.items():
        linear.forward = _gathered(forwards[path], functools.partial(requested, path), splits[path].sizes, current)
        for module in model.get_submodule(path.rpartition(".")[0]).children():
            if type(module) is torch.nn.SiLU and not module.inplace:
                module.forward = _activated(module.forward, current)


def _gathered(forward, requested, sizes, current):
    """The forward of such a layer. A graph is of every block's: it knows of no others, and gathers one by itself.
    sizes: (degree) -> of each rank."""
    def gathered(tensor):
        if torch.compiler.is_compiling():
            return custom_ops.tensor_gathered(forward(tensor), sizes(current().mesh.degrees["tensor"]))
        return requested(tensor)
    return gathered


def _activated(forward, current):
    """A block's activation of the time before a modulation, computed once for all blocks, as one tensor."""
    @functools.wraps(forward)
    def activated(tensor):
        if torch.compiler.is_compiling():
            return forward(tensor)
        precomputed = current().precomputed
        if id(tensor) not in precomputed:
            precomputed[id(tensor)] = (tensor, forward(tensor))  # the tensor is kept, so that its id stays its own
        return precomputed[id(tensor)][1]
    return activated


def _install_norms(attention, path, sizes, current):
    """RMS norms over the heads of all ranks, which add up their squares: in one exchange for all that has been
    projected by then.

    sizes: {norm: numbers of all ranks}.
    """
    def projected(name, forward):
        @functools.wraps(forward)
        def linear(tensor):
            output = forward(tensor)
            if torch.compiler.is_compiling():
                return output
            current().precomputed.setdefault(path, {})[name] = (output, None)
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
        known = context.precomputed.get(path, {})
        given, squares = known.pop(name, (None, None))
        if given is not tensor or squares is None:
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
    """The linear whose output a norm takes, as diffusers calls it, or ComfyUI."""
    linear = getattr(attention, PROJECTED[name], None)
    return getattr(attention, PROJECTED[name].removeprefix("to_")) if linear is None else linear


def _squares(tensor):
    """Sums of the squares of each token's numbers, in float32 or better."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return torch.linalg.vector_norm(tensor, dim=-1, keepdim=True, dtype=wide).square()
