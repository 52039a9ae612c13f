"""Measure how stale keys and values change images: PipeFusion and displaced patches against one device, on the trained
demo model.

The same prompts and seeds are sampled by one worker, by a pipeline of two and by displaced patches under each setting,
and by naive patches, which never see each other. Prints a Markdown table and writes a contact sheet. A U-Net (--model)
has no pipeline.
"""

import dataclasses
import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ...checkpoints.build_vae import load_autoencoder
from ...checkpoints.checkpoint import open_checkpoint
from ...demo_model.autoencoder import CHANNELS, SIDE
from ...demo_model.features import Recogniser
from ...demo_model.text import WEIGHTS, load_text_encoder, unet_context
from ...demo_model.transformer import shifted_sigmas
from ...host.calls import Call
from ...partition import cut_bands, cut_patches
from ...protocol.errors import ConfigError
from ...protocol.specs import EXCHANGES, MODES, Layout, Stages
from .sampler import SAMPLERS, Method, Model, Sampling, sample
from .worker_groups import count_cuda, start_clients

DEMO = WEIGHTS / "diffusion_models" / "xdit_demo.safetensors"
ONE = "one device"
NUM_SHOWN = 8                              # prompts on the contact sheet


def add_arguments(parser):
    parser.add_argument("--model", type=Path, default=DEMO, metavar="FILE",
                        help="the demo model, or one trained by python -m xdit_backend.demo_model.small")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: CUDA if available")
    parser.add_argument("--threads", type=int, default=1, help="threads of a CPU worker")
    parser.add_argument("--prompts", type=int, default=256, help="how many of the 256 prompts to use")
    parser.add_argument("--batch", type=int, default=16, help="prompts sampled at once")
    parser.add_argument("--steps", type=int, default=20, help="sampling steps")
    parser.add_argument("--sampler", choices=SAMPLERS, default="euler", help="sampler")
    parser.add_argument("--guidance", type=float, default=3.0, help="scale of classifier-free guidance")
    parser.add_argument("--patches", type=int, nargs="*", default=(2, 4, 8), help="num_patches to try")
    parser.add_argument("--displaced", type=int, nargs="*", default=(2, 4, 8),
                        help="displaced_degree to try, each with as many workers")
    parser.add_argument("--displaced-modes", choices=tuple(MODES), nargs="+", default=tuple(MODES)[:1], metavar="NAME",
                        help="displaced_mode to try: " + ", ".join(MODES))
    parser.add_argument("--warmup-steps", type=int, nargs="+", default=(0, 1, 2, 3, 4), help="warmup_steps to try")
    parser.add_argument("--forecast", dest="extrapolation", type=float, nargs="+", default=(0.0,),
                        help="forecast_keys_values (extrapolation of stale keys and values) to try")
    parser.add_argument("--exchange", choices=EXCHANGES[1:], nargs="*", default=(), metavar="FORM",
                        help="communication dtypes to try, with Ulysses 2 and Ring 2: "
                             + ", ".join(EXCHANGES[1:]))
    parser.add_argument("--sheet", type=Path, default=Path("quality.png"), help="file of the contact sheet")


def main(options):
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    recogniser, labels, prompts, data = load_recogniser()
    if not NUM_SHOWN <= options.prompts <= len(prompts):
        raise ConfigError(f"Use --prompts from {NUM_SHOWN} to {len(prompts)}: it is {options.prompts}.")
    prompts, labels = prompts[:options.prompts], labels[:options.prompts]
    tried = settings(options)
    images = draw_all(tried, prompts, open_checkpoint(str(options.model)).family, options)
    rows = {name: compare(image, images[ONE], tried[name].num_patches, recogniser, labels)
            for name, image in images.items()}
    print_table(rows, recogniser, images, data, options)
    write_sheet(options.sheet, images, prompts[:NUM_SHOWN])
    print(f"\nContact sheet: {options.sheet}")


def load_recogniser():
    """(the network, labels [256] of the prompts, the prompts, (mean, covariance) of the data's features)."""
    file = WEIGHTS / "xdit_demo_recogniser.safetensors"
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    with safe_open(file, "pt") as opened:
        prompts = json.loads(opened.metadata()["prompts"])
    data = (tensors.pop("data.mean"), tensors.pop("data.covariance"))
    labels = tensors.pop("labels").long()
    recogniser = Recogniser(len(tensors["names.bias"]))
    recogniser.load_state_dict(tensors)
    return recogniser, labels, prompts, data


@dataclass(frozen=True)
class Setting:
    """A sampling method: run(client with this many workers, call, sigmas) -> latent. num_patches: whose borders may be
    visible."""

    num_workers: int
    run: object
    num_patches: int = 1


