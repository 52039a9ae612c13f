"""Tell how keys and values drift from one step to the next, and how well a forecast foretells them, on the demo model
or another.

One process runs the model on whole latents, so that nothing is stale, and compares what each self-attention sees with
what the steps before it would have led to (docs/design/pipefusion.md). Errors are those of keys and values,
relative to them.
"""

import itertools
import math
from pathlib import Path

import torch
import torch.nn.functional as F

from ...checkpoints.checkpoint import open_checkpoint
from ...checkpoints.loader import load_transformer
from ...demo_model.transformer import shifted_sigmas
from ...hooks.function_overrides import FunctionOverrides, functional
from ...protocol.errors import ConfigError
from .quality import DEMO, conditioning_of, load_recogniser, noise_of
from .sampler import SAMPLERS

SLOPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn}


def add_arguments(parser):
    parser.add_argument("files", type=Path, nargs="*", default=[DEMO], metavar="FILE",
                        help="the demo model, or others as bench quality takes them")
    parser.add_argument("--prompts", type=int, default=16, help="how many of the demo's 256 prompts, drawn at once")
    parser.add_argument("--steps", type=int, default=20, help="steps of a picture")
    parser.add_argument("--sampler", choices=SAMPLERS, default="euler", help="what takes them")
    parser.add_argument("--guidance", type=float, default=3.0, help="scale of classifier-free guidance")
    parser.add_argument("--forecast", type=float, nargs="+", default=(0.4, 0.6, 0.8, 1.0),
                        help="strengths to try, beside none")
    parser.add_argument("--threads", type=int, default=1, help="of the processor")


@torch.no_grad()
def main(options):
    torch.set_num_threads(options.threads)
    _, _, prompts, _ = load_recogniser()
    if not 1 <= options.prompts <= len(prompts):
        raise ConfigError(f"--prompts {options.prompts} is not from 1 to {len(prompts)}.")
    for file in options.files:
        seen = seen_by_attentions(file, prompts[:options.prompts], options)
        print(f"\n{file.name}: {options.steps} steps of {options.sampler}, guidance {options.guidance:g}, "
              f"{options.prompts} prompts\n")
        strengths = sorted({0.0, *options.extrapolation})
        print_orders(seen, strengths)
        print_places(seen, strengths)


def seen_by_attentions(file, prompts, options):
    """[[(time, keys and values (2, B, N, T, H) in half precision) of each step] of each self-attention],
    of a run of whole latents."""
    header = open_checkpoint(str(file))
    family = header.family
    loaded = load_transformer(header.spec("float32", "float32"), torch.device("cpu"))
    model, config = loaded.model, loaded.config
    seen, now = {}, None

    def attention(query, key, value, *args, **kwargs):
        if key.shape[2] == query.shape[2]:
            seen.setdefault(next(now), []).append((sigma, torch.stack([key, value]).half()))
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)

    def dispatched(query, key, value, attn_mask=None, scale=None, **options):
        """As diffusers', (B, T, N, H)."""
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        return attention(query, key, value, attn_mask, scale=scale).transpose(1, 2)

    function_overrides = FunctionOverrides(F=functional(scaled_dot_product_attention=attention),
                                           dispatch_attention_fn=dispatched)
    for module in model.modules():
        if hasattr(module, "processor"):
            function_overrides.place(module)
    conditioning, x, before = conditioning_of(family, prompts), noise_of(range(len(prompts))), None
    sigmas = shifted_sigmas(options.steps).tolist()
    for step, (sigma, following) in enumerate(zip(sigmas, sigmas[1:])):
        now, both = itertools.count(), torch.cat([x, x])
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(10 ** 6 + step))
        output = model(**family.inputs(both, torch.full((len(both),), 1000 * sigma), conditioning, config),
                       return_dict=False)[0]
        positive, negative = family.prediction(output, both).chunk(2)
        x, before = SAMPLERS[options.sampler](x, sigma, following, negative + options.guidance * (positive - negative),
                                              before, noise)
    return list(seen.values())


def extrapolated(past, time, strength, order=1, slope_dtype=torch.float32):
    """What (time, keys and values) of the calls before lead to at `time`.
    The slope is rounded to a type, scaled by its largest number."""
    (older, then), (old, now) = past[-2:]
    slope = (now - then) / (old - older)
    if slope_dtype != torch.float32:
        scale = slope.abs().max().clamp(min=1e-30) / 256
        slope = (slope / scale).to(slope_dtype).float() * scale
    reach = time - old
    change = slope * reach
    if order == 2 and len(past) > 2:
        oldest, first = past[-3]
        change = change + (slope - (then - first) / (older - oldest)) / (old - oldest) * reach * (time - older)
    return now + strength * change


def errors_of(calls, *extrapolation):
    """Relative errors of keys and values of an attention's calls from the third on, by the ones before.
    forecast: extrapolated's arguments."""
    calls = [(time, both.float()) for time, both in calls]
    return [relative(extrapolated(calls[max(0, step - 3):step], calls[step][0], *extrapolation), calls[step][1])
            for step in range(2, len(calls))]


def relative(made, true):
    return ((made - true).norm() / true.norm()).item()


def mean_square(errors):
    return math.sqrt(sum(error ** 2 for error in errors) / len(errors))


def print_orders(seen, strengths):
    """Root mean squares over all attentions and steps."""
    print("| forecast | " + " | ".join(f"{strength:g}" for strength in strengths) + " | memory, of keys and values |")
    print("| --- |" + " --- |" * (len(strengths) + 1))
    ways = {"a line": (1, torch.float32, "2"),
            **{f"a line, its slope in {name}": (1, dtype, f"1 + {dtype.itemsize} / their bytes")
              for name, dtype in SLOPES.items() if name != "float32"},
            "a parabola": (2, torch.float32, "3")}
    for way, (order, dtype, memory) in ways.items():
        row = [mean_square([error for calls in seen for error in errors_of(calls, strength, order, dtype)])
               for strength in strengths]
        print(f"| {way} | " + " | ".join(f"{error:.4f}" for error in row) + f" | {memory} |", flush=True)


def print_places(seen, strengths):
    """As they are, and with the forecast that is best over all:
    by attention, in the order of the forward, and by step."""
    errors = {strength: [errors_of(calls, strength) for calls in seen] for strength in strengths}
    best = min(strengths, key=lambda strength: mean_square(sum(errors[strength], [])))
    for what, count, of in (("attention", len(seen), lambda table, index: table[index]),
                            ("step", len(seen[0]) - 2, lambda table, index: [row[index] for row in table])):
        print(f"\nby {what}: as they are -> forecast {best:g}")
        print("  ".join(f"{index + (3 if what == 'step' else 0)}: {mean_square(of(errors[strengths[0]], index)):.3f} "
                        f"-> {mean_square(of(errors[best], index)):.3f}" for index in range(count)))
