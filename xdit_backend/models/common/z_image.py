"""What Z-Image and Z-Image-Omni have in common: how their files are told, how times are embedded, rotations of places,
padding to whole groups of tokens."""

import torch

from .inputs import Unpacked, has, type_of_arithmetic
from .rope_scaling import complex_rotations

LATENT, GROUP = Unpacked((2, 2)), 32
EMBEDDER = "siglip_embedder.1.weight"      # of files that take pictures as well


def is_z_image(shapes):
    return has("cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight", "x_pad_token")(
        shapes) and not has("dec_net.")(shapes)


def embed_times(model, config):
    """For Family.amend: times are embedded as wide as the file has it, and in the type of the arithmetic."""
    dtype, embedder = type_of_arithmetic(model), model.t_embedder
    if config.get("_time_width") not in (None, model.t_embedder.mlp[0].out_features):
        first, activation, last = model.t_embedder.mlp
        model.t_embedder.mlp = torch.nn.Sequential(torch.nn.Linear(first.in_features, config["_time_width"]),
                                                   activation,
                                                   torch.nn.Linear(config["_time_width"], last.out_features))
    # of the type of the arithmetic: diffusers rounds to that which weights are held in
    embedder.forward = lambda time: embedder.mlp(
        embedder.timestep_embedding(time, embedder.frequency_embedding_size).to(dtype()))


def rotations_of(model):
    """(places (T, 3)) -> their rotations, also of moved ones, which the class's tables have not."""
    of_tables, axes, theta = model.rope_embedder, model.rope_embedder.axes_dims, model.rope_embedder.theta
    return lambda ids: (complex_rotations(ids, axes, theta).to(torch.complex64) if ids.is_floating_point()
                        else of_tables(ids))


def padded(num_tokens):
    """To whole groups, at least one: of a text that is not there, ComfyUI's model makes one of padding."""
    return -(-num_tokens // GROUP) * GROUP or GROUP


def first_row(call):
    """Of the latent's or the patch's tokens."""
    return 0 if call.patch is None else call.patch.start // 2


def num_pads(call):
    """Tokens that make the whole picture's a multiple of GROUP."""
    rows = call.latent.shape[2] if call.patch is None else call.patch.whole
    return -LATENT.num_tokens((1, 1, rows, call.latent.shape[3])) % GROUP