def settings(options):
    """{name: Setting} of everything to compare, one device first."""
    header = open_checkpoint(str(options.model))
    family = header.family
    dtypes = ("float32", "float32")
    one_spec = header.spec(*dtypes)
    staged = header.spec(*dtypes, Stages(2, 1)) if family.blocks else None
    shape = (1, CHANNELS, SIDE, SIDE)

    def run(spec, method):
        def run(client, call, sigmas):
            sampling = Sampling(sigmas, options.guidance, SAMPLERS[options.sampler])
            latent = sample(client, Model(spec, CHANNELS, family.inputs.time_scale), call, sampling, method)
            client.end_run()
            return latent
        return run

    one = run(one_spec, Method(Layout()))
    found = {ONE: Setting(1, one)}
    for num_patches, warmup_steps, extrapolation in itertools.product(
        options.patches if staged else (), options.warmup_steps, options.extrapolation):
        name = f"M={num_patches}, W={warmup_steps}" + (f", extrapolation {extrapolation:g}" if extrapolation else "")
        method = Method(Layout(pipefusion_degree=2), warmup_steps, cut_patches(shape, (2, 2), num_patches),
                        extrapolation)
        found[name] = Setting(2, run(staged, method), num_patches)
    num_heads = family.num_heads(header.config)
    if options.exchange and num_heads and num_heads % 2:
        raise ConfigError(f"Leave out --exchange, or name a model with an even number of heads: it is also tried with "
                          f"Ulysses 2, which cannot split the {num_heads} attention heads of "
                          f"{options.model.name}.")
    for axis, exchange in itertools.product(("ulysses", "ring") if staged else (), options.exchange):
        found[f"{axis.title()} 2, {exchange}"] = Setting(2, exchanging(
            run(one_spec, Method(Layout(**{f"{axis}_degree": 2}))), exchange))
    for degree, warmup_steps, mode, extrapolation in itertools.product(
        options.displaced, options.warmup_steps, options.displaced_modes,
                                                                  options.extrapolation):
        levels = family.plan.num_levels
        if levels is not None and cut_bands(SIDE, degree,
                                            2 ** (levels(family.detection.config(header.shapes)) - 1)) is None:
            raise ConfigError(f"Use a --displaced below {degree}: the {SIDE} latent rows of {options.model.name} "
                              f"cannot be split that far.")
        name = (f"displaced, N={degree}, W={warmup_steps}" + (f", {mode}" if len(options.displaced_modes) > 1 else "")
                + (f", extrapolation {extrapolation:g}" if extrapolation else ""))
        method = Method(Layout(displaced_degree=degree), warmup_steps, None, extrapolation, displaced_mode=mode)
        found[name] = Setting(degree, run(one_spec, method), degree)
    return found | {f"naive patches, M={count}": Setting(1, naive(one, count), count) for count in options.patches}


def exchanging(run, exchange):
    """run(client, call, sigmas) with this communication dtype of attention's tensors."""
    return lambda client, call, sigmas: run(client, dataclasses.replace(
        call, options=dataclasses.replace(call.options, exchange=exchange)), sigmas)


def naive(run, num_patches):
    """run(client, call, sigmas) of each patch by itself: patches never see each other (DistriFusion's naive
    patches)."""
    return lambda client, call, sigmas: torch.cat(
        [run(client, Call(strip.contiguous(), call.timestep, call.conditioning), sigmas)
         for strip in call.latent.chunk(num_patches, dim=2)], dim=2)


def draw_all(tried, prompts, family, options):
    """{name: images} under these Settings, with one worker group at a time to limit memory."""
    images = {}
    for size in sorted({setting.num_workers for setting in tried.values()}):
        client = start_clients({size}, count_cuda(options.device))[size]
        try:
            for name, setting in tried.items():
                if setting.num_workers == size:
                    print(f"\r{name:<40}", end="", file=sys.stderr, flush=True)
                    images[name] = decode(draw(client, setting.run, prompts, family, options))
        finally:
            client.close()
    return {name: images[name] for name in tried}


def draw(client, run, prompts, family, options):
    """Latents [B, 16, 16, 16] of the prompts, each from its own seed."""
    sigmas, latents = shifted_sigmas(options.steps).tolist(), []
    for first in range(0, len(prompts), options.batch):
        some = prompts[first:first + options.batch]
        noise = noise_of(range(first, first + len(some)))
        latents.append(run(client, Call(noise, torch.zeros(1), conditioning_of(family, some)), sigmas))
    return torch.cat(latents)


