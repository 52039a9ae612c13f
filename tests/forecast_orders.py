"""Measures on the demo model whether a forecast of second order is worth having: python -m tests.forecast_orders

The oracle of PipeFusion draws prompts as `bench quality` does, in this process, and each setting is compared with one device's pictures.
"""

import argparse
from types import SimpleNamespace

import torch

from tests.parallel.oracle import StaleModel
from xdit_backend.bench.quality import DEMO, conditioning_of, decode, load_recogniser, noise_of
from xdit_backend.bench.sampler import SAMPLERS
from xdit_backend.checkpoints.header import model_spec, read_header, recognise
from xdit_backend.checkpoints.transformer import load_transformer
from xdit_backend.demo_model.transformer import shifted_sigmas
from xdit_backend.partition import cut_patches

GUIDANCE = 3.0


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sampler", choices=SAMPLERS, default="euler")
    parser.add_argument("--patches", type=int, nargs="+", default=(4,))
    parser.add_argument("--line", type=float, nargs="*", default=(0.0, 0.6, 0.8), help="strengths of first order")
    parser.add_argument("--parabola", type=float, nargs="*", default=(0.3, 0.6, 0.8), help="strengths of second order")
    options = parser.parse_args()
    torch.set_num_threads(1)
    one = decode(draw(1, 0.0, 1, options))
    for num_patches in options.patches:
        for order, strength in (*((1, strength) for strength in options.line), *((2, strength) for strength in options.parabola)):
            error = ((decode(draw(num_patches, strength, order, options)) - one) / 2).square().mean((1, 2, 3)).clamp(min=1e-10)
            print(f"{options.sampler}, {options.steps} steps, M={num_patches}, W=1, order {order}, forecast {strength:g}: "
                  f"{-10 * error.log10().mean():.2f} dB", flush=True)


def draw(num_patches, strength, order, options):
    """Latents of the prompts, by so many patches after one whole step."""
    prompts = load_recogniser()[2][:options.prompts]
    header = read_header(str(DEMO))
    family = recognise(header)
    model, config = load_transformer(model_spec(header, family, "float32", "float32"), family, torch.device("cpu"))
    example = SimpleNamespace(model=model, family=family, config=config, conditioning=conditioning_of(family, prompts))
    example.run = lambda: model(**family.inputs(example.latent, example.timestep, example.conditioning, config), return_dict=False)[0]
    stale, x, before = StaleModel(example, strength, order), noise_of(range(len(prompts))), None
    sigmas = shifted_sigmas(options.steps).tolist()
    for step, (sigma, following) in enumerate(zip(sigmas, sigmas[1:])):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(10 ** 6 + step))
        patches = [None] if step == 0 or num_patches == 1 else [
            (patch.start, patch.start + rows) for patch, rows in cut_patches(x.shape, (2, 2), num_patches)]
        both, velocity = torch.cat([x, x]), torch.empty_like(x)
        for rows in patches:
            positive, negative = stale.predict(both, torch.full((len(both),), 1000 * sigma), rows).chunk(2)
            own = slice(None) if rows is None else slice(*rows)
            velocity[:, :, own] = (negative + GUIDANCE * (positive - negative))[:, :, own]
        x, before = SAMPLERS[options.sampler](x, sigma, following, velocity, before, noise)
    return x


if __name__ == "__main__":
    main()
