"""Measures on the demo model what is not built, and why: python -m tests.programs.stale_ideas

The oracles of PipeFusion and of displaced patches draw prompts as `bench quality` does, in this process, and each way
is compared with one device's pictures. docs/benchmarks.md tells what came out.
"""

import argparse
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from tests.support.displaced_oracle import StaleTransformer
from tests.support.pipefusion_oracle import StaleModel
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.demo_model.transformer import shifted_sigmas
from xdit_backend.tools.bench.quality import DEMO, conditioning_of, decode, load_recogniser, noise_of
from xdit_backend.tools.bench.sampler import SAMPLERS

GUIDANCE = 3.0
TOKEN_ROWS, SIZE = 8, 2                    # of the demo model's latent, and latent rows of each


@dataclass(frozen=True)
class Way:
    """num_patches: of PipeFusion. num_bands: of displaced patches. order: of the forecast.
    refresh: further steps that run whole."""

    num_patches: int = 1
    num_bands: int = 1
    warmup_steps: int = 1
    extrapolation: float = 0.0
    order: int = 1
    alternates: bool = False               # every second step begins with the last patch
    interleaves: bool = False              # a patch has every num_patches-th row
    refresh: tuple = ()

    def is_replicated(self, step):
        return step < self.warmup_steps or step in self.refresh or self.num_patches == self.num_bands == 1

    def patches(self, step):
        """[latent rows of each patch, [(first, last + 1)]], in order."""
        height, count = TOKEN_ROWS * SIZE, self.num_patches
        if self.interleaves:
            found = [[(row * SIZE, (row + 1) * SIZE) for row in range(patch, TOKEN_ROWS, count)]
                     for patch in range(count)]
        else:
            found = [[(patch * height // count, (patch + 1) * height // count)] for patch in range(count)]
        return found[::-1] if self.alternates and step % 2 else found


def ideas(num_patches, extrapolation):
    """{name: Way}"""
    plain = Way(num_patches, extrapolation=extrapolation)
    return {"as it is": plain, "order of patches alternating": replace(plain, alternates=True),
            "rows interleaved": replace(plain, interleaves=True),
            "both": replace(plain, interleaves=True, alternates=True),
            "two more steps whole at the start": replace(plain, warmup_steps=3),
            "two more steps whole, later": replace(plain, refresh=(7, 14))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("orders", "ideas", "drift", "displaced"))
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sampler", choices=SAMPLERS, default="euler")
    parser.add_argument("--patches", type=int, nargs="+", default=(4,), help="num_patches, or displaced_degree")
    parser.add_argument("--warmup-steps", type=int, nargs="+", default=(1,), help="of displaced")
    parser.add_argument("--forecast", type=float, nargs="+", default=(0.0, 0.6), help="strengths")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    one = decode(draw(Way(), options)[0])

    def psnr(way):
        error = ((decode(draw(way, options)[0]) - one) / 2).square().mean((1, 2, 3)).clamp(min=1e-10)
        return -10 * error.log10()

    print(f"{options.prompts} prompts, {options.steps} steps of {options.sampler}; PSNR to one device in dB",
          flush=True)
    for count in options.patches:
        if options.what == "drift":
            print_warmup_by_drift(count, psnr, options)
            continue
        for name, way in ways(options, count).items():
            print(f"{name}: {psnr(way).mean():.2f}", flush=True)


def ways(options, count):
    """{name: Way}"""
    if options.what == "displaced":
        return {f"displaced, N={count}, W={steps}, forecast {strength:g}":
                Way(num_bands=count, warmup_steps=steps, extrapolation=strength)
                for steps in options.warmup_steps for strength in options.extrapolation}
    if options.what == "orders":
        return {f"M={count}, {('line', 'parabola')[order - 1]}, forecast {strength:g}":
                Way(count, extrapolation=strength, order=order)
                for order in (1, 2) for strength in options.extrapolation}
    return {f"M={count}, forecast {strength:g}, {name}": way for strength in options.extrapolation
            for name, way in ideas(count, strength).items()}


def print_warmup_by_drift(count, psnr, options):
    """Two warm-up steps, or four where keys and values have changed more than in half of the runs from the first step
    to the second."""
    drift = draw(Way(warmup_steps=2, num_patches=count), replace_steps(options))[1]
    more = drift > drift.median()
    print(f"M={count}, drift from step 1 to 2: {drift.mean():.3f}, of all prompts from {drift.min():.3f} to "
          f"{drift.max():.3f}", flush=True)
    for strength in options.extrapolation:
        by_steps = {steps: psnr(Way(count, warmup_steps=steps, extrapolation=strength)) for steps in (2, 3, 4)}
        print(f"M={count}, forecast {strength:g}: "
              + ", ".join(f"W={steps} {each.mean():.2f}" for steps, each in by_steps.items())
              + f"; four where the drift is large, else two {torch.where(more, by_steps[4], by_steps[2]).mean():.2f}"
              + f"; four where it is small, else two {torch.where(more, by_steps[2], by_steps[4]).mean():.2f}",
              flush=True)


def replace_steps(options):
    """Of a run that ends after its first two steps."""
    return SimpleNamespace(**vars(options), first=2)


def draw(way, options):
    """(latents of the prompts, how much keys and values have changed in the last whole step, of each prompt)"""
    prompts = load_recogniser()[2][:options.prompts]
    header = open_checkpoint(str(DEMO))
    family = header.family
    loaded = load_transformer(header.spec("float32", "float32"), torch.device("cpu"))
    model, config = loaded.model, loaded.config
    example = SimpleNamespace(model=model, family=family, config=config, conditioning=conditioning_of(family, prompts))
    example.run = lambda: model(**family.inputs(example.latent, example.timestep, example.conditioning, config),
                                return_dict=False)[0]
    example.run_parts = lambda: (example.run(),)
    predict, changed = predictor(example, way)
    x, before = noise_of(range(len(prompts))), None
    sigmas = shifted_sigmas(options.steps).tolist()
    for step, (sigma, following) in list(enumerate(zip(sigmas, sigmas[1:])))[:getattr(options, "first", None)]:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(10 ** 6 + step))
        both = torch.cat([x, x])
        positive, negative = predict(both, torch.full((len(both),), 1000 * sigma), step).chunk(2)
        x, before = SAMPLERS[options.sampler](x, sigma, following, negative + GUIDANCE * (positive - negative), before,
                                              noise)
    return x, changed(len(prompts))


def predictor(example, way):
    """(predict(latent, timestep, step), changed(number of prompts))"""
    if way.num_bands > 1:
        displaced = StaleTransformer(example, way.num_bands, way.num_bands, extrapolation=way.extrapolation)
        return lambda x, timestep, step: displaced.predict(x, timestep, not way.is_replicated(step)), lambda count: None
    stale, last = StaleModel(example, way.extrapolation, way.order), {}

    def predict(x, timestep, step):
        if way.is_replicated(step):
            last.update(stale.store)
            return stale.predict(x, timestep)
        result = torch.empty_like(x)
        for number, rows in enumerate(way.patches(step)):
            prediction = stale.predict(x, timestep, rows, opens=number == 0)
            for first, end in rows:
                result[:, :, first:end] = prediction[:, :, first:end]
        return result

    def changed(count):
        """Of both branches."""
        relative = [(now - then).square().sum((1, 2, 3)) / then.square().sum((1, 2, 3)) for name in last
                    for now, then in zip(stale.store[name][:2], last[name][:2])]
        return torch.stack(relative).mean(0).view(2, count).mean(0).sqrt() if relative else None
    return predict, changed


if __name__ == "__main__":
    main()
