"""Training of the demo model's transformer and text encoder: SD3's architecture and flow matching (P. Esser et al.
2024)."""

import random
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.func import functional_call

from . import loop
from .autoencoder import CHANNELS, SIDE
from .emoji import BACKGROUNDS, caption
from .text import MAX_WORDS, WIDTH, TextEncoder, arrange, tokens_of

DEPTH = 4              # ComfyUI reads the width of an SD3 model as 64 x depth
HEAD_SIZE = 64
MAX_SIDE = 32          # largest side of an image, in tokens of 16 pixels
BATCH = 64
WITHOUT_TEXT = 0.1     # fraction of captions that are empty, for classifier-free guidance
SHIFT = 3.0            # timestep shift of the noise levels, see shifted
ROUNDED = torch.float8_e4m3fn
ROUNDED_FROM = 0.85    # fraction of the steps after which weights are rounded; earlier rounding only costs time
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
    """Training data. latents [K, 16, 16, 16]: of every image. rows [N, number of backgrounds] long: the index of the
    latent of an entry over a background, -1 if there is none. entries: an emoji.Entry each. often [N]: sampling
    weights of the entries."""

    latents: torch.Tensor
    rows: torch.Tensor
    entries: list
    often: torch.Tensor


def new():
    """Create the untrained transformer, 9.0 million parameters, and its text encoder."""
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
    """Whether a parameter is a matrix of a block, which Muon trains and files store in 8 bits; others use AdamW and
    16 bits."""
    return name.startswith("transformer_blocks.") and tensor.ndim == 2


def rounded(transformer):
    """The transformer's parameters rounded as the file stores them; gradients pass straight through (Y. Bengio
    2013)."""
    return {name: p + (p.to(ROUNDED).to(p.dtype) - p).detach() if is_block_matrix(name, p) else p
            for name, p in transformer.named_parameters()}


def captions_of(entries, chosen, backgrounds, randomness):
    names = list(BACKGROUNDS)
    texts = [caption(entries[entry], names[background], randomness) for entry, background in zip(chosen, backgrounds)]
    return [[] if randomness.random() < WITHOUT_TEXT else tokens_of(text)[:MAX_WORDS] for text in texts]


def batch_of(generator, dataset):
    """A training batch: (noisy latents, noise levels, velocities, tokenised captions).

    All random numbers are generated on the CPU, so that they are the same on every device.
    """
    randomness = random.Random(generator.initial_seed())
    chosen = torch.multinomial(dataset.often, BATCH, replacement=True, generator=generator)
    shown = torch.randint(-len(BACKGROUNDS), len(BACKGROUNDS), (BATCH,), generator=generator)
    shown = shown.clamp(min=0)                                           # half are over white, the first
    shown = torch.where(dataset.rows[chosen, shown] >= 0, shown, 0)
    clean = dataset.latents[dataset.rows[chosen, shown]].float()
    noise = torch.randn(clean.shape, generator=generator)
    sigma = shifted(torch.rand(BATCH, generator=generator))
    captions = captions_of(dataset.entries, chosen.tolist(), shown.tolist(), randomness)
    return torch.lerp(clean, noise, sigma[:, None, None, None]), sigma, noise - clean, captions


def train(setting, dataset, steps, peak, show):
    """Train, or resume training, and return the state dicts of both modules. show(latents) is called at each save,
    with samples."""
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
    """Shift noise levels as ComfyUI does for SD3 models.

    The model is trained at the noise levels at which it is sampled. Captions determine most of an image here, so it is
    decided near noise level 1, and only 4 % of SD3's logit-normal levels (mean 0.4) are above 0.9. After 17,883 steps
    with those, 39 % of the images' variance was unexplained at level 1 given the caption; at step 22,500, the last
    4,063 with these, 19 %.
    """
    return SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)


def shifted_sigmas(steps):
    """Noise levels [steps + 1] of a sampler, from 1 to 0."""
    return shifted(torch.linspace(1, 0, steps + 1))


@torch.no_grad()
def sample(transformer, text, prompts, guidance=3.0, steps=20, seed=0):
    """Generate latents [B, 16, 16, 16] for prompts by Euler's method."""
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
