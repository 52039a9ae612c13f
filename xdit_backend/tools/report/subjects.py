"""Models with random weights and the inputs of a step, which a report checks and times."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...checkpoints.build_transformer import build_empty
from ...checkpoints.checkpoint import Checkpoint, open_checkpoint
from ...host.calls import Call
from ...models import FAMILIES
from ..bench.displaced import unet_config, write_model
from ..dry_run.example_inputs import conditioning_shapes, latent_shape
from ..dry_run.published_models import PUBLISHED

# families of the checks, with the latent's size in pixels and frames; all of them run under every
# method that their kind has
CHECKED = {"Flux.1": (160, 96, 1), "SD3": (160, 96, 1), "Qwen-Image": (160, 96, 1), "Wan": (160, 96, 9),
           "SD 1.5": (160, 256, 1)}
NORMAL = 0.02                  # standard deviation of random weights of large models
SEED = 1
SMALL_WIDTH = 32               # channels at full size of the U-Net that is checked


@dataclass(frozen=True)
class Subject:
    """A model in a diffusers folder. calls: one per branch of guidance. text: number of text tokens."""

    name: str
    checkpoint: Checkpoint
    dtype: str
    calls: list
    text: int

    @property
    def family(self):
        return self.checkpoint.family

    @property
    def num_channels(self):
        return self.family.num_channels(self.checkpoint.config)

    def spec(self, stages=None, tensor_degree=1):
        return self.checkpoint.spec(self.dtype, self.dtype, stages, tensor_degree=tensor_degree)

    def batch(self, count):
        """The calls with this many images each."""
        return [dataclasses.replace(
            call, latent=torch.cat([call.latent] * count), timestep=torch.cat([call.timestep] * count),
            conditioning={name: torch.cat([tensor] * count) for name, tensor in call.conditioning.items()})
            for call in self.calls]


def small_subject(name, folder):
    """A small model of a family of CHECKED in float32, as its class initialises it."""
    import diffusers
    family, path = FAMILIES[name], Path(folder) / "small" / name
    columns, rows, frames = CHECKED[name]
    if family.plan.is_unet:
        return unet_subject(name, SMALL_WIDTH, (columns, rows), folder)
    torch.manual_seed(SEED)
    getattr(diffusers, family.transformer).from_config(family.testing.config).save_pretrained(path / "transformer")
    return _subject(name, path, "float32", (columns, rows), frames, 2, 7)


def unet_subject(name, width, size, folder):
    """A U-Net of SD 1.5's structure in float32, with this many channels at full size. size: (columns, rows) of
    pixels."""
    file = Path(folder) / f"unet-{width}.safetensors"
    write_model(unet_config(width), file, torch.float32)
    return _subject(name, file, "float32", size, 1, 2, PUBLISHED["sd1.5"].tokens)


def cut_subject(name, published, arguments, dtype, size, folder, frames=1):
    """A published model at its width, cut by `arguments` to fewer blocks, with random weights. size: (columns, rows) of
    pixels."""
    import diffusers
    about = PUBLISHED[published]
    family, config = FAMILIES[about.family], about.config | arguments
    path = Path(folder) / "cut" / published / ("unet" if family.plan.is_unet else "transformer")
    path.mkdir(parents=True)
    with torch.device("meta"):
        getattr(diffusers, family.transformer).from_config(config).save_config(path)
    generator = torch.Generator().manual_seed(SEED)
    tensors = {key: torch.empty(tensor.shape, dtype=getattr(torch, dtype)).normal_(0, NORMAL, generator=generator)
               for key, tensor in build_empty(family, config).state_dict().items()}
    save_file(tensors, path / "diffusion_pytorch_model.safetensors")
    return _subject(name, path.parent, dtype, size, frames, about.branches, about.tokens)


def _subject(name, path, dtype, size, frames, branches, text):
    checkpoint = open_checkpoint(str(path))
    family, config, generator = checkpoint.family, checkpoint.config, torch.Generator().manual_seed(SEED)
    shape = latent_shape(family, config, size, frames)
    latent = torch.randn(shape, generator=generator)
    shapes, _ = conditioning_shapes(family, config, shape, text)

    def call():
        conditioning = {key: torch.randn(tensor_shape, generator=generator) for key, tensor_shape in shapes.items()}
        return Call(latent, torch.full((shape[0],), 0.7 * family.inputs.time_scale), conditioning)
    return Subject(name, checkpoint, dtype, [call() for _ in range(branches)], text)
