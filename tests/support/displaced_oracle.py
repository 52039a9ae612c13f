"""The oracles of displaced patches, SIM-D(N, W) of docs/design/displaced.md: one process, the unmodified model, whole
images.

For each band of rows the whole latent is predicted, while every layer that mixes rows finds, outside of the band, what
it found there in the call before; of the result the band's rows are kept. Norms are by the paper's formula, in E[x] and
E[x^2].
"""

import itertools

import torch
import torch.nn.functional as F
from greenlet import getcurrent, greenlet

from xdit_backend.partition import attended

plain_attention = F.scaled_dot_product_attention


class Calls:
    """What layers saw in the last two calls that were at different times, {name: tensor}, and where that leads to."""

    def __init__(self, extrapolation):
        self.extrapolation, self.times, self.seen = extrapolation, [], []

    def add(self, time, seen):
        same = self.times[-1:] == [time]
        self.times, self.seen = ([*(cached[:-1] if same else cached[-1:]), new]
                                 for cached, new in ((self.times, time), (self.seen, seen)))

    def extrapolated(self, name, time):
        last = self.seen[-1][name]
        if self.extrapolation == 0 or len(self.times) < 2 or time == self.times[-1]:
            return last
        before, (then, now) = self.seen[0][name], self.times
        return last + self.extrapolation * min(2.0, max(-1.0, (time - now) / (now - then))) * (last - before)


