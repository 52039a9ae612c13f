"""The oracle of PipeFusion, SIM(M, W) of docs/design/pipefusion.md: one process, the unmodified diffusers model, stale
keys and values.

A patch is predicted by running the whole latent, while every self-attention takes keys and values from a store for all
tokens but the patch's own. Everything else in a transformer is token by token, so the patch's rows are its prediction.
Neither the number of stages nor the sequence degree appears.
"""

import functools
import itertools

import torch
import torch.nn.functional as F

from .sparse_oracle import sparse_oracle

plain = F.scaled_dot_product_attention


class StaleModel:
    """A model of the zoo that remembers keys and values from call to call.

    forecast: how far they go on as they went before. order: 1, along a line through the last two calls; 2, a parabola
    through three.
    """

    def __init__(self, example, extrapolation=0.0, order=1, sparse=None):
        """sparse: specs.SparseOptions of self-attentions with the image; None: all are dense."""
        self.example, self.extrapolation, self.order, self.sparse = example, extrapolation, order, sparse
        # past: of each attention, [(time, keys, values)] of whole calls
        self.store, self.times, self.past = {}, {}, {}
        self.others, self.edges, self.fresh_rows = [], {}, None
        self.streams, self.name = None, ""                     # of the keys of the attention that runs, and its own
        self.block, blocks = 0, iter(range(10 ** 6))           # that it is in
        for list_ in example.family.plan.lists:
            read = list_.attention | {name: streams for name,
                                      (_, streams) in example.family.plan.cross_attention.items()}
            for block in example.model.get_submodule(list_.name):
                block.register_forward_pre_hook(functools.partial(self._enter_block, next(blocks)))
                for name, streams in read.items():
                    module = block if name == "." else functools.reduce(
                        lambda parent, part: getattr(parent, part, None), name.split("."), block)
                    if module is not None:
                        module.register_forward_pre_hook(functools.partial(self._enter, streams, name))
                        module.register_forward_hook(functools.partial(self._enter, None, ""))
        for path, side in example.family.plan.boundary_halos.items():
            if path.rpartition(".")[0] in dict(example.model.named_modules()):
                example.model.get_submodule(path).register_forward_pre_hook(functools.partial(self._as_last, side))

    def _enter_block(self, block, *module_and_arguments):
        self.block = block

    def _enter(self, streams, name, *module_and_arguments):
        self.streams, self.name = streams, name

    def _as_last(self, side, module, args):
        """What a module after the blocks reads of other patches' rows is what they gave last; zeros before that."""
        (given,), rows = args, self.fresh_rows.repeat_interleave(side)[:, None]
        self.edges[module] = torch.where(rows, given, self.edges.get(module, torch.zeros_like(given)))
        return self.edges[module],

    def go_on(self, name, time):
        """A call at another time begins: what no patch has brought yet is what the calls before it lead to."""
        (keys, values, seen), past = self.store[name], self.past.setdefault(name, [])
        if not seen.all() or self.times[name] == time:
            return
        past.append((self.times[name], keys, values))
        if len(past) > 1:
            (older, *before), (old, *last) = past[-2:]
            stride = min(max((time - old) / (old - older), -1.0), 2.0)
            bent = (0.0, 0.0)
            if self.order == 2 and len(past) > 2:
                oldest, *first = past[-3]
                step = stride * (old - older)
                bent = [((now - then) / (old - older) - (then - start) / (older - oldest)) / (old - oldest) * step
                        * (step + old - older)
                        for now, then, start in zip(last, before, first)]
            self.store[name] = *(now + self.extrapolation * stride * (now - then) + self.extrapolation * more
                                 for now, then, more in zip(last, before, bent)), seen
            del past[:-2]

    def predict(self, latent, timestep, rows=None, opens=None):
        """The model's prediction for a whole latent. rows: the patch, (first, last + 1) along its dim, or several such;
        None: all is fresh.
        opens: is it the first of its step? None: the one with the first row is.

        Of the latent's other parts, `others`: with the first patch they are as they are predicted.
        """
        one = self.example
        one.latent, one.timestep = latent, timestep
        size = one.family.patch_size(one.config)
        dim = 2 if latent.ndim == 4 or latent.shape[2] > size[0] else 3
        counts = one.family.token_counts(latent.shape, one.conditioning)
        num_image = counts["image"]
        a_row = num_image // -(-latent.shape[dim] // size[dim - 2])
        height = latent.shape[dim]
        strips = [(0, height)] if rows is None else [rows] if isinstance(rows[0], int) else rows
        own = [(a_row * (first // size[dim - 2]), num_image if end == height else a_row * (end // size[dim - 2]))
               for first, end in strips]
        opens = own[0][0] == 0 if opens is None else opens
        self.fresh_rows = torch.zeros(num_image // a_row, dtype=torch.bool)
        for first, last in own:
            self.fresh_rows[first // a_row:last // a_row] = True
        calls = iter(range(1000))
        # (1, T, T): query q has a_q b_k + b_q a_k added to what key k weighs
        biases = {name: (bias[:, :, None] * bias[:, None, :, [1, 0]]).sum(-1) for name, bias in one.family.biases_of(
            latent, timestep, one.conditioning, one.config).items()}

        def attention(query, key, value, *args, **kwargs):
            if self.streams is None:
                return plain(query, key, value, *args, **kwargs)                   # over text alone, or cross-attention
            assert key.shape[2] == sum(counts[stream] for stream in self.streams)
            # text and the like come with the first patch
            fresh = torch.full((key.shape[2],), opens)
            if "image" in self.streams:
                offset = sum(counts[stream] for stream in self.streams[:self.streams.index("image")])
                fresh[offset:offset + num_image] = False
                for first, last in own:
                    fresh[offset + first:offset + last] = True
            name = next(calls)
            if opens:
                if self.extrapolation and name in self.store:
                    self.go_on(name, timestep.max().item())
                self.times[name] = timestep.max().item()
            keys, values, seen = self.store.get(name, (torch.zeros_like(key), torch.zeros_like(value),
                                                       torch.zeros_like(fresh)))
            keys = torch.where(fresh[:, None], key, keys)
            values = torch.where(fresh[:, None], value, values)
            seen = seen | fresh
            self.store[name] = keys, values, seen
            if self._is_sparse(query, key, kwargs.get("attn_mask")):
                return self._sparse(query, keys[:, :, seen], values[:, :, seen], fresh, seen, counts,
                                    kwargs.get("scale"))
            if kwargs.get("attn_mask") is not None:
                mask = kwargs["attn_mask"]
                kwargs["attn_mask"] = mask.expand(*mask.shape[:3], len(seen))[..., seen]
            if self.name in biases:
                assert kwargs.get("attn_mask") is None
                kwargs["attn_mask"] = biases[self.name][..., seen].to(query.dtype)
            return plain(query, keys[:, :, seen], values[:, :, seen], *args, **kwargs)

        F.scaled_dot_product_attention = attention
        try:
            prediction, *others = one.run_parts()
        finally:
            F.scaled_dot_product_attention = plain
        self.others = others if opens else self.others
        return prediction

    def _is_sparse(self, query, key, mask):
        plan, options = self.example.family.plan, self.sparse
        is_own = any(list_.attention.get(self.name) == self.streams for list_ in plan.lists)
        return (options is not None and is_own and "image" in self.streams and query.shape == key.shape
                and (mask is None or mask.dtype == torch.bool and bool(mask.all()))
                and self.block not in options.dense_blocks and key.shape[2] >= options.min_tokens)

    def _sparse(self, query, keys, values, fresh, seen, counts, scale):
        """Of the patch's queries; nobody reads the others. The image is last in the sequence, wherever the tensor has
        it."""
        order = [*(stream for stream in self.streams if stream != "image"), "image"]
        starts = dict(zip(order, itertools.accumulate(map(counts.get, order), initial=0)))
        positions = torch.cat([starts[stream] + torch.arange(counts[stream]) for stream in self.streams])
        of = {stream: range(start, start + counts[stream]) for stream, start in starts.items() if stream != "image"}
        sinks = [position for positions in of.values() for position in positions]
        rows = list(of["audio"]) if of.get("audio") else sinks
        sinks, rows = {"off": ((), ()), "exact_kv": (sinks, ()), "exact_kv_and_rows": (sinks, rows)}[
            self.sparse.sink_conditioning]
        out = torch.zeros_like(query)
        out[:, :, fresh] = sparse_oracle(query[:, :, fresh], keys, values, positions[fresh], positions[seen],
                                         self.sparse, sinks, rows, scale)
        return out


def simulate(example, patches, warmup_steps, sigmas, dim=2, extrapolation=0.0, sparse=None):
    """Sample with Euler steps, patch by patch after the warm-up. patches: [(first row, last + 1)].
    Returns the latent."""
    model, x = StaleModel(example, extrapolation, sparse=sparse), example.latent
    for step, (sigma, following) in enumerate(zip(sigmas, sigmas[1:])):
        timestep = example.at(sigma)
        if step < warmup_steps:
            x = stepped(x, model.predict(x, timestep), following - sigma)
            continue
        x = torch.cat(
            [stepped(x, model.predict(x, timestep, (first, last)), following - sigma).narrow(dim, first, last - first)
             for first, last in patches], dim)
    return x


def stepped(x, velocity, by):
    """An Euler step of a latent; channels that no prediction is made for, of pictures beside it, stay as they are."""
    count = min(x.shape[1], velocity.shape[1])
    return torch.cat([x[:, :count] + by * velocity[:, :count], x[:, count:]], 1)
