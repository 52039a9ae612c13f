"""PipeFusion of one run: which calls of the model are synchronous, which run as patches, and their way to the workers.

With any sampler node, patches are run inside each call. The patchwise sampler submits single patches and keeps the
stages busy from call to call.
"""

import dataclasses

import torch

from ....xdit_backend.host.calls import ForwardPass
from ....xdit_backend.partition import cut_patches, num_tokens, opens_step
from ....xdit_backend.planner.descriptions import describe_layout
from ....xdit_backend.planner.planner import branches_together, choose_num_patches, describe_quality, warmup_layout
from ....xdit_backend.protocol.specs import describe_exchange
from .warmup import Staleness


class PipelineRun:
    """Patches of one run, and the conditioning whose keys and values the workers cache.

    Calls that warmup.py makes synchronous are evaluated for the full latent; the others run as patches with stale keys
    and values. With warmup_steps = 0 (cold start), a patch of the first step attends only to the patches before it.
    """

    def __init__(self, client, setup, layout, schedule, shape, requested_patches):
        config = setup.config
        self._client, self._spec, self._config, self._layout = client, setup.spec, config, layout
        self._is_for_speed = setup.has_stages_for_speed
        self._num_channels, self._patch_size = setup.num_channels, setup.family.patch_size(setup.transformer_config)
        sequence_degree = layout.ring_degree * layout.ulysses_degree
        num_patches = choose_num_patches(requested_patches, layout.pipefusion_degree, shape, self._patch_size,
                                         sequence_degree)
        self.shape = tuple(shape)
        self.patches = cut_patches(shape, self._patch_size, num_patches)
        self.dim = self.patches[0][0].dim
        # rows that the model adds to complete a token
        self._padding = (-shape[self.dim] % self._patch_size[self.dim - 2] if setup.family.inputs.latent.wraps else 0)
        self._padded = set()                                   # handles of patches padded with these rows
        self._staleness = Staleness(schedule, config.warmup_steps, is_cold=True)

    def end(self):
        """Have the workers drop their caches for this run."""
        self._client.end_run(self)

    def describe(self, synchronous_reason, drained_reason):
        """Describe the split of the run for the user. For the arguments see pipefusion_support.py."""
        text, num_patches = describe_layout(self._layout), len(self.patches)
        text += describe_exchange(self._config.exchange, self._layout)
        if synchronous_reason is not None:
            return f"{text}, every step synchronous, because this workflow uses {synchronous_reason}"
        text += f", {num_patches} patch{'es' if num_patches > 1 else ''}"
        if self._is_for_speed and num_patches > 1:
            text += f", {describe_quality(self._config)}"
        if num_patches < self._config.requested_patches:
            text += f" (the latent has too few rows for {self._config.requested_patches})"
        if drained_reason is not None and num_patches > 1:
            text += f", steps not overlapped, because this workflow uses {drained_reason}"
        return text

    def name(self, requests):
        """Set the name under which the workers know the conditioning of each request."""
        return [dataclasses.replace(request, name=self._client.name_conditioning(request.conditioning, run=self))
                for request in requests]

    def is_replicated(self, requests, sigma):
        """Whether these named requests must be evaluated for the full latent."""
        return len(self.patches) == 1 or self._staleness.is_synchronous(self._keepers(requests), sigma)

    def _keepers(self, requests):
        """{(conditioning, CFG rank)}: the ranks that cache keys and values of these requests."""
        return {(request.name, index % self._layout.cfg_degree) for index, request in enumerate(requests)}

    def predict_synchronously(self, requests, patches_follow=True):
        """Evaluate named requests for full latents. Keys and values are cached if patches of this latent follow."""
        keep = patches_follow and len(self.patches) > 1 and self._staleness.ends and self._is_of_this_run(requests)
        layout = warmup_layout(self._layout, self._spec.stages)
        if num_tokens(requests[0].latent.shape[2:], self._patch_size) < layout.ring_degree * layout.ulysses_degree:
            layout = self._layout                              # too few tokens to split: one stage after the other
        together = any(request.compares_images for request in requests)
        if together:
            layout = branches_together(layout)
        apart = self._config.warmup == "whole" and layout.cfg_degree == 1
        batches = [[request] for request in requests] if apart else [requests]
        by_image = self._config.warmup in ("auto", "micro_batches") and layout == self._layout and not together
        forward = ForwardPass(keep=keep, by_image=by_image)
        predictions = []
        for batch in batches:
            handle = self._client.submit(self._spec, layout, self._num_channels, batch, forward, run=self)
            predictions += self._client.wait([handle])[1]
        if keep:
            self._staleness.hold(self._keepers(requests))
        return predictions

    def _is_of_this_run(self, requests):
        """Whether the requests are for the run's latent; nodes may call the model for a tile or another latent."""
        return all(tuple(request.latent.shape[2:]) == self.shape[2:] for request in requests)

    def first_rows(self, requests):
        """Copy the first rows of each latent, or of its first patch. Models that wrap around pad a latent's end with
        them."""
        return [request.latent.narrow(self.dim, 0, self._padding).clone() for request in requests]

    def submit_patch(self, requests, index, first_rows):
        """Send named requests for patch `index` and return a handle for `wait`.
        first_rows: of the full latents of these requests."""
        is_last = index == len(self.patches) - 1
        if is_last:
            self._staleness.hold(self._keepers(requests))
        is_padded = is_last and self._padding > 0
        if is_padded:
            requests = [dataclasses.replace(request, latent=torch.cat([request.latent, rows], self.dim))
                        for request, rows in zip(requests, first_rows)]
        forward = ForwardPass(self.patches[index][0])
        handle = self._client.submit(self._spec, self._layout, self._num_channels, requests, forward, run=self)
        if is_padded:
            self._padded.add(handle)
        return handle

    def wait(self, handles):
        """Wait for the first of these handles and return it with its predictions."""
        handle, predictions = self._client.wait(handles)
        if handle in self._padded:
            self._padded.remove(handle)
            predictions = [part.narrow(self.dim, 0, part.shape[self.dim] - self._padding) for part in predictions]
        return handle, predictions

    def predict(self, requests, sigma, synchronous_reason=None):
        """Evaluate requests for full latents, synchronously or patch by patch. The stages are empty on return."""
        requests = self.name(requests)
        # may not use or update the run's keys and values
        apart = synchronous_reason is not None or any(request.is_changed for request in requests)
        if apart or not self._is_of_this_run(requests) or self.is_replicated(requests, sigma):
            return self.predict_synchronously(requests, patches_follow=not apart)
        first_rows = self.first_rows(requests)
        handles = [self.submit_patch([self._rows_of(request, patch, rows) for request in requests], index, first_rows)
                   for index, (patch, rows) in enumerate(self.patches)]
        outputs = {}
        while len(outputs) < len(handles):
            handle, predictions = self.wait([handle for handle in handles if handle not in outputs])
            outputs[handle] = predictions
        return [torch.cat([outputs[handle][index] for handle in handles], self.dim) for index in range(len(requests))]

    def _rows_of(self, request, patch, rows):
        """Cut a request for a full latent to one patch."""
        size = self._patch_size[self.dim - 2]
        num_rows = -(-self.shape[self.dim] // size)            # rows of tokens

        def cut(added_BTC):
            a_row = added_BTC.shape[1] // num_rows
            return added_BTC.narrow(1, patch.start // size * a_row, -(-rows // size) * a_row)
        return dataclasses.replace(request, latent=request.latent.narrow(self.dim, patch.start, rows),
                                   control=request.control_by(cut), parts=request.parts if opens_step(patch) else {})
