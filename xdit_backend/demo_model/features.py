"""A small network that classifies emoji. `bench quality` compares images by its last features."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

from . import loop
from .emoji import BACKGROUNDS, SKIN_TONES, compose, on_background

NUM_FEATURES = 64
BATCH = 96
PEAK = 2e-3
NUM_PROMPTS = 256


class Recogniser(nn.Module):
    """Images [B, 3, 128, 128] in -1..1 to features [B, 64] and logits [B, number of names]."""

    def __init__(self, num_names):
        super().__init__()
        widths = (3, 32, 64, 96, 160)
        self.layers = nn.Sequential(*[layer for here, there in zip(widths, widths[1:]) for layer in (
            nn.Conv2d(here, there, 3, stride=2, padding=1), nn.GroupNorm(8, there), nn.SiLU())])
        self.features = nn.Linear(widths[-1], NUM_FEATURES)
        self.names = nn.Linear(NUM_FEATURES, num_names)

    def forward(self, image):
        features = self.features(self.layers(F.avg_pool2d(image, 2)).mean((2, 3)))
        return features, self.names(features)


def names_of(entries):
    """Return (the names without skin tones, in order; for each entry the index of its name)."""
    bare = ["".join(character for character in entry.text if character not in SKIN_TONES) for entry in entries]
    indices = {text: index for index, text in enumerate(dict.fromkeys(bare))}
    return list(indices), [indices[text] for text in bare]


def train(setting, glyphs, entries, weights, steps):
    """Train, or resume training, and return the state dict. Training images are glyphs over all backgrounds, shifted
    and with noise.

    weights [N]: sampling weights of the entries.
    """
    names, labels = names_of(entries)
    labels = torch.tensor(labels)
    palette = torch.tensor(list(BACKGROUNDS.values()))
    recogniser = Recogniser(len(names)).to(setting.device)

    def loss_of(step, generator):
        chosen = torch.multinomial(weights, BATCH, replacement=True, generator=generator)
        image = compose(glyphs[chosen], palette[torch.randint(0, len(palette), (BATCH,), generator=generator)])
        shift = torch.randint(-8, 9, (2,), generator=generator).tolist()
        image = torch.roll(image, shift, (2, 3)) + 0.1 * torch.randn(image.shape, generator=generator)
        with torch.autocast(setting.device.type, torch.bfloat16):
            _, logits = recogniser(image.to(setting.device))
        return F.cross_entropy(logits.float(), labels[chosen].to(setting.device))

    def on_save(step, state):
        model = Recogniser(len(names))
        model.load_state_dict(state["recogniser"])
        chosen = torch.multinomial(weights, 512, generator=torch.Generator().manual_seed(1))
        white = torch.tensor(BACKGROUNDS["white"]).expand(512, 3)
        with torch.no_grad():
            right = (model(compose(glyphs[chosen], white))[1].argmax(1) == labels[chosen]).float().mean()
        print(f"\nrecogniser, step {step}: {right:.1%} of 512 images correct")

    modules = {"recogniser": recogniser}
    return loop.run("recogniser", setting, modules, loop.Recipe(steps, PEAK, 0.995), loss_of, on_save)["recogniser"]


@torch.no_grad()
def quality_set(state, glyphs, entries):
    """Reference values for `bench quality`: (256 prompts, {labels; mean and covariance of their images' features})."""
    names, labels = names_of(entries)
    bare = [index for index, entry in enumerate(entries) if entry.weight == 1]
    chosen = random.Random(7).sample(bare, NUM_PROMPTS)
    backgrounds = [list(BACKGROUNDS)[index % len(BACKGROUNDS)] for index in range(NUM_PROMPTS)]
    recogniser = Recogniser(len(names))
    recogniser.load_state_dict(state)
    features, _ = recogniser(compose(glyphs[chosen], torch.tensor([BACKGROUNDS[name] for name in backgrounds])))
    prompts = [on_background(entries[index].name, name) for index, name in zip(chosen, backgrounds)]
    return prompts, {"labels": torch.tensor([labels[index] for index in chosen]), "data.mean": features.mean(0),
                     "data.covariance": features.T.cov()}
