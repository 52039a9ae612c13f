"""Reference latents: pictures that a model looks at beside the one it makes. They are tokens of their own, after the
image's.

ComfyUI hands them over as a list, `ref_latents`, and says by a word, `ref_latents_method`, where their tokens stand.
The words of Family.arguments that are here read what Family.tensors made of both.
"""

import itertools

# as "index"; to the model they are pictures without noise
AT_ZERO = "index_timestep_zero"


def listed(conditioning, name):
    """The tensors of a list of ComfyUI's, as Family.tensors has them, in their order."""
    found = (conditioning.get(f"{name}.{number}") for number in itertools.count())
    return list(itertools.takewhile(lambda tensor: tensor is not None, found))


def references(conditioning):
    """The reference latents, each like the latent but for its rows and columns."""
    return listed(conditioning, "ref_latents")


def method_of(conditioning, default):
    """The word for how references are placed; what the model does by itself where a workflow says nothing."""
    return next((name.partition(".")[2] for name in conditioning if name.startswith("ref_latents_method.")), default)


def at_zero(conditioning, default):
    """Are there references, at time zero? default: as of method_of."""
    return bool(references(conditioning)) and method_of(conditioning, default) == AT_ZERO


def reference_positions(call, side, method, step=1):
    """Where the references' tokens begin: [(index, token row, token column)], as ComfyUI's models count them.

    index is the position along the axis that a picture has no other use for. side: latent pixels of a token along rows
    and columns.
    method: "index" counts `step` for each reference, "negative_index" downwards, "uxo" puts them on a diagonal after
    the image, anything else ("offset") beside each other, where they make the least square.
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
        # whose frames count from the latent's first
        is_video = reference.ndim == 5 and reference.shape[2] > 1
        found.append((0 if is_video else index, tokens(row), tokens(column)))
    return found
