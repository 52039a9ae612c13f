"""Trains the demo model's transformer and text encoder: SD3's architecture and flow matching (P. Esser et al. 2024)."""

import random
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.func import functional_call

from . import loop
from .autoencoder import CHANNELS, SIDE
from .pictures import BACKGROUNDS, caption
from .text import MAX_WORDS, WIDTH, TextEncoder, arrange, tokens_of

DEPTH = 4              # ComfyUI reads the width of an SD3 model as 64 x depth
HEAD_SIZE = 64
MAX_SIDE = 32          # of a picture, in tokens of 16 pixels
BATCH = 64
WITHOUT_TEXT = 0.1     # of the captions, so that classifier-free guidance has its other half
SHIFT = 3.0            # of the noise levels, see shifted
ROUNDED = torch.float8_e4m3fn
ROUNDED_FROM = 0.85    # of the steps; before it rounding only takes time
SAMPLES = ("red apple", "cat face on a blue background", "grinning face", "house with garden",
           "heart on a black background",
           "fire", "woman astronaut", "airplane on a cyan background", "dog", "pizza", "sailboat", "flag Japan",
           "rocket on a purple background", "tree", "crown", "guitar on a yellow background", "sad face", "dragon",
           "snowman on a blue background", "cherry blossom", "clown face", "bicycle", "moon on a black background",
           "bread",
           "tiger face on a pink background", "tulip", "robot", "umbrella with rain drops", "fish", "police car",
           "dragon on a red background", "blue heart")


@dataclass(frozen=True)
class Dataset:
    """What is learnt from. latents [K, 16, 16, 16]: of every picture. rows [N, number of backgrounds] long: the picture
    of an entry upon a background, -1 where there is none. entries: pictures.Entry of each. often [N]: how often an
    entry is drawn."""

    latents: torch.Tensor
    rows: torch.Tensor
    entries: list
    often: torch.Tensor


def new():
    """The untrained transformer, 9.0 million parameters, and its text encoder."""
    from diffusers import SD3Transformer2DModel
    transformer = SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=CHANNELS, num_layers=DEPTH, attention_head_dim=HEAD_SIZE,
        num_attention_heads=DEPTH, joint_attention_dim=WIDTH, caption_projection_dim=HEAD_SIZE * DEPTH,
        pooled_projection_dim=WIDTH, out_channels=CHANNELS, pos_embed_max_size=MAX_SIDE, qk_norm="rms_norm")
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
        if name.endswith(("norm1.linear", "norm1_context.linear", "norm_out.linear", "proj_out")):
            nn.init.zeros_(module.weight)
    return transformer, TextEncoder()


def is_block_matrix(name, tensor):
    """The matrices of the blocks are trained by Muon and stored in 8 bits, everything else by AdamW and in 16."""
    return name.startswith("transformer_blocks.") and tensor.ndim == 2


def rounded(transformer):
    """The transformer's parameters as the file will hold them; gradients pass as if nothing were rounded (Y.
    Bengio 2013)."""
    return {name: p + (p.to(ROUNDED).to(p.dtype) - p).detach() if is_block_matrix(name, p) else p
            for name, p in transformer.named_parameters()}


def captions_of(entries, chosen, backgrounds, randomness):
    names = list(BACKGROUNDS)
    texts = [caption(entries[entry], names[background], randomness) for entry, background in zip(chosen, backgrounds)]
    return [[] if randomness.random() < WITHOUT_TEXT else tokens_of(text)[:MAX_WORDS] for text in texts]


def batch_of(generator, dataset):
    """What a step learns from, (noisy latents, noise levels, velocities, captions as lists of words).

    All is drawn on the CPU, alike on every device.
    """
    randomness = random.Random(generator.initial_seed())
    chosen = torch.multinomial(dataset.often, BATCH, replacement=True, generator=generator)
    shown = torch.randint(-len(BACKGROUNDS), len(BACKGROUNDS), (BATCH,), generator=generator)
    shown = shown.clamp(min=0)                                           # every second one is upon white, the first
    shown = torch.where(dataset.rows[chosen, shown] >= 0, shown, 0)
    clean = dataset.latents[dataset.rows[chosen, shown]].float()
    noise = torch.randn(clean.shape, generator=generator)
    sigma = shifted(torch.rand(BATCH, generator=generator))
    captions = captions_of(dataset.entries, chosen.tolist(), shown.tolist(), randomness)
    return torch.lerp(clean, noise, sigma[:, None, None, None]), sigma, noise - clean, captions


def train(setting, dataset, steps, peak, show):
    """Train, or go on training; returns the state dicts of both. show(latents) is called at each save, with samples."""
    transformer, text = (module.to(setting.device) for module in new())

    def loss_of(step, generator):
        noisy, sigma, wanted, captions = batch_of(generator, dataset)
        noisy, sigma, wanted = (tensor.to(setting.device) for tensor in (noisy, sigma, wanted))
        context, pooled = text(*(tensor.to(setting.device) for tensor in arrange(captions)), BATCH)
        weights = rounded(transformer) if step >= ROUNDED_FROM * steps else {}
        with torch.autocast(setting.device.type, torch.bfloat16):
            velocity = functional_call(transformer, weights, (noisy, context, pooled, sigma * 1000)).sample
        return (velocity.float() - wanted).square().mean()

    def on_save(step, state):
        model, encoder = new()
        model.load_state_dict(state["transformer"])
        encoder.load_state_dict(state["text"])
        show(sample(model, encoder, SAMPLES))

    modules = {"transformer": transformer, "text": text}
    return loop.run("transformer", setting, modules, loop.Recipe(steps, peak, 0.999, is_block_matrix), loss_of, on_save)


def shifted(sigmas):
    """Noise levels as ComfyUI shifts them for SD3 models.

    The model is trained as it is sampled. Captions leave little open here, so a picture is decided near noise level 1,
    and of SD3's logit-normal levels (mean 0.4) only 4 % are above 0.9. After 17,883 steps with those, 39 % of the
    pictures' variance was missed at level 1 with the caption given; at step 22,500, the last 4,063 with these, 19 %.
    """
    return SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)


def shifted_sigmas(steps):
    """Noise levels [steps + 1] from 1 to 0 of a sampler."""
    return shifted(torch.linspace(1, 0, steps + 1))


@torch.no_grad()
def sample(transformer, text, prompts, guidance=3.0, steps=20, seed=0):
    """Latents [B, 16, 16, 16] of prompts by Euler's method."""
    latent = torch.randn(len(prompts), CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    context, pooled = text.encode([*prompts, *[""] * len(prompts)])
    sigmas = shifted_sigmas(steps)
    weights = rounded(transformer)
    for sigma, following in zip(sigmas, sigmas[1:]):
        with torch.autocast("cpu", torch.bfloat16):
            velocity = functional_call(transformer, weights, (torch.cat([latent, latent]), context, pooled,
                                                              (sigma * 1000).repeat(2 * len(prompts)))).sample.float()
        positive, negative = velocity.chunk(2)
        latent = latent + (following - sigma) * (negative + guidance * (positive - negative))
    return latent
