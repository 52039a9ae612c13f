"""Does a MODEL fit on its devices? Its weights are checked before they are read, a run before its first call. Made by
shell.py, asked by remote.py."""

import dataclasses
import functools

import torch

from ....xdit_backend.forecast.cost import Job
from ....xdit_backend.forecast.memory import Memory, rank_memory, rank_weights, working_share
from ....xdit_backend.forecast.memory_check import DeviceMemory, Hints, Latents, check_memory
from ....xdit_backend.forecast.planner import (
    USUAL_JOB,
    degrees_of,
    describe_layout,
    memory_settings,
    spread_that_fits,
)
from ....xdit_backend.host_memory import available_memory
from ....xdit_backend.partition import ranks_by_part
from ....xdit_backend.protocol.devices import machine_of


class MemoryCheck:
    """What each rank of a MODEL takes of its device's memory.

    weight_bytes: of all blocks, as a rank holds them; kept as model_bytes. exchanged_bytes: of a U-Net,
    net.exchanged_bytes of its model. lighter_bytes(): {another weight_dtype: weight_bytes with it}.
    """

    def __init__(self, setup, weight_bytes, exchanged_bytes, lighter_bytes):
        self._setup, self._exchanged_bytes, self._lighter_bytes = setup, exchanged_bytes, lighter_bytes
        self.model_bytes = weight_bytes
        self.weight_bytes = self._of_ranks(weight_bytes)       # of each rank, until the workers have reported theirs
        self._checked = set()                                  # what of this run has been found to fit

    def update(self, weight_bytes):
        """The workers have loaded the model. weight_bytes: that each rank holds."""
        self.weight_bytes = weight_bytes

    def weights_on(self, device):
        """Bytes of weights that ranks on this device hold."""
        return sum(size for size, name in zip(self.weight_bytes, self._setup.devices) if name == str(device))

    def end_run(self):
        self._checked.clear()

    def of_run(self, job, layout, of_one_device):
        """Bytes that a rank takes beside weights. of_one_device: of activations where nothing is divided."""
        setup = self._setup
        degrees = degrees_of(layout, setup.config, setup.spec.stages)
        activations = of_one_device * working_share(job, degrees, branches_apart=True)
        return activations + (0.0 if setup.net is None else self._of_rank(job, degrees, setup.config).keys_values)

    def check_weights(self):
        """Refuse weights that do not fit on a device, before they are read."""
        setup = self._setup
        check_memory(f"{setup.family.title} over {len(setup.devices)} device{'s' if len(setup.devices) > 1 else ''}",
                     DeviceMemory(setup.devices, setup.device_bytes, self._added(self.weight_bytes)),
                     Hints(self._spread(Job(1, 0, 1)), self._lighter))

    def check_run(self, shape, conditioning, num_images, branches, layout):
        """Refuse a run that cannot fit, once for all its calls.

        shape: of the whole latent of a branch. conditioning: {name: tensor}. branches: of guidance, that are calls of
        their own or not.
        """
        key = tuple(shape), num_images, branches, layout
        if key in self._checked:
            return
        setup = self._setup
        degrees = degrees_of(layout, setup.config, setup.spec.stages)

        def job(images, sizes):
            return setup.job((images, shape[1], *sizes), conditioning, USUAL_JOB.steps, branches)

        def needed(images, sizes, config=setup.config):
            if setup.net is not None:
                return self._of_rank(job(images, sizes), degrees, config)
            own = -(-images // degrees.data) * -(-branches // degrees.cfg)
            dtype = getattr(torch, setup.spec.compute_dtype)
            sent = 0 if degrees.displaced == 1 else self._exchanged_bytes(sizes, degrees.displaced, dtype, own)
            return Memory(0.0, config.cached_steps * degrees.displaced * sent, 0.0)

        without = dataclasses.replace(setup.config, forecast_keys_values=0.0)
        other_settings = ({"forecast_keys_values 0": functools.partial(needed, config=without)}
                          if setup.config.cached_steps > 1 else {})
        num_here = sum(not machine_of(device) for device in setup.devices)
        sizes = tuple(shape[2:])
        check_memory(f"This run ({describe_layout(layout)})",
                     DeviceMemory(setup.devices, setup.device_bytes, self._added(self.weight_bytes), num_here,
                                  available_memory()[0]),
                     Hints(self._spread(job(num_images, sizes)), self._lighter, other_settings),
                     Latents(needed, num_images, sizes, setup.family.pixels(setup.transformer_config)[1:]))
        self._checked.add(key)

    def _of_ranks(self, weight_bytes):
        setup = self._setup
        return rank_weights(weight_bytes, setup.net, setup.spec.stages, setup.device_bytes)

    def _of_rank(self, job, degrees, config):
        return rank_memory(self._setup.net, job, degrees, memory_settings(config, self._setup.spec.stages))

    def _lighter(self):
        """{weight_dtype in which a rank holds less: what each rank then adds to the weights on its device}"""
        ranks = {name: self._of_ranks(size) for name, size in self._lighter_bytes().items()}
        return {name: self._added(sizes) for name, sizes in ranks.items() if sizes[0] < max(self.weight_bytes)}

    def _added(self, weight_bytes):
        """What each rank adds to the weights on its device. CPU ranks that hold the same weights map one file."""
        devices = self._setup.devices
        first = {ranks[0] for ranks in ranks_by_part(len(devices), self._setup.spec)}
        return [size if device != "cpu" or rank in first else 0
                for rank, (device, size) in enumerate(zip(devices, weight_bytes))]

    def _spread(self, job):
        """On how many devices the model would fit, for a person: [text]; exactly, where only exact methods are
        allowed."""
        setup = self._setup
        return spread_that_fits(setup.config, setup.net, setup.family.refused, job, min(setup.device_bytes))
