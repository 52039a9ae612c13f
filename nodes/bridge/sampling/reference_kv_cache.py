"""Flux KV Cache: of a run's first call with references the workers keep their keys and values, which later calls attend
to in the place of the pictures. Here is which images of which call take what is kept of which. Used by remote_model.py.

As ComfyUI's, what is kept is one for all calls of a run, of either prompt: images of a call are counted through.
"""

import dataclasses
import itertools
import uuid

import torch

from ....xdit_backend.protocol.errors import UnsupportedError
from ....xdit_backend.protocol.specs import CachedReferences
from ..compatibility.block_patches import keeps_references

METHOD = "ref_latents_method"


def default_method(dims):
    """How ComfyUI's module places references where a workflow does not say; None where it has no such setting."""
    return getattr(getattr(dims, "params", None), "default_ref_method", None)


def with_default_method(extra, dims, made):
    """A call's conditioning, with how references are placed where the workflow does not say, and a node has changed
    that in ComfyUI's module. made: as the module was made."""
    method = default_method(dims)
    return extra if method == made or extra.get("ref_latents") is None else {METHOD: method} | extra


class RunReferences:
    """What is kept of the references of one run."""

    def __init__(self):
        self._rows, self._places, self._placement = (), None, None

    def used_by(self, call, setup, transformer_options):
        """The call, with what it does with the keys and values of references: it fills what is kept, or takes them."""
        images = {name: tensor for name, tensor in call.conditioning.items() if name.startswith("ref_latents")}
        if not keeps_references(setup.family, transformer_options) or not any(map(_is_image, images)):
            return call
        if transformer_options.get("sample_sigmas") is None:
            raise UnsupportedError("Use a sampler node, or remove Flux KV Cache: a node calls this MODEL outside of a "
                                   "run, and what Flux KV Cache keeps is a run's.")
        places = _places(call, setup)
        if not self._rows:
            name = f"references-{uuid.uuid4().hex}"
            self._rows, self._places = tuple((name, image) for image in range(len(call.latent))), places
            return dataclasses.replace(call, cached=CachedReferences(self._rows, fills=True))
        if not torch.equal(places, self._places):
            raise UnsupportedError("Give both prompts reference pictures of the same sizes, and texts of the same "
                                   "length, or remove Flux KV Cache: it keeps those of a run's first call for all, and "
                                   "those of this call are at other places.")
        rows = tuple(itertools.islice(itertools.cycle(self._rows), len(call.latent)))
        others = {name: tensor for name, tensor in call.conditioning.items() if name not in images}
        return dataclasses.replace(call, conditioning=others, left_out=images,
                                   cached=CachedReferences(rows, fills=False))

    def check_placement(self, calls, layout):
        """Refuse calls whose images are on other ranks than what is kept of theirs."""
        cached = [call.cached for call in calls if call.cached is not None]
        if cached and layout.displaced_degree > 1:
            raise UnsupportedError("Set displaced_degree to 1, with ulysses_degree, ring_degree, tensor_degree, "
                                   "cfg_degree or data_degree instead, or remove Flux KV Cache: displaced patches "
                                   "keep keys and values of their own.")
        rows = tuple(row for each in cached for row in each.rows)
        if not rows:
            return
        now = rows, len(calls), layout
        if any(each.fills for each in cached):
            self._placement = now
        elif now != self._placement and max(layout.cfg_degree, layout.data_degree, self._placement[2].cfg_degree,
                                         self._placement[2].data_degree) > 1:
            raise UnsupportedError("Set cfg_degree and data_degree to 1, or remove Flux KV Cache: the calls of this "
                                   "run have unlike numbers of images, of which some need what other devices keep.")


def num_cached(calls, family):
    """How many tokens of each image have keys and values that are kept."""
    return (family.lengths[family.plan.cached_references](calls[0].given)
            if any(call.cached is not None for call in calls) else 0)


def _is_image(name):
    return name.startswith("ref_latents.")


def _places(call, setup):
    """(T, axes): where the references' tokens are, which turns their keys."""
    family = setup.family
    places = family.argument("img_ids", call.latent, call.timestep, call.conditioning, setup.transformer_config)
    return places[-family.lengths[family.plan.cached_references](call.conditioning):]
