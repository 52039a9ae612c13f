"""Reference latents: images that a model attends to, as tokens of their own after the generated image's.

ComfyUI passes them as a list, `ref_latents`, and the position of their tokens as a string, `ref_latents_method`. These
functions read what Family.tensors makes of both.
"""

import itertools

# as "index", with references at timestep zero (no noise)
AT_ZERO = "index_timestep_zero"


def listed(conditioning, name):
    """The tensors of a list in ComfyUI's conditioning, which Family.tensors has flattened, in order."""
    found = (conditioning.get(f"{name}.{number}") for number in itertools.count())
    return list(itertools.takewhile(lambda tensor: tensor is not None, found))


def references(conditioning):
    """The reference latents: shaped like the latent except for rows and columns."""
    return listed(conditioning, "ref_latents")


def method_of(conditioning, default):
    """The workflow's position method for references, or `default`, the model's own."""
    return next((name.partition(".")[2] for name in conditioning if name.startswith("ref_latents_method.")), default)


def at_zero(conditioning, default):
    """Whether there are references at timestep zero. default: as in method_of."""
    return bool(references(conditioning)) and method_of(conditioning, default) == AT_ZERO


def reference_positions(call, side, method, step=1):
    """Position at which each reference's tokens begin: [(index, token row, token column), ...], as ComfyUI's models
    compute them.

    index is the position along the axis that an image does not use otherwise. side: latent pixels of a token along rows
    and columns.

    method: "index" counts upwards by `step` for each reference, "negative_index" downwards; "uxo" places references on
    a diagonal after the image; anything else ("offset") places them next to each other so that they cover the smallest
    square.
    """
    tokens = lambda length: (length + side // 2) // side  # noqa: E731
    by_rows = call.patch is not None and call.patch.dim == call.latent.ndim - 2
    rows, columns = call.patch.whole if by_rows else call.latent.shape[-2], call.latent.shape[-1]
    found, height, width = [], 0, 0
    for number, reference in enumerate(references(call.conditioning), 1):
        index, row, column = 1, 0, 0
        if method in ("index", "negative_index", AT_ZERO):
            index = number * step * (-1 if method == "negative_index" else 1)
        elif method == "uxo":
            index, row, column = 0, tokens(rows) * side + height, tokens(columns) * side + width
            height, width = height + reference.shape[-2], width + reference.shape[-1]
        else:
            if reference.shape[-2] + height > reference.shape[-1] + width:
                column = width
            else:
                row = height
            height, width = max(height, reference.shape[-2] + row), max(width, reference.shape[-1] + column)
        # the frames of a video count from the latent's first
        is_video = reference.ndim == 5 and reference.shape[2] > 1
        found.append((0 if is_video else index, tokens(row), tokens(column)))
    return found
