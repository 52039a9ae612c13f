"""Trains the demo model, or resumes training: python -m xdit_backend.demo_model.train --out FOLDER

Four phases: the autoencoder, the latents of all images, the transformer with its text encoder, and the network that
classifies images. The same seed and steps give the same weights on the same machine. Takes hours on a CPU.
"""

import argparse
import os
from pathlib import Path

import torch
from torchvision.utils import save_image

from ..system import accelerator
from . import autoencoder, export, features, loop, transformer
from .emoji import BACKGROUNDS, PACKAGES, compose, read_entries, render_glyphs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True,
                        help="folder for checkpoints, sample sheets and weights")
    parser.add_argument("--share", default="/usr/share", help=f"usr/share of the Debian packages {PACKAGES}")
    parser.add_argument("--device", default="auto", help="auto, cpu, or torch's device type of GPUs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--autoencoder-steps", type=int, default=3000)
    parser.add_argument("--recogniser-steps", type=int, default=3000)
    parser.add_argument("--transformer-steps", type=int, default=22500)
    parser.add_argument("--transformer-rate", type=float, default=1e-3, help="the learning rate's peak (default 1e-3)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    entries = read_entries(options.share)
    glyphs = render_glyphs(entries, options.share)
    weights = torch.tensor([entry.weight for entry in entries])
    name = options.device
    if name == "auto":
        name = accelerator.device_type() if accelerator.num_devices() else "cpu"
    setting = loop.Setting(options.out, torch.device(name), options.seed)

    torch.manual_seed(3 * options.seed)                        # for the initial weights
    autoencoder_state = autoencoder.train(setting, glyphs, weights, options.autoencoder_steps)
    encoder = autoencoder.new()
    encoder.load_state_dict(autoencoder_state)
    latents, rows = encode_all(encoder, glyphs, entries, options.out / "latents.pt")

    def show(latent):
        with torch.no_grad():
            save_image(encoder.decode(latent).sample.clamp(-1, 1) / 2 + 0.5, options.out / "transformer.png", nrow=8)

    torch.manual_seed(3 * options.seed + 1)
    state = transformer.train(setting, transformer.Dataset(latents, rows, entries, weights), options.transformer_steps,
                              options.transformer_rate, show)
    torch.manual_seed(3 * options.seed + 2)
    recogniser_state = features.train(setting, glyphs, entries, weights, options.recogniser_steps)
    export.write_all(options.out / "weights", autoencoder_state, recogniser_state, state,
                     features.quality_set(recogniser_state, glyphs, entries))
    print(f"The weights are in {options.out / 'weights'}.")


@torch.no_grad()
def encode_all(encoder, glyphs, entries, file):
    """Encode all images: (latents [K, 16, 16, 16] in half precision, rows [N, backgrounds]). The latents are cached in
    `file`.

    Every entry over white, those without a skin tone also over every second background, so that some combinations stay
    unseen.
    """
    rows = torch.full((len(entries), len(BACKGROUNDS)), -1)
    pairs = [(entry, background) for entry in range(len(entries)) for background in range(len(BACKGROUNDS))
             if background == 0 or entries[entry].weight == 1 and (entry + background) % 2]
    for row, (entry, background) in enumerate(pairs):
        rows[entry, background] = row
    if file.exists():
        return torch.load(file, weights_only=True), rows
    palette = torch.tensor(list(BACKGROUNDS.values()))
    latents = torch.empty(len(pairs), autoencoder.CHANNELS, autoencoder.SIDE, autoencoder.SIDE, dtype=torch.float16)
    for first in range(0, len(pairs), 16):
        chosen = torch.tensor(pairs[first:first + 16])
        with torch.autocast("cpu", torch.bfloat16):
            image = compose(glyphs[chosen[:, 0]], palette[chosen[:, 1]]).to(memory_format=torch.channels_last)
            latents[first:first + 16] = encoder.encode(image).latents
        if first % 256 == 0:
            print(f"\rencoding images: {first} of {len(pairs)}", end="", flush=True)
    torch.save(latents, file)
    return latents, rows


if __name__ == "__main__":
    main()
