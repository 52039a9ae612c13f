"""Tiny upscale models in the formats of published files, for spandrel."""

import torch


def esrgan(scale=4, width=8, num_blocks=1, channels=3, seed=1):
    """The file of a Real-ESRGAN model: {"params_ema": state dict with the names of BasicSR's RRDBNet}."""
    assert scale in (1, 2, 4)
    inputs = channels * {1: 16, 2: 4, 4: 1}[scale]             # pixels are unshuffled, and always upscaled by 4
    layers = {"conv_first": (inputs, width), "conv_body": (width, width), "conv_up1": (width, width),
              "conv_up2": (width, width), "conv_hr": (width, width), "conv_last": (width, channels)}
    for block in range(num_blocks):
        for dense in (1, 2, 3):
            for conv in range(1, 6):
                layers[f"body.{block}.rdb{dense}.conv{conv}"] = (width + 32 * (conv - 1), 32 if conv < 5 else width)
    return {"params_ema": _random(layers, seed)}


def compact(scale=2, width=4, num_convs=1, channels=3, seed=1):
    """The file of a compact Real-ESRGAN model: {"params": state dict of SRVGGNetCompact}. Its layers are few and cheap
    for large images."""
    layers = {"body.0": (channels, width), **{f"body.{2 * index}": (width, width) for index in range(1, num_convs + 1)},
              f"body.{2 * num_convs + 2}": (width, channels * scale ** 2)}
    slopes = {f"body.{2 * index + 1}.weight": torch.full((width,), 0.3) for index in range(num_convs + 1)}
    return {"params": _random(layers, seed) | slopes}


def _random(layers, seed):
    """State dict of convolutions {name: (input channels, output channels)} whose outputs lie in [0, 1], mostly."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (inputs, outputs) in layers.items():
        tensors[f"{name}.weight"] = torch.randn(outputs, inputs, 3, 3, generator=generator) / (3 * inputs ** 0.5)
        tensors[f"{name}.bias"] = torch.rand(outputs, generator=generator) * 0.4
    return tensors
