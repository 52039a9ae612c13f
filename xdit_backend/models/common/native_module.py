"""Rules for families whose transformer is ComfyUI's own class: it receives ComfyUI's arguments unchanged, and its
tensors have the names that files have."""

from .inputs import from_conditioning
from .reference_latents import references


def same_names(tensors, config):
    """For Detection.convert: files already have the module's names."""
    return tensors


def native_arguments(latent, *conditioning, times="timestep", **others):
    """Arguments of the forward of ComfyUI's class: the latent, the timestep, and conditioning by the same names.
    times: the forward's name for the timestep."""
    return {"x": latent, times: lambda call: call.timestep, **{name: from_conditioning(name) for name in conditioning},
            **others}


def number(name):
    """A conditioning in Inputs.counts as a number."""
    return lambda call: None if name not in call.conditioning else call.conditioning[name].shape[0]


def batched_references(call):
    """Reference latents, each expanded to the batch size; None without any."""
    found = [latent.expand(len(call.latent), *latent.shape[1:]) for latent in references(call.conditioning)]
    return found or None


def num_reference_tokens(latent):
    """Entry of Inputs.lengths for reference latents that are cut into tokens like the latent."""
    return lambda conditioning: sum(latent.num_tokens(each.shape) for each in references(conditioning))


def full_sizes(rows, args, kwargs):
    """For position_slicing.Cut: the call's arguments for the full latent, if the first three are its frames, rows
    and columns."""
    sizes = list(args[:3])
    sizes[rows.axis] = rows.whole_rows
    return [*sizes, *args[3:]], kwargs
