"""Training of the demo model's autoencoder: the architecture of TAESD (O. B. Bohan 2023), 16 channels, 8 x
downsampling."""

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torchvision.utils import save_image

from . import loop
from .emoji import compose
from .text import WEIGHTS

CHANNELS, SIDE = 16, 16                    # of a latent: 128 x 128 pixels
BATCH = 16
CROP_PX = 64
PEAK = 1.5e-3
NOISE = 0.1  # standard deviation of noise on the latent in training, so that the decoder tolerates small errors
# SD3's latents are (z - shift) * scale. The file has both numbers, which ComfyUI's Load VAE and this pack read.
SCALE, SHIFT = 1.5305, 0.0609

# Red, green and blue in -1..1 from SD3's 16 channels, as ComfyUI's previews compute them (comfy/latent_formats.py,
# SD3). The encoder is trained to match, so that previews of the demo model show its image.
PREVIEW = (
    (-0.0922, -0.0175, 0.0749), (0.0311, 0.0633, 0.0954), (0.1994, 0.0927, 0.0458), (0.0856, 0.0339, 0.0902),
    (0.0587, 0.0272, -0.0496), (-0.0006, 0.1104, 0.0309), (0.0978, 0.0306, 0.0427), (-0.0042, 0.1038, 0.1358),
    (-0.0194, 0.002, 0.0669), (-0.0488, 0.013, -0.0268), (0.0922, 0.0988, 0.0951), (-0.0278, 0.0524, -0.0542),
    (0.0332, 0.0456, 0.0895), (-0.0069, -0.003, -0.081), (-0.0596, -0.0465, -0.0293), (-0.1448, -0.1463, -0.1189),
)
PREVIEW_BIAS = (0.2394, 0.2135, 0.1925)


def new():
    """Create the untrained autoencoder: diffusers' AutoencoderTiny with SD3's number of channels, 2.4 million
    parameters."""
    from diffusers import AutoencoderTiny
    return AutoencoderTiny(latent_channels=CHANNELS).to(memory_format=torch.channels_last)


def load():
    """Load the trained autoencoder, in float32."""
    state = {}
    for name, tensor in load_file(WEIGHTS / "vae" / "xdit_demo_vae.safetensors").items():
        side, _, rest = name.removeprefix("taesd_").partition(".")
        if side in ("encoder", "decoder"):                     # inverse of export.autoencoder_tensors
            index, _, rest = rest.partition(".")
            state[f"{side}.layers.{int(index) - (side == 'decoder')}.{rest}"] = tensor.float()
    autoencoder = new()
    autoencoder.load_state_dict(state)
    return autoencoder


def edges(image):
    return torch.cat([image.diff(dim=-1)[..., :-1, :], image.diff(dim=-2)[..., :, :-1]], dim=1)


def train(setting, glyphs, weights, steps):
    """Train, or resume training, and return the state dict. glyphs [N, 4, 128, 128] uint8; weights [N]: sampling
    weights."""
    autoencoder = new().to(setting.device)
    factors, bias = torch.tensor(PREVIEW).to(setting.device), torch.tensor(PREVIEW_BIAS)[:, None, None].to(
        setting.device)

    def batch(generator):
        chosen = torch.multinomial(weights, BATCH, replacement=True, generator=generator)
        colours = torch.randint(0, 256, (BATCH, 3), generator=generator)
        top, left = torch.randint(0, glyphs.shape[-1] - CROP_PX + 1, (2,), generator=generator).tolist()
        crops = glyphs[chosen, :, top:top + CROP_PX, left:left + CROP_PX]
        return compose(crops, colours).to(setting.device, memory_format=torch.channels_last)

    def loss_of(step, generator):
        image = batch(generator)
        with torch.autocast(setting.device.type, torch.bfloat16):
            latent = autoencoder.encode(image).latents.float()
            noise = torch.randn(latent.shape, generator=generator) * NOISE
            decoded = autoencoder.decode(latent + noise.to(latent.device)).sample.float()
        mean, variance = latent.mean((0, 2, 3)), latent.var((0, 2, 3))
        normality = (mean ** 2).mean() + ((variance - 1) ** 2).mean()
        preview = torch.einsum("bchw,cr->brhw", latent, factors) + bias
        small = F.avg_pool2d(image, image.shape[-1] // latent.shape[-1])
        return (F.l1_loss(decoded, image) + 0.5 * F.l1_loss(edges(decoded), edges(image)) + 0.01 * normality
                + 0.1 * F.mse_loss(preview, small))

    def on_save(step, state):
        model = new()
        model.load_state_dict(state["autoencoder"])
        generator = torch.Generator().manual_seed(1)
        chosen = torch.multinomial(weights, 32, generator=generator)
        colours = torch.randint(0, 256, (32, 3), generator=generator)
        image = compose(glyphs[chosen], colours)
        with torch.no_grad():
            latent = model.encode(image).latents
            decoded = model.decode(latent).sample.clamp(-1, 1)
        psnr = -10 * torch.log10(((decoded - image) / 2).square().mean((1, 2, 3))).mean()
        print(f"\nautoencoder, step {step}: PSNR {psnr:.2f} dB, latent mean {latent.mean():.3f}, deviation "
              f"{latent.std():.3f}")
        save_image(torch.cat([image[:16], decoded[:16], image[16:], decoded[16:]]) / 2 + 0.5,
                   setting.folder / "autoencoder.png", nrow=16)

    modules = {"autoencoder": autoencoder}
    return loop.run("autoencoder", setting, modules, loop.Recipe(steps, PEAK, 0.998), loss_of, on_save)["autoencoder"]
