"""How far half precision is from float32: of every family under every method, beside ComfyUI's own model in half
precision.

    OMP_NUM_THREADS=1 python -m tests.programs.half_precision [--kinds wan flux] [--dtypes bf16] [--seeds 1 2]

prints a row of a table for each kind of tiny checkpoint and type: the relative error of ComfyUI's own half precision
against its float32, and that of every method divided by it. tests/integration/sampling/test_half_precision.py asks the
same of a few.
"""

import argparse
import math
import sys
import tempfile
import time

import torch

from tests.support.comfyui_server import ROOT, comfyui_folder
from tests.support.compare_single_device import layouts_of, words
from tests.support.tiny_checkpoints import VARIANTS, families
from tests.support.tolerances import relative_error

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 2
# What changes no rounding of the model itself, and so is not a row of its own.
KINDS = [kind for kind in families() if kind not in VARIANTS]


def parts(latent):
    return [latent] if torch.is_tensor(latent) else latent.unbind()


def computing_in(model, dtype):
    """The MODEL behind Model Compute Dtype. dtype: as its widget says it."""
    from comfy_extras.nodes_model_advanced import ModelComputeDtype
    return ModelComputeDtype().patch(model, dtype)[0]


def arguments(comfyui, kind, seed):
    """Of a few steps on two noises, small: CPUs are slow in half precision."""
    family = families()[kind]
    size = (34, 36) if family.name.startswith("PixArt") else (8, 6)
    if family.plan.is_unet:
        size = (16, 18 if family.plan.hooks == "replicated" else 8)
    prompts = [comfyui.conditioning(kind, number, tokens=8) for number in (2 * seed - 1, 2 * seed)]
    for ((_, options),) in prompts:
        # a thousand of it is the same in every type: else the rounding of that is most of what is seen
        options["guidance"] = 4.0
    return {"positive": prompts[0], "negative": prompts[1], "latent": comfyui.latent(kind, batch=2, size=size),
            "steps": STEPS, "seed": 6 + seed}


def errors(comfyui, kind, dtype, seeds=(1,)):
    """(ComfyUI's own half precision's error, {method: its error divided by that}); of latents in parts the worst of
    them.

    An error is relative to ComfyUI's float32, with weights of `dtype` in all; the root of its mean square over the
    seeds. Of PipeFusion and displaced patches the steps are exact ones.
    """
    family, weights = families()[kind], DTYPES[dtype]
    methods = list(map(words, layouts_of(family.name, 1)))
    native = comfyui.native(kind, dtype=weights)
    own, models, squares = computing_in(native, dtype), [], {method: [] for method in ("native", *methods)}
    for method in methods:                 # all kept, so that the workers keep what several layouts have in common
        config = comfyui.config("cpu,cpu", warmup_steps=STEPS, **{method: 2})
        models.append(computing_in(comfyui.ours(kind, config, "default", dtype=weights), dtype))
    for seed in seeds:
        requested = arguments(comfyui, kind, seed)
        exact = parts(comfyui.sample(native, kind, **requested))
        for method, model in zip(squares, [own, *models]):
            result = parts(comfyui.sample(model, kind, **requested))
            squares[method].append([relative_error(*pair) ** 2 for pair in zip(result, exact, strict=True)])
    means = {method: [math.sqrt(sum(of_part) / len(seeds)) for of_part in zip(*rows)]
             for method, rows in squares.items()}
    allowed = means.pop("native")
    return max(allowed), {method: max(error / least for error, least in zip(of_parts, allowed))
                          for method, of_parts in means.items()}


def holds(kind, dtype):
    """Can the type hold the numbers of the family? Else the nodes refuse it."""
    return str(DTYPES[dtype]).removeprefix("torch.") not in families()[kind].unsupported_dtypes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=list(families()), metavar="KIND")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    from tests.integration.conftest import ComfyUI
    # our nodes/ would shadow ComfyUI's nodes.py
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    with tempfile.TemporaryDirectory(prefix="xdit-half-") as base:
        comfyui = ComfyUI(comfyui_folder(), base)
        try:
            for kind in options.kinds:
                for dtype in (dtype for dtype in options.dtypes if holds(kind, dtype)):
                    started_s = time.monotonic()
                    own, ratios = errors(comfyui, kind, dtype, options.seeds)
                    cells = ", ".join(f"{method} {ratio:.2f}" for method, ratio in ratios.items())
                    print(f"| {families()[kind].name} ({kind}) | {dtype} | {own:.1e} | {cells} | "
                          f"{max(ratios.values()):.2f} | {time.monotonic() - started_s:.0f} s", flush=True)
                comfyui.native(kind).detach()
        finally:
            comfyui.groups.close()


if __name__ == "__main__":
    main()
