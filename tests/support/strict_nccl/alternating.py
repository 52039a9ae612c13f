"""Commands that follow one another as closely as the host sends them: two conditionings in turn, receives posted ahead,
stale calls whose exchanges are under way, decodes by all and by some ranks, another layout between."""

import itertools
import tempfile
from pathlib import Path

import torch

from tests.support.model_zoo import example, save_transformer
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.partition import cut_patches
from xdit_backend.protocol import messages, specs
from xdit_backend.protocol.specs import Layout, Stages
from xdit_backend.tools.bench.vae import random_decoder

TIMES, NUM_PATCHES = (900.0, 700.0, 500.0), 3
CASES = [("SD3", layout) for layout in (
    Layout(displaced_degree=2), Layout(pipefusion_degree=2), Layout(pipefusion_degree=3),
    Layout(displaced_degree=2, ulysses_degree=2), Layout(displaced_degree=2, cfg_degree=2), Layout(displaced_degree=4),
    Layout(pipefusion_degree=4), Layout(pipefusion_degree=2, ring_degree=2),
    Layout(pipefusion_degree=2, tensor_degree=2), Layout(pipefusion_degree=2, cfg_degree=2),
    Layout(pipefusion_degree=2, data_degree=2),
    Layout(ulysses_degree=2, ring_degree=2))]
CASES += [("Flux.1", Layout(displaced_degree=2, ring_degree=2)), ("Wan", Layout(pipefusion_degree=2))]


class Alternating:
    """The commands, and the segments that they write. world_size: the ranks that they are for."""

    def __init__(self, store, folder, name, layout):
        self.world_size = 1
        for degree in vars(layout).values():
            self.world_size *= degree
        self._store, self._layout, self._request, self.made = store, layout, itertools.count(1), []
        self._is_staged, self._is_displaced = layout.pipefusion_degree > 1, layout.displaced_degree > 1
        more = {"frames": 4} if name == "Wan" else {}
        self._examples = [example(name, rows=16, columns=6, batch=2, num_text_tokens=count, seed=count, **more)
                          for count in (7, 9)]
        with torch.no_grad():
            self._num_channels = self._examples[0].run().shape[1]
        path = Path(tempfile.mkdtemp(dir=folder))
        save_transformer(self._examples[0].model, path)
        stages = Stages(layout.pipefusion_degree, self.world_size // layout.pipefusion_degree // layout.cfg_degree
                        // layout.data_degree) if self._is_staged else None
        self._spec = open_checkpoint(path).spec("float64", "float64", stages, layout.tensor_degree)
        self.commands = list(self._all())

    def _all(self):
        yield messages.LoadModel(next(self._request), self._spec)
        weights = {key: self._store.share(value) for key, value in random_decoder(32).items()}
        yield messages.LoadAutoencoder(next(self._request), specs.AutoencoderSpec("vae", "float64", weights))
        for name, one in zip("ab", self._examples):
            tensors = {key: self._store.share(value) for key, value in one.conditioning.items()}
            yield messages.Conditioning(next(self._request), name, tensors)
        turns = [[0, 1]] if self._layout.cfg_degree > 1 else [[0], [1]]
        for step in range(len(TIMES)):
            one = self._examples[0]
            patches = [(None, 0)] if step == 0 or not self._is_staged else [
                *cut_patches(one.latent.shape, one.family.patch_size(one.config), NUM_PATCHES)]
            for (patch, rows), turn in itertools.product(patches, turns):
                yield self._predict(turn, step, patch, rows)
            if step < 2:
                yield self._decode(num_ranks=0 if step == 0 else self.world_size - 1)
            if step == 1 and not self._is_staged and self._layout.tensor_degree == 1 and self.world_size == 4:
                yield self._predict([0, 1], step, None, 0, Layout(cfg_degree=2, ulysses_degree=2))
        yield self._decode(num_ranks=1, first_rank=self.world_size - 1)
        yield messages.DropConditioning(next(self._request), ["a", "b"])
        yield messages.ReportMemory(next(self._request))

    def _predict(self, turn, step, patch, rows, layout=None):
        stale = ({"stale": step > 0, "options": specs.ForwardOptions(extrapolation=0.5)}
                 if self._is_displaced and layout is None else {})
        branches = [self._branch(index, TIMES[step], patch, rows) for index in turn]
        return messages.Predict(next(self._request), self._spec.name, layout or self._layout, branches, patch,
                                keep=True, **stale)

    def _branch(self, index, time, patch, rows):
        one = self._examples[index]
        latent = one.latent if patch is None else one.latent.narrow(patch.dim, patch.start, rows)
        shape = len(latent), self._num_channels, *latent.shape[2:]
        self.made.append(self._store.create(shape, torch.float64)[0])
        return specs.Branch(self._store.share((latent * (1 + time / 1e4)).contiguous()),
                            self._store.share(torch.full_like(one.timestep, time)), "ab"[index], self.made[-1])

    def _decode(self, **ranks):
        self.made.append(self._store.create((1, 96, 96, 3), torch.float32)[0])
        latent = torch.randn(1, 4, 12, 12, generator=torch.Generator().manual_seed(0))
        return messages.Decode(next(self._request), "vae", self._store.share(latent), self.made[-1], **ranks)
