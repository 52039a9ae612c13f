"""Displaced patches (DistriFusion) of one run: which calls of the model are synchronous, and their way to the workers.

Every call is for the full latent, so any sampler node works.
"""

import dataclasses

from ....xdit_backend.host.calls import ForwardPass
from ....xdit_backend.partition import cut_bands, halved, num_tokens
from ....xdit_backend.planner.descriptions import describe_layout
from ....xdit_backend.planner.planner import branches_together
from ....xdit_backend.protocol.errors import ConfigError, UnsupportedError
from ....xdit_backend.protocol.specs import AUTO, MODES, Shrink, chosen_for
from .warmup import Staleness


class DisplacedRun:
    """One run, and the conditioning for which the workers cache what they exchanged.

    setup: a model_setup.Setup. schedule: sigmas of the run. shape: of its full latent. Raises ConfigError if that has
    too few rows for the ranks.
    """

    def __init__(self, client, setup, layout, schedule, shape):
        self._client, self._spec, self._config, self._layout = client, setup.spec, setup.config, layout
        self._num_channels, self.shape = setup.num_channels, tuple(shape)
        self._staleness = Staleness(schedule, setup.config.warmup_steps)
        _check_size(setup.family, setup.transformer_config, layout, shape)
        self._mode, self._because = setup.config.displaced_mode, ""
        if self._mode == AUTO:
            rows = _rows_at_last_level(setup.family, setup.transformer_config, layout.displaced_degree, shape)
            self._mode, self._because = chosen_for(rows)

    def end(self):
        """Have the workers drop their caches for this run."""
        self._client.end_run(self)

    def describe(self, synchronous_reason):
        """Describe the split of the run for the user. synchronous_reason: of pipefusion_support.why_synchronous."""
        text = describe_layout(self._layout) + self._config.idle
        if synchronous_reason is not None:
            return f"{text}, every step synchronous, because this workflow uses {synchronous_reason}"
        return f"{text}, {self._mode} ({self._because})" if self._because else text

    def predict(self, calls, sigma, synchronous_reason=None):
        """Return the predictions for one or two calls, which are all calls of this step at this time."""
        if any(isinstance(setting, Shrink) for call in calls for setting in call.free_u):
            raise UnsupportedError("Set displaced_degree to 1 in xDiT Parallel Config, and cfg_degree or data_degree "
                                   "higher, or remove PatchModelAddDownscale: it downscales full images, and each "
                                   "device has only some of their rows.")
        if any(call.free_u for call in calls):
            raise UnsupportedError("Set displaced_degree to 1 in xDiT Parallel Config, and cfg_degree or data_degree "
                                   "higher, or remove FreeU: it filters the frequencies of full images, and each "
                                   "device has only some of their rows.")
        if any(call.tiles for call in calls):
            raise UnsupportedError("Set displaced_degree to 1 in xDiT Parallel Config, and cfg_degree or data_degree "
                                   "higher, or remove HyperTile: it cuts full images into tiles, and each device has "
                                   "only some of their rows.")
        requests = [dataclasses.replace(call, name=self._client.name_conditioning(call.conditioning, run=self))
                    for call in calls]
        # the ranks of each CFG branch have caches of their own
        names = {(request.name, index % self._layout.cfg_degree) for index, request in enumerate(requests)}
        # nodes may call the model for a tile of the latent, or for another one
        keep = (synchronous_reason is None and MODES[self._mode].is_stale and self._staleness.ends
                and all(tuple(request.latent.shape) == self.shape and not request.is_changed for request in requests))
        stale = keep and not self._staleness.is_synchronous(names, sigma)
        together = any(request.compares_images for request in requests)
        layout = branches_together(self._layout) if together else self._layout
        forward = ForwardPass(keep=keep, stale=stale, displaced_mode=self._mode)
        handle = self._client.submit(self._spec, layout, self._num_channels, requests, forward, run=self)
        if keep:
            self._staleness.hold(names)
        return self._client.wait([handle])[1]


def _rows_at_last_level(family, config, degree, shape):
    """Fewest rows of a rank in a U-Net's smallest feature maps, for equally fast ranks; None for a transformer."""
    if family.plan.num_levels is None:
        return None
    halvings = family.plan.num_levels(config) - 1
    starts = halved(cut_bands(shape[2], degree, 2 ** halvings), halvings)
    return min(end - start for start, end in zip(starts, starts[1:]))


def _check_size(family, config, layout, shape):
    degree = layout.displaced_degree
    if family.plan.num_levels is None:
        ranks, tokens = degree * layout.ring_degree * layout.ulysses_degree, num_tokens(
            shape[2:], family.patch_size(config))
        if tokens < ranks:
            raise ConfigError(f"Use a larger latent or lower degrees: it has {tokens} tokens, too few for "
                              f"displaced_degree x ring_degree x ulysses_degree = {ranks}.")
        return
    multiple = 2 ** (family.plan.num_levels(config) - 1)
    if cut_bands(shape[2], degree, multiple) is None:
        most = -(-shape[2] // multiple)
        raise ConfigError(f"Set displaced_degree to at most {most}, or use a taller latent: "
                          f"displaced_degree={degree} is too high for a latent of {shape[2]} rows, which "
                          f"{family.name} splits in multiples of {multiple}.")