class StaleUNet:
    """A U-Net that remembers what its layers saw. bands: [(first row of the latent, last + 1)]. mode: the paper's name.
    forecast: how far keys and values, and what else `drifts` names, go on as they went before."""

    def __init__(self, model, bands, mode, extrapolation=0.0, drifts=("attn1",)):
        self.model, self.bands, self.mode, self.drifts = model, bands, mode, drifts
        self.calls = Calls(0.0 if mode == "no_sync" else extrapolation)
        self.now, self.band, self.time, self.is_running = {}, None, 0.0, False
        self.num_negative = 0                  # variances that the formula made negative
        attentions = attended(model)
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Conv2d) and module.kernel_size != (1, 1) and name != "conv_in":
                self._hook(module, self._convolution, name)
            elif isinstance(module, torch.nn.GroupNorm):
                self._hook(module, self._norm, name)
            elif attentions.get(name) == "rows":
                self._hook(module, self._attention, name)

    def _hook(self, module, function, name):
        forward = module.forward
        module.forward = lambda *args, **kwargs: (function(module, forward, name, *args, **kwargs) if self.is_running
                                                  else forward(*args, **kwargs))

    def predict(self, is_stale, **inputs):
        """The prediction for the whole latent, as the ranks together make it."""
        self.height, self.width = inputs["sample"].shape[-2:]
        self.time = torch.as_tensor(inputs["timestep"]).max().item()
        self.now, self.is_running = {}, True
        try:
            if not is_stale:
                self.band = None
                out = self.model(**inputs, return_dict=False)[0]
            else:
                out = torch.cat([piece[:, :, first:last]
                                 for piece, (first, last) in zip(self._all_bands(inputs), self.bands)], 2)
        finally:
            self.is_running = False
        if not (is_stale and self.mode == "no_sync"):
            self.calls.add(self.time, self.now)
        return out

    def _all_bands(self, inputs):
        """One coroutine a band; where a norm waits for all of them, the others run up to it."""
        results, waiting = {}, {}
        tasks = [greenlet(lambda: self.model(**inputs, return_dict=False)[0]) for _ in self.bands]

        def resume(band, value=None):
            self.band = band
            answer = tasks[band].switch() if value is None else tasks[band].switch(value)
            (results if tasks[band].dead else waiting)[band] = answer
        for band in range(len(tasks)):
            resume(band)
        while waiting:
            told, waiting = waiting, {}
            for band in told:
                resume(band, list(told.values()))
        return [results[band] for band in range(len(tasks))]

    def _rows(self, band, height):
        scale = 1
        while -(-self.height // scale) != height:
            scale *= 2
        return tuple(-(-row // scale) for row in self.bands[band])

    def _seen(self, name, x, dim, rows):
        """x with what the others' rows were, and remember this band's."""
        table = self.now.setdefault(name, torch.zeros_like(x))
        first, last = rows or (0, x.shape[dim])
        table.narrow(dim, first, last - first).copy_(x.narrow(dim, first, last - first))
        if rows is None:
            return x
        drifts = name.endswith(self.drifts)
        seen = (self.calls.extrapolated(name, self.time) if drifts else self.calls.seen[-1][name]).clone()
        seen.narrow(dim, first, last - first).copy_(x.narrow(dim, first, last - first))
        return seen

    def _convolution(self, module, forward, name, x):
        return forward(self._seen(name, x, 2, None if self.band is None else self._rows(self.band, x.shape[2])))

    def _attention(self, module, forward, name, *args, **kwargs):
        def attention(query, key, value, **options):
            rows, height, scale = None, self.height, 1
            while height * -(-self.width // scale) != key.shape[2]:
                scale *= 2
                height = -(-self.height // scale)
            if self.band is not None:
                rows = tuple(row * -(-self.width // scale) for row in self._rows(self.band, height))
            key, value = self._seen(name, torch.stack([key, value]), 3, rows)
            return plain_attention(query, key, value, **options)
        F.scaled_dot_product_attention = attention
        try:
            return forward(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = plain_attention

    def _norm(self, module, forward, name, x):
        batch, groups = x.shape[0], module.num_groups
        bands = range(len(self.bands)) if self.band is None else [self.band]
        shares = []
        for band in range(len(self.bands)):
            first, last = self._rows(band, x.shape[-2])
            shares.append((last - first) / x.shape[-2])
            if band in bands:
                part = x[..., first:last, :].reshape(batch, groups, -1)
                self.now.setdefault(name, {})[band] = torch.stack([part.mean(-1), (part ** 2).mean(-1)])
        if self.band is None:
            return forward(x)
        own, known = self.now[name][self.band], self.calls.seen[-1][name]
        if self.mode in ("separate_gn", "no_sync"):
            moments = own
        elif self.mode == "sync_gn":
            everyone = getcurrent().parent.switch(own)
            moments = sum(share * one for share, one in zip(shares, everyone))
        elif self.mode == "stale_gn":
            moments = sum(share * (own if band == self.band else known[band]) for band, share in enumerate(shares))
        else:
            moments = sum(share * known[band] for band, share in enumerate(shares)) + own - known[self.band]
        mean, variance = moments[0], moments[1] - moments[0] ** 2
        self.num_negative += int((variance < 0).sum())
        variance = torch.where(variance < 0, own[1] - own[0] ** 2, variance)
        normal = (x.reshape(batch, groups, -1) - mean[..., None]) / (variance[..., None] + module.eps).sqrt()
        weight, bias = (each.view(-1, *[1] * (x.ndim - 2)) for each in (module.weight, module.bias))
        return normal.view_as(x) * weight + bias


class StaleTransformer:
    """The same for a transformer of the zoo: each rank's tokens of every stream,
    and keys and values of the others' from before."""

    def __init__(self, example, num_parts, num_shards, shards=None, extrapolation=0.0):
        """num_shards: that the tokens are cut into; a part is some that follow one another. shards: {stream: tokens of
        each}, where they are not as even as they can be. forecast: as StaleUNet's."""
        self.example, self.num_parts, self.num_shards, self.shards = example, num_parts, num_shards, shards or {}
        within = {(streams, streams) for list_ in example.family.plan.lists for streams in list_.attention.values()}
        self.mixed = within | set(example.family.plan.cross_attention.values())  # (streams of queries, streams of keys)
        self.calls, self.read = Calls(extrapolation), {}
        modules = dict(example.model.named_modules())
        for path in example.family.plan.boundary_halos.keys() & modules.keys():
            modules[path].register_forward_pre_hook(self.read.__setitem__)

    def predict(self, x, timestep, is_stale):
        one, now, time = self.example, {}, timestep.max().item()
        one.latent, one.timestep = x, timestep
        counts = one.family.token_counts(x.shape, one.conditioning)
        lengths = {tuple(sum(counts[stream] for stream in streams) for streams in both): both[1] for both in self.mixed}
        out, given = None, {}
        for band in range(self.num_parts) if is_stale else [None]:
            calls = itertools.count()

            def attention(query, key, value, *args, band=band, calls=calls, **kwargs):
                if (query.shape[2], key.shape[2]) not in lengths:
                    return plain_attention(query, key, value, *args, **kwargs)     # cross-attention, or of text alone
                name, both = next(calls), torch.stack([key, value])
                if band is not None:
                    own = torch.cat([self._own(stream, counts[stream], band)
                                     for stream in lengths[query.shape[2], key.shape[2]]])
                    now[name] = torch.where(own[:, None], both, now.get(name, both))
                    both = torch.where(own[:, None], both, self.calls.extrapolated(name, time))
                else:
                    now[name] = both
                return plain_attention(query, *both, *args, **kwargs)

            F.scaled_dot_product_attention = attention
            try:
                prediction = one.run()
            finally:
                F.scaled_dot_product_attention = plain_attention
            out = prediction.clone() if out is None else out
            if is_stale:
                pixels = self._pixels(band, x)
                out[..., pixels] = prediction[..., pixels]
                given = {module: torch.where(pixels, read[0], given.get(module, read[0]))
                         for module, read in self.read.items()}
        self.calls.add(time, now)
        return self._of_all(given) if is_stale and given else out

    def _of_all(self, given):
        """The prediction where modules after the blocks read what all parts have given. given: {module: that}."""
        hooks = [module.register_forward_pre_hook(lambda *_, whole=whole: (whole,)) for module, whole in given.items()]
        try:
            return self.example.run()
        finally:
            for hook in hooks:
                hook.remove()

    def _own(self, stream, count, band):
        """Which of so many tokens of a stream are the band's."""
        even = [count // self.num_shards + (shard < count % self.num_shards) for shard in range(self.num_shards)]
        sizes, each = self.shards.get(stream, even), self.num_shards // self.num_parts
        assert sum(sizes) == count
        bands = torch.arange(self.num_shards) // each
        return bands.repeat_interleave(torch.tensor(sizes)) == band

    def _pixels(self, band, x):
        """Which pixels of the latent are of the band's tokens."""
        latent = self.example.family.inputs.latent
        mask = self._own("image", latent.num_tokens(x.shape), band).view(latent.counts(x.shape))
        for dim, size in enumerate(latent.patch):
            mask = mask.repeat_interleave(min(size, x.shape[2 + dim]), dim)
        return mask[tuple(slice(size) for size in x.shape[2:])]
