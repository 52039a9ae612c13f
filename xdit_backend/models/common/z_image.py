"""Shared code of Z-Image and Z-Image-Omni: recognition of files, time embedding, rotations of positions, and padding
to full groups of tokens."""

import torch

from .inputs import Unpacked, compute_dtype_of, has
from .rope_scaling import complex_rotations

LATENT, GROUP = Unpacked((2, 2)), 32
EMBEDDER = "siglip_embedder.1.weight"      # of files that take reference images too


def is_z_image(shapes):
    return has("cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight", "x_pad_token")(
        shapes) and not has("dec_net.")(shapes)


def embed_times(model, config):
    """For Family.adapt_model: embed timesteps at the width that the file has, and in the compute dtype."""
    dtype, embedder = compute_dtype_of(model), model.t_embedder
    if config.get("_time_width") not in (None, model.t_embedder.mlp[0].out_features):
        first, activation, last = model.t_embedder.mlp
        model.t_embedder.mlp = torch.nn.Sequential(torch.nn.Linear(first.in_features, config["_time_width"]),
                                                   activation,
                                                   torch.nn.Linear(config["_time_width"], last.out_features))
    # in the compute dtype: diffusers rounds to the dtype that the weights are stored in
    embedder.forward = lambda time: embedder.mlp(
        embedder.timestep_embedding(time, embedder.frequency_embedding_size).to(dtype()))


def rotations_of(model):
    """Return a function from positions (T, 3) to their rotations. It also takes scaled positions, which the class's
    tables lack."""
    of_tables, axes, theta = model.rope_embedder, model.rope_embedder.axes_dims, model.rope_embedder.theta
    return lambda ids: (complex_rotations(ids, axes, theta).to(torch.complex64) if ids.is_floating_point()
                        else of_tables(ids))


def padded(num_tokens):
    """Round up to full groups, at least one: ComfyUI's model makes a group of padding from an empty text."""
    return -(-num_tokens // GROUP) * GROUP or GROUP


def first_row(call):
    """First token row of the latent or the patch."""
    return 0 if call.patch is None else call.patch.start // 2


def num_pads(call):
    """Number of tokens that pad the full image's to a multiple of GROUP."""
    rows = call.latent.shape[2] if call.patch is None else call.patch.whole
    return -LATENT.num_tokens((1, 1, rows, call.latent.shape[3])) % GROUP
