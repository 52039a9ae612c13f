"""Trains a small model for comparing parallel methods, a U-Net or another transformer: python -m
xdit_backend.demo_model.small unet --out FOLDER. Models like Flux.1 and Lumina 2 are saved as diffusers folders.

Uses the demo model's autoencoder and text encoder, and trains on the images that `bench quality` prompts for. Resumes
where it was stopped. Image quality is low: training takes a quarter of an hour on one core, compared with nine hours
for the demo model.
"""

import argparse
import inspect
import json
from pathlib import Path

import torch
from safetensors import safe_open
from torchvision.utils import save_image

from ..models import FAMILIES
from . import autoencoder, export, loop, transformer
from .autoencoder import CHANNELS, SIDE
from .emoji import BACKGROUNDS, PACKAGES, on_background, read_entries, render_glyphs
from .text import UNET_WIDTH, WEIGHTS, WIDTH, arrange, load_text_encoder, unet_context
from .train import encode_all

UNET_WIDTHS, NUM_LAYERS = (32, 64, 64), 1
SHOWN = 16                     # prompts on the sample sheet


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=NEW)
    parser.add_argument("--out", type=Path, required=True,
                        help="folder for checkpoints, a sample sheet and the weights")
    parser.add_argument("--share", default="/usr/share", help=f"usr/share of the Debian packages {PACKAGES}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate's peak (default 2e-3)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    prompts, entries = prompted(read_entries(options.share))
    encoder = autoencoder.load()
    latents, rows = encode_all(encoder, render_glyphs(entries, options.share), entries, options.out / "latents.pt")
    torch.manual_seed(options.seed)
    model = NEW[options.kind]()
    setting = loop.Setting(options.out, seed=options.seed)

    def show(step, weights):
        shown = NEW[options.kind]()
        shown.load_state_dict(weights["model"])
        with torch.no_grad():
            latent = sample(shown, prompts[:SHOWN])
            save_image(encoder.decode(latent).sample.clamp(-1, 1) / 2 + 0.5, options.out / f"{options.kind}.png",
                       nrow=4)
    dataset = transformer.Dataset(latents, rows, entries, torch.ones(len(entries)))
    state = train(setting, model, dataset, options.steps, options.rate, show)
    print(f"The weights are in {write(options.kind, state, options.out)}.")


def write(kind, state, folder):
    """Write a trained model for ComfyUI's loaders and ours. Returns the file or folder."""
    if kind in ("unet", "transformer"):
        path = folder / f"{kind}.safetensors"
        export.write(path, export.unet_tensors(state, NUM_LAYERS, torch.float16) if kind == "unet"
                     else export.transformer_tensors(state))
        return path
    model = NEW[kind]()
    model.load_state_dict(state)
    model.save_pretrained(folder / kind)
    return folder / kind


def prompted(entries):
    """Return (the prompts of `bench quality`, the entries that they name)."""
    with safe_open(WEIGHTS / "xdit_demo_recogniser.safetensors", "pt") as opened:
        prompts = json.loads(opened.metadata()["prompts"])
    return prompts, [entry for entry in entries
                     if entry.weight == 1 and any(on_background(entry.name, name) in prompts for name in BACKGROUNDS)]


def new_unet():
    """An untrained U-Net like SD 1.5's with three levels, 2.0 million parameters."""
    from diffusers import UNet2DConditionModel
    levels = len(UNET_WIDTHS)
    return UNet2DConditionModel(
        sample_size=SIDE, in_channels=CHANNELS, out_channels=CHANNELS, block_out_channels=UNET_WIDTHS,
        layers_per_block=NUM_LAYERS, down_block_types=("CrossAttnDownBlock2D",) * (levels - 1) + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * (levels - 1), attention_head_dim=8,
        cross_attention_dim=UNET_WIDTH)


def new_transformer():
    """An untrained transformer like the demo model's with half its width, 2.3 million parameters."""
    from diffusers import SD3Transformer2DModel
    return SD3Transformer2DModel(
        sample_size=SIDE, patch_size=2, in_channels=CHANNELS, num_layers=4, attention_head_dim=transformer.HEAD_SIZE,
        num_attention_heads=2,
        joint_attention_dim=WIDTH, caption_projection_dim=2 * transformer.HEAD_SIZE, pooled_projection_dim=WIDTH,
        out_channels=CHANNELS, pos_embed_max_size=transformer.MAX_SIDE, qk_norm="rms_norm")


def new_flux():
    """An untrained transformer like Flux.1's with two double and four single blocks, 2.3 million parameters."""
    from diffusers import FluxTransformer2DModel
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4 * CHANNELS, num_layers=2, num_single_layers=4,
        attention_head_dim=transformer.HEAD_SIZE, num_attention_heads=2, joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH, guidance_embeds=False, axes_dims_rope=(16, 24, 24))


def new_lumina():
    """An untrained transformer like Lumina 2's, with one sequence and grouped keys, 2.4 million parameters."""
    from diffusers import Lumina2Transformer2DModel
    return Lumina2Transformer2DModel(
        sample_size=SIDE, in_channels=CHANNELS, hidden_size=144, num_layers=4, num_refiner_layers=1,
        num_attention_heads=6, num_kv_heads=2, multiple_of=16, axes_dim_rope=(8, 8, 8), axes_lens=(64, 64, 64),
        cap_feat_dim=WIDTH)


NEW = {"unet": new_unet, "transformer": new_transformer, "flux": new_flux, "lumina": new_lumina}


def predicted(model, latent, sigma, context, pooled):
    """The model's predicted velocities at noise levels [B]."""
    if hasattr(model, "down_blocks"):
        return model(latent, sigma * 1000, unet_context(context)).sample
    family = next(each for each in FAMILIES.values() if each.transformer == type(model).__name__)
    conditioning = {"context": context, "y": pooled}
    inputs = family.forward_arguments(latent, sigma * family.inputs.time_scale,
                           {name: conditioning[name] for name in conditioning if name in family.inputs.conditioning},
                           model.config)
    taken = inspect.signature(type(model).forward).parameters                  # diffusers' own, without adapt_model
    inputs = {name: value for name, value in inputs.items() if name in taken}
    return family.prediction(model(**inputs, return_dict=False)[0], latent)


def train(setting, model, dataset, steps, peak, show):
    """Train, or resume training, and return the state dict. dataset: a transformer.Dataset. show(step, weights): as
    on_save of loop.run."""
    text = load_text_encoder().requires_grad_(False)

    def loss_of(step, generator):
        noisy, sigma, wanted, captions = transformer.batch_of(generator, dataset)
        context, pooled = text(*arrange(captions), transformer.BATCH)
        return (predicted(model, noisy, sigma, context, pooled) - wanted).square().mean()
    return loop.run("small", setting, {"model": model}, loop.Recipe(steps, peak, 0.99), loss_of, show)["model"]


@torch.no_grad()
def sample(model, prompts, guidance=3.0, steps=20):
    """Generate latents for prompts by Euler's method."""
    latent = torch.randn(len(prompts), CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    context, pooled = load_text_encoder().encode([*prompts, *[""] * len(prompts)])
    sigmas = transformer.shifted_sigmas(steps)
    for sigma, following in zip(sigmas, sigmas[1:]):
        positive, negative = predicted(model, torch.cat([latent, latent]), sigma.repeat(2 * len(prompts)), context,
                                       pooled).chunk(2)
        latent = latent + (following - sigma) * (negative + guidance * (positive - negative))
    return latent


if __name__ == "__main__":
    main()
