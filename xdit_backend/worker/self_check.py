"""Self-check of a ComfyUI model class, run once per worker before the first model of the class is loaded: a split model
must compute the same as an unsplit one.

A small random model of the class is split in two, by blocks and by rows, within this process. A new kind of tokens, an
operation that moved between blocks, or a changed order of tokens shows as a difference.
"""

import contextlib

import torch

from ..checkpoints.build_transformer import build_empty
from ..comfyui.class_checks import moved
from ..distributed.collectives import Traffic
from ..distributed.mesh import AXES, Mesh
from ..hooks.forward_context import ForwardContext, rows_of, tokens_of
from ..hooks.transformer import Hooks
from ..parallel.stale_kv_cache import KeyValues
from ..partition import cut_patches
from ..protocol.errors import UnsupportedError

TOLERANCE = 1e-3                           # relative, for sums in float32 in another order; real errors exceed 0.01
SIZE, FRAMES, LENGTH, TEXT = (8, 6), 4, 33, 5  # of the latent; length of an audio latent; number of text tokens
STAGES = Mesh(dict.fromkeys(AXES, 1) | {"pipefusion": 2}, dict.fromkeys(AXES, 0))


def check_split(family):
    """Compare the family's small model with itself in two stages, on the full latent and, if the family supports
    PipeFusion, on two patches. Raises CheckpointError, with ComfyUI's version, if they differ or the class fails."""
    with torch.no_grad(), torch.device("cpu"):
        try:
            error = _largest_error(family)
        except (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError, AssertionError,
                UnsupportedError) as failure:
            raise moved(family, f"fails when it is split in two ({type(failure).__name__}: {failure})") from failure
    if not error <= TOLERANCE:
        raise moved(family, f"gives another result when it is split in two (relative error {error:.2g})")


def _largest_error(family):
    generator, config = torch.Generator().manual_seed(1), family.testing.config
    model = build_empty(family, config).eval()
    family.testing.thin(model)
    model.load_state_dict({name: torch.randn(parameter.shape, generator=generator)
                           * (0.3 if parameter.ndim != 2 else parameter.shape[1] ** -0.5)
                           for name, parameter in model.named_parameters()}, strict=False, assign=True)
    scale = max(1, family.inputs.latent.patch[-1] // 2)               # models of pixels have larger tokens
    sides = tuple(scale * length for length in SIZE)
    size = {1: (LENGTH,), 2: sides, 3: (FRAMES, *sides)}[len(family.inputs.latent.patch)]
    size = size if family.testing.rows is None else (family.testing.rows, LENGTH)
    latent = torch.randn(1, family.taken_channels(config), *size, generator=generator)
    conditioning = {name: torch.randint(3, shape, generator=generator) if name.endswith(("_idx", "_ids"))
                    else torch.randn(shape, generator=generator)
                    for name, shape in conditioning_shapes(family, config, latent.shape, TEXT).items()}
    if family.inputs.components.names:
        conditioning |= {name: torch.randn(shape, generator=generator)
                         for name, shape in family.inputs.components.shapes(config, latent.shape).items()}
    timestep = torch.full((1,), 0.7 * family.inputs.time_scale)
    output = model(**family.forward_arguments(latent, timestep, conditioning, config))[0]
    expected = family.prediction(output, latent)
    hooks, key_values = Hooks(model, family.plan), KeyValues()

    def predict(latent, patch=None):
        message = None
        for blocks in (range(hooks.num_blocks // 2), range(hooks.num_blocks // 2, hooks.num_blocks)):
            context = ForwardContext(
                family.forward_arguments(latent, timestep, conditioning, config, patch), STAGES, Traffic(), blocks,
                hooks.num_blocks, tokens_of(family, STAGES, latent.shape, conditioning, patch), patch,
                None if patch is None else rows_of(family, latent.shape, patch), key_values=key_values,
                cached_blocks=range(hooks.num_blocks), step=(0.7,))
            context.receive_message = lambda sent=message: sent
            output, message = hooks.run(context)
        return family.prediction(output, latent)

    found = [predict(latent)]
    if "pipefusion" not in family.refused:
        patches = cut_patches(latent.shape, family.inputs.latent.patch, 2)
        dim = patches[0][0].dim
        found.append(torch.cat([predict(latent.narrow(dim, patch.start, rows), patch) for patch, rows in patches], dim))
    return max(((each - expected).norm() / expected.norm()).item() for each in found)


def conditioning_shapes(family, config, shape, num_tokens):
    """{conditioning: shape} of all inputs of the family's model for a latent of this shape, with one reference."""
    found = {}
    for name, width in family.inputs.conditioning.items():
        with contextlib.suppress(KeyError):
            found[name] = family.testing.input_shapes[name](config, shape, num_tokens)
        if name == "context":
            found[name] = (shape[0], num_tokens, config[width])
        elif name == "ref_latents":
            found["ref_latents.0"] = (shape[0], shape[1], *shape[2:-2], 4, 6)
        elif name not in found and width is not None and config.get(width) is not None:
            found[name] = (shape[0], num_tokens, config[width])
    return found