def noise_of(numbers):
    """The initial noise [B, 16, 16, 16] of prompts with these numbers."""
    return torch.stack([torch.randn(CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(number))
                        for number in numbers])


def conditioning_of(family, prompts):
    """A family's conditioning of the prompts, followed by as many empty prompts, for classifier-free guidance."""
    context, pooled = load_text_encoder().encode([*prompts, *[""] * len(prompts)])
    tensors = {"context": context if family.blocks else unet_context(context), "y": pooled}
    return {name: tensors[name] for name in tensors if name in family.inputs.conditioning}


@torch.no_grad()
def decode(latents):
    """Images [B, 3, 128, 128] in -1..1."""
    tensors = load_file(WEIGHTS / "vae" / "xdit_demo_vae.safetensors")
    # the others belong to the host
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("taesd_")}
    autoencoder = load_autoencoder(weights, torch.float32, torch.device("cpu"))
    return torch.cat([autoencoder.decode(some).sample.clamp(-1, 1) for some in latents.float().split(16)])


@torch.no_grad()
def compare(images, reference, num_patches, recogniser, labels):
    """Means over the images: PSNR in dB, SSIM (Z. Wang et al. 2004), seam, and the fraction recognised as their prompt.

    seam: brightness step between rows across patch borders, in units of the reference's at the same rows.
    """
    from skimage.metrics import structural_similarity
    error = ((images - reference) / 2).square().mean((1, 2, 3)).clamp(min=1e-10)
    similarity = [structural_similarity(a.numpy(), b.numpy(), channel_axis=0, data_range=2.0)
                  for a, b in zip(images, reference)]
    named = recogniser(images)[1].argmax(1) == labels
    borders = [row * images.shape[2] // num_patches for row in range(1, num_patches)]

    def jump(some):
        return torch.stack([(some[:, :, row] - some[:, :, row - 1]).abs().mean() for row in borders]).mean()

    return {"psnr": -10 * error.log10().mean().item(), "ssim": sum(similarity) / len(similarity),
            "seam": (jump(images) / jump(reference)).item() if borders else 1.0, "named": named.float().mean().item()}


@torch.no_grad()
def moments(images, recogniser):
    """(mean [64], covariance [64, 64]) of the images' features."""
    features = recogniser(images)[0]
    return features.mean(0), features.T.cov()


def frechet_distance(moments_a, moments_b):
    """Fréchet distance of two normal distributions (M. Heusel et al. 2017, equation 6)."""
    (mean_a, covariance_a), (mean_b, covariance_b) = moments_a, moments_b
    values, vectors = torch.linalg.eigh(covariance_a.double())
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    both = torch.linalg.eigvalsh(root @ covariance_b.double() @ root).clamp(min=0).sqrt().sum()
    return ((mean_a - mean_b).square().sum() + covariance_a.trace() + covariance_b.trace() - 2 * both).item()


def print_table(rows, recogniser, images, data, options):
    one = moments(images[ONE], recogniser)
    print(f"\r{len(images[ONE])} prompts, {options.steps} steps of {options.sampler}, guidance "
          f"{options.guidance:g}, 128 x 128 pixels; PipeFusion on two workers\n")
    print("| setting | PSNR, dB | SSIM | Fréchet distance to one device | to the data | seam | named as the prompt |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        own = moments(images[name], recogniser)
        same = name == ONE
        print(f"| {name} | {'' if same else format(row['psnr'], '.1f')} | {'' if same else format(row['ssim'], '.3f')} "
              f"| {'' if same else format(frechet_distance(own, one), '.2f')} | {frechet_distance(own, data):.2f} | "
              f"{'' if same else format(row['seam'], '.2f')} | {row['named']:.0%} |")


def write_sheet(path, images, prompts):
    """Write a contact sheet: a row per prompt, a column per setting, with labels."""
    from PIL import Image, ImageDraw
    left, top, side = 190, 24, 128
    sheet = Image.new("RGB", (left + (side + 4) * len(images), top + (side + 4) * len(prompts)), "white")
    pen = ImageDraw.Draw(sheet)
    for column, (name, some) in enumerate(images.items()):
        pen.text((left + column * (side + 4), 6), name, fill="black")
        for row in range(len(prompts)):
            pixels = ((some[row] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
            sheet.paste(Image.fromarray(pixels), (left + column * (side + 4), top + row * (side + 4)))
    for row, prompt in enumerate(prompts):
        lines = [""]
        for word in prompt.split():
            lines = [*lines[:-1], f"{lines[-1]} {word}".strip()] if len(lines[-1]) + len(word) < 28 else [*lines, word]
        pen.text((6, top + row * (side + 4) + 6), "\n".join(lines), fill="black")
    sheet.quantize(256, Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)
