"""Flux KV Cache: keys and values of the reference images, cached on the workers in a run's first call for later calls.

As in ComfyUI, the calls of a run share one cache, whichever prompt they are for: a call's images index it in order.
"""

import dataclasses
import itertools
import uuid

import torch

from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.specs import CachedReferences
from ..compatibility.block_patches import caches_references

METHOD = "ref_latents_method"


def default_method(dims):
    """Position method for references in ComfyUI's module if a workflow sets none; None if the module has no such
    setting."""
    return getattr(getattr(dims, "params", None), "default_ref_method", None)


def with_default_method(extra, dims, made):
    """Return a call's conditioning with the module's position method for references if the workflow sets none and a
    node has changed the module's. made: the method when the module was created."""
    method = default_method(dims)
    return extra if method == made or extra.get("ref_latents") is None else {METHOD: method} | extra


class RunReferences:
    """Cache of the references of one run."""

    def __init__(self):
        self._rows, self._positions, self._placement = (), None, None

    def used_by(self, call, setup, transformer_options):
        """Return the call with its use of the cached keys and values: it fills the cache or reads it."""
        images = {name: tensor for name, tensor in call.conditioning.items() if name.startswith("ref_latents")}
        if not caches_references(setup.family, transformer_options) or not any(map(_is_image, images)):
            return call
        if transformer_options.get("sample_sigmas") is None:
            raise UnsupportedError("Use a sampler node, or remove Flux KV Cache: a node calls this MODEL outside a "
                                   "run, and Flux KV Cache caches for the length of a run.")
        positions = _positions(call, setup)
        if not self._rows:
            name = f"references-{uuid.uuid4().hex}"
            self._rows, self._positions = tuple((name, image) for image in range(len(call.latent))), positions
            return dataclasses.replace(call, cached=CachedReferences(self._rows, fills=True))
        if not torch.equal(positions, self._positions):
            raise UnsupportedError("Use reference images of the same sizes and texts of the same length for both "
                                   "prompts, or remove Flux KV Cache: it caches the references of a run's first call "
                                   "for all calls, and those of this call are at other positions.")
        rows = tuple(itertools.islice(itertools.cycle(self._rows), len(call.latent)))
        others = {name: tensor for name, tensor in call.conditioning.items() if name not in images}
        return dataclasses.replace(call, conditioning=others, left_out=images,
                                   cached=CachedReferences(rows, fills=False))

    def check_placement(self, calls, layout):
        """Raise UnsupportedError if a call's images are on other ranks than their cached references."""
        cached = [call.cached for call in calls if call.cached is not None]
        if cached and layout.displaced_degree > 1:
            raise UnsupportedError("Set displaced_degree to 1, with ulysses_degree, ring_degree, tensor_degree, "
                                   "cfg_degree or data_degree instead, or remove Flux KV Cache: displaced patches "
                                   "cache keys and values themselves.")
        rows = tuple(row for each in cached for row in each.rows)
        if not rows:
            return
        now = rows, len(calls), layout
        if any(each.fills for each in cached):
            self._placement = now
        elif now != self._placement and max(layout.cfg_degree, layout.data_degree, self._placement[2].cfg_degree,
                                         self._placement[2].data_degree) > 1:
            raise UnsupportedError("Set cfg_degree and data_degree to 1, or remove Flux KV Cache: the calls of this "
                                   "run have different numbers of images, and some need keys and values that other "
                                   "devices cache.")


def num_cached(calls, family):
    """Number of tokens of each image with cached keys and values."""
    return (family.inputs.lengths[family.plan.cached_references](calls[0].given)
            if any(call.cached is not None for call in calls) else 0)


def _is_image(name):
    return name.startswith("ref_latents.")


def _positions(call, setup):
    """(T, axes): position ids of the references' tokens, by which RoPE rotates their keys."""
    family = setup.family
    positions = family.argument("img_ids", call.latent, call.timestep, call.conditioning, setup.transformer_config)
    return positions[-family.inputs.lengths[family.plan.cached_references](call.conditioning):]
