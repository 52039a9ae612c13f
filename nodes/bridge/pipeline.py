"""PipeFusion of one run: which calls of the model run whole and which as patches, and how they reach the workers.

A RemoteModel makes one for each run of a model that is spread over stages. Any sampler node gets its patches run inside
each call; the patchwise sampler hands in single patches and keeps the stages full from call to call.
"""

import dataclasses
import math

import torch

from ...xdit_backend.partition import cut_patches
from ...xdit_backend.planner import choose_num_patches, describe_layout, warmup_layout
from .groups import show_text

# what makes a prediction depend on where its latent lies in the whole, so that patches would be wrong
CONDITIONING = {"area": "an area for a prompt", "mask": "a mask for a prompt", "gligen": "GLIGEN", "hooks": "hooks on a prompt"}
WHOLE = "xdit_whole"                      # in transformer_options: why every call of this run must be whole
OPTIONS = {"model_function_wrapper": "a node that wraps the model's function", "context_handler": "context windows"}


def why_whole(conds, model_options):
    """What in this workflow cannot be cut into patches, in a person's words; None if nothing."""
    if WHOLE in model_options.get("transformer_options", {}):
        return model_options["transformer_options"][WHOLE]
    for entry in (entry for cond in conds if cond for entry in cond):
        for key, text in CONDITIONING.items():
            if entry.get(key) is not None:
                return text
    return next((text for key, text in OPTIONS.items() if model_options.get(key) is not None), None)


class PipelineRun:
    """The patches of one run, and the conditioning whose keys and values the workers hold.

    A call of the model is whole (synchronous) while its sigma is above sigmas[warmup_steps], and when the workers hold no
    keys and values for its conditioning yet; the rest run as patches with stale keys and values. warmup_steps = 0 is a
    cold start: in the first step, patches see the patches before them only. whole_because: why every call is whole, in a
    person's words.
    """

    def __init__(self, client, spec, family, transformer_config, config, layout, schedule, shape, whole_because=None):
        self._client, self._spec, self._config, self._layout = client, spec, config, layout
        self._num_channels = family.num_channels(transformer_config)
        patch_size = family.patch_size(transformer_config)
        sequence_degree = layout.ring_degree * layout.ulysses_degree
        num_patches = choose_num_patches(config.num_patches, layout.pipefusion_degree, shape, patch_size, sequence_degree)
        self.shape = tuple(shape)
        self.patches = cut_patches(shape, patch_size, num_patches)
        self.dim = self.patches[0][0].dim
        sigmas = schedule.tolist()
        self._warm_sigma = sigmas[config.warmup_steps] if config.warmup_steps < len(sigmas) - 1 else -math.inf
        self._cold_sigma = sigmas[1] if config.warmup_steps == 0 and len(sigmas) > 1 else None
        self._filled = set()
        self.whole_because = whole_because
        client.end_run()
        text = f"running on {', '.join(client.devices)}: {describe_layout(layout)}, "
        if whole_because is not None:
            text += f"every step whole, because this workflow uses {whole_because}"
        elif num_patches < config.num_patches:
            text += f"{num_patches} patches (the latent has too few rows for {config.num_patches})"
        else:
            text += f"{num_patches} patches"
        show_text(text)

    def name(self, requests):
        """Give the requests' conditioning the name that the workers know it by."""
        return [dataclasses.replace(request, name=self._client.name_conditioning(request.conditioning)) for request in requests]

    def is_whole(self, requests, sigma):
        """Must these named requests be evaluated for the whole latent?"""
        if len(self.patches) == 1 or self.whole_because is not None or sigma > self._warm_sigma:
            return True
        if self._cold_sigma is not None and sigma > self._cold_sigma:
            return False
        return any(request.name not in self._filled for request in requests)

    def predict_whole(self, requests):
        """Evaluate named requests for whole latents; keys and values are kept where patches of this latent follow."""
        keep = (len(self.patches) > 1 and self.whole_because is None and self._warm_sigma > -math.inf
                and self._is_of_this_run(requests))
        layout = warmup_layout(self._layout, self._spec.stages)
        batches = [[request] for request in requests] if self._config.warmup == "whole" else [requests]
        predictions = []
        for batch in batches:
            ticket = self._client.submit(self._spec, layout, self._num_channels, batch, keep=keep,
                                         by_image=self._config.warmup in ("auto", "micro_batches") and layout == self._layout)
            predictions += self._client.wait([ticket])[1]
        if keep:
            self._filled |= {request.name for request in requests}
        return predictions

    def _is_of_this_run(self, requests):
        """Nodes may call the model for a piece of the latent, or for another one."""
        return all(tuple(request.latent.shape[2:]) == self.shape[2:] for request in requests)

    def submit_patch(self, requests, index):
        """Send named requests for patch `index`; returns a ticket for `wait`."""
        if index == len(self.patches) - 1:
            self._filled |= {request.name for request in requests}
        return self._client.submit(self._spec, self._layout, self._num_channels, requests, patch=self.patches[index][0])

    def wait(self, tickets):
        """The first of these tickets to be ready, and its predictions."""
        return self._client.wait(tickets)

    def predict(self, requests, sigma):
        """Evaluate requests for whole latents, whole or patch by patch; the stages run empty at the end."""
        requests = self.name(requests)
        if not self._is_of_this_run(requests) or self.is_whole(requests, sigma):
            return self.predict_whole(requests)
        tickets = [self.submit_patch([dataclasses.replace(request, latent=request.latent.narrow(self.dim, patch.start, rows))
                                      for request in requests], index)
                   for index, (patch, rows) in enumerate(self.patches)]
        pieces = {}
        while len(pieces) < len(tickets):
            ticket, predictions = self.wait([ticket for ticket in tickets if ticket not in pieces])
            pieces[ticket] = predictions
        return [torch.cat([pieces[ticket][index] for ticket in tickets], self.dim) for index in range(len(requests))]
