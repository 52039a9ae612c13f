"""Words for families whose transformer is ComfyUI's own module: what ComfyUI hands to its model goes to it as it is,
under the names that files have."""

from .inputs import from_conditioning
from .reference_latents import references


def same_names(tensors, config):
    """The rule of Family.convert: files of ComfyUI have the module's names."""
    return tensors


def handed_on(latent, *conditioning, times="timestep", **others):
    """Arguments of the forward, ComfyUI's: the latent, the time, and conditioning under its names. times: what the
    forward calls the time."""
    return {"x": latent, times: lambda call: call.timestep, **{name: from_conditioning(name) for name in conditioning},
            **others}


def number(name):
    """A conditioning that is one of Family.counts, as a number again."""
    return lambda call: None if name not in call.conditioning else call.conditioning[name].shape[0]


def whole_references(call):
    """Reference latents, one of each for each image; None where there are none."""
    found = [latent.expand(len(call.latent), *latent.shape[1:]) for latent in references(call.conditioning)]
    return found or None


def num_reference_tokens(latent):
    """For Family.lengths, of reference latents that are cut into tokens as the latent is."""
    return lambda conditioning: sum(latent.num_tokens(each.shape) for each in references(conditioning))


def whole_sizes(rows, args, kwargs):
    """For position_slicing.Cut: the call's arguments for the whole latent, where the first are its frames, rows and
    columns."""
    sizes = list(args[:3])
    sizes[rows.axis] = rows.whole_rows
    return [*sizes, *args[3:]], kwargs
