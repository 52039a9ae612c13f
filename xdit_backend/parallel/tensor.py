"""Tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053): what the ranks' shares of layers give, put together.

Placed by the hooks on a model that holds a rank's share of its weights (checkpoints/shares.py). docs/algorithms.md section 10.
"""

import functools

import torch

from ..partition import summed_modules
from .collectives import all_gather, start_all_reduce


def place_tensor_hooks(model, plan, splits, current):
    """Have attentions and feed-forwards add up the ranks' results, norms over all heads see all, modulations be put together.

    splits: of checkpoints.shares.tensor_splits. current(): the ForwardContext of the forward that runs, whose mesh has the group.
    """
    for name, split in splits.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf != "weight":
            continue
        if split.how == "gathered":
            module.forward = _gathered(module.forward, split, current)
        elif split.how == "norm":
            module.forward = _norm(module, split, current)
    for path in summed_modules(splits):
        module = model.get_submodule(path)
        only_first = getattr(module, "add_q_proj", None) is not None and getattr(module, "to_add_out", None) is None
        forward = _of_own_heads(module.forward, plan.of_heads, current) if plan.of_heads else module.forward
        module.forward = _summed(forward, only_first, current)


def _summed(forward, only_first, current):
    """All outputs in one exchange. The first rank alone has the biases. only_first: the last block's text is not projected, nor used."""
    @functools.wraps(forward)
    def summed(*args, **kwargs):
        outputs, now = forward(*args, **kwargs), current()
        if torch.is_tensor(outputs):
            return _sums([outputs], now)[0]
        parts = outputs[:1] if only_first else outputs
        return (*_sums(list(parts), now), *outputs[len(parts):])
    return summed


def _sums(tensors, now):
    """Of the ranks' tensors. While they travel, another forward computes, where there is one that takes turns with this one."""
    wait = start_all_reduce(tensors, now.mesh.tensor_group, now.traffic)
    now.meanwhile()
    return wait()


def _of_own_heads(forward, names, current):
    """Of these arguments, tensors or tuples of them, what is the rank's heads'."""
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


def _gathered(forward, split, current):
    @functools.wraps(forward)
    def gathered(tensor):
        now, own = current(), forward(tensor)
        degree = now.mesh.degrees["tensor"]
        return all_gather(own, split.sizes(degree), own.ndim - 1, now.mesh.tensor_group, now.traffic)
    return gathered


def _norm(norm, split, current):
    """An RMS norm over the heads of all ranks: they add up the squares of theirs."""
    size, = split.parts

    @functools.wraps(norm.forward)
    def normed(tensor):
        now, wide = current(), tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        squares, = _sums([wide.square().sum(-1, keepdim=True)], now)
        return (wide * torch.rsqrt(squares / size + norm.eps) * norm.weight.to(wide.dtype)).to(tensor.dtype)
    return normed
