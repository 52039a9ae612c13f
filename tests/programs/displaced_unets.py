"""Trains two U-Nets, and tells what DistriFusion's modes and forecasts do to their pictures: python -m
tests.programs.displaced_unets

docs/benchmarks.md says what came out; displaced_modes.chosen_for follows it. "sd15" has SD 1.5's structure and predicts
noise; "sdxl" has SDXL's, no attention at full size and linear projections, and predicts velocities, at other noise
levels. Latents are emoji of 32 x 32.
"""

import argparse
import copy
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from greenlet import getcurrent, greenlet

import xdit_backend.parallel.displaced_exchange as exchange_module
from xdit_backend.autoencoders.vae_family import replaced
from xdit_backend.demo_model import loop
from xdit_backend.demo_model.pictures import BACKGROUNDS, PACKAGES, compose, draw, on_background, read_entries
from xdit_backend.demo_model.text import WIDTH, arrange, load_text_encoder, tokens_of
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.hooks.forward_context import ForwardContext
from xdit_backend.hooks.unet import UNetHooks
from xdit_backend.models.sdxl import SDXL
from xdit_backend.parallel.displaced_exchange import Exchange
from xdit_backend.partition import cut_bands
from xdit_backend.protocol.displaced_modes import MODES

SIDE, CHANNELS = 32, 3
WITHOUT_TEXT = 0.1
SMALLER, SMALLER_UNTIL = 16, 0.6           # a side that is cheaper, which these first steps learn from
SIGMA_MAX, SIGMA_MIN = 14.6, 0.03          # of SD
KINDS = {
    "sd15": {"down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
             "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
             "block_out_channels": (32, 64, 128), "norm_num_groups": 4, "attention_head_dim": (1, 2, 4)},
    "sdxl": {"down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
             "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
             "block_out_channels": (32, 96, 128),
             "norm_num_groups": 8, "attention_head_dim": (1, 3, 4), "transformer_layers_per_block": (1, 1, 2),
             "use_linear_projection": True},
}


def new(kind):
    from diffusers import UNet2DConditionModel
    torch.manual_seed(0)
    return UNet2DConditionModel(sample_size=SIDE, in_channels=CHANNELS, out_channels=CHANNELS, layers_per_block=1,
                                cross_attention_dim=WIDTH, **KINDS[kind])


def train(kind, folder, share, num_entries, steps, peak):
    """Trains, or goes on; the weights are in KIND.pt of the folder, the moving average's among them."""
    entries = chosen_entries(share, num_entries)
    glyphs = {side: shrunk(draw(entries, share), side) for side in (SMALLER, SIDE)}
    palette, text = torch.tensor(list(BACKGROUNDS.values())), load_text_encoder().requires_grad_(False)
    folder.mkdir(parents=True, exist_ok=True)

    def loss_of(step, generator):
        side, batch = (SMALLER, 16) if step < SMALLER_UNTIL * steps else (SIDE, 8)
        entry = torch.randint(len(entries), (batch,), generator=generator)
        background = torch.randint(len(palette), (batch,), generator=generator)
        clean = compose(glyphs[side][entry], palette[background])
        sigma, noise = sigmas_at(kind, torch.rand(batch, generator=generator)), torch.randn(
            clean.shape, generator=generator)
        blank = torch.rand(batch, generator=generator) < WITHOUT_TEXT
        captions = [[] if blank[row] else tokens_of(prompt(entries[entry[row]], background[row]))
                    for row in range(batch)]
        context, _ = text(*arrange(captions), batch)
        scale = (sigma ** 2 + 1).rsqrt()[:, None, None, None]
        wanted = noise if kind == "sd15" else scale * (noise - sigma[:, None, None, None] * clean)
        predicted = model((clean + sigma[:, None, None, None] * noise) * scale, time_of(sigma), context).sample
        return (predicted - wanted).square().mean()
    model = new(kind)
    loop.run(kind, loop.Setting(folder), {"model": model}, loop.Recipe(steps, peak, 0.99), loss_of,
             lambda step, weights: torch.save({"step": step, **weights}, folder / f"{kind}.weights.pt"))


def chosen_entries(share, count):
    """So many emoji, spread over Unicode's, without tones of skin."""
    plain = [entry for entry in read_entries(share) if entry.weight == 1]
    return plain[::len(plain) // count][:count]


def shrunk(glyphs, side):
    """Glyphs [N, 4, side, side] uint8. Colours are weighed by their opacity."""
    colour, opacity = glyphs[:, :3].float(), glyphs[:, 3:].float()
    small = F.interpolate(opacity, (side, side), mode="area")
    colour = F.interpolate(colour * opacity, (side, side), mode="area") / small.clamp(min=1)
    return torch.cat([colour, small], 1).round().clamp(0, 255).byte()


def prompt(entry, background):
    return on_background(entry.name, list(BACKGROUNDS)[background])


def sigmas_at(kind, part):
    """Noise levels at these parts of the way down: of even timesteps (ComfyUI's "normal"), and of T. Karras et al.
    2022."""
    if kind == "sd15":
        return sigma_of(999 * (1 - part))
    return (SIGMA_MAX ** (1 / 7) + part * (SIGMA_MIN ** (1 / 7) - SIGMA_MAX ** (1 / 7))) ** 7


def table():
    betas = torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, 1000) ** 2            # SD's
    kept = (1 - betas).cumprod(0)
    return ((1 - kept) / kept).sqrt().log()


def sigma_of(time):
    logs, low = table(), time.floor().long().clamp(0, 998)
    return torch.lerp(logs[low], logs[low + 1], time - low).exp()


def time_of(sigma):
    logs = table()
    low = (torch.searchsorted(logs, sigma.log().contiguous()) - 1).clamp(0, 998)
    return (low + (sigma.log() - logs[low]) / (logs[low + 1] - logs[low])).clamp(0, 999)


class Ranks:
    """The ranks of one exchange as coroutines of this process, with the hooks and exchanges that workers have.

    Where a rank needs what all tell now, the others run up to there; a bucket that leaves is copied, and arrives where
    it is waited for.
    """

    def __init__(self, model, num_ranks):
        self.hooks = [UNetHooks(copy.deepcopy(model), SDXL.plan) for _ in range(num_ranks)]

    def begin(self, forecast):
        """A run: nothing is known yet."""
        count = len(self.hooks)
        self.exchanges = [Exchange(self, count, rank, forecast=forecast) for rank in range(count)]
        self.posted = [[] for _ in range(count)]               # of each rank, every row that it has sent

    def predict(self, is_stale, mode, bands, time, **inputs):
        """The prediction for the whole latent."""
        def run(hooks, exchange):
            context = ForwardContext(inputs, None, Traffic(), range(0), 0, None, exchange=exchange, bands=bands)
            with exchange.call(context.traffic, is_stale and mode.is_stale, mode.publishes or not is_stale, mode.norms,
                               time):
                return hooks.run(context)[0]

        with replaced(exchange_module, all_gather=self._all_gather, start_all_gather=self._start_all_gather,
                      on_wire=lambda tensor, group: tensor):
            tasks = [greenlet(run) for _ in self.hooks]
            told = [task.switch(*both) for task, both in zip(tasks, zip(self.hooks, self.exchanges))]
            while not any(task.dead for task in tasks):
                told = [task.switch(told) for task in tasks]
            assert all(task.dead for task in tasks), "one rank asked for more than another"
        return torch.cat(told, 2)

    def _all_gather(self, local, sizes, dim, group, traffic):
        return torch.cat(getcurrent().parent.switch(local), dim)

    def _start_all_gather(self, rows, rank, group, traffic):
        number = len(self.posted[rank])
        self.posted[rank].append(rows[rank].clone())

        def wait():
            for other, posted in enumerate(self.posted):
                if other != rank:
                    rows[other].copy_(posted[number])
        return wait


def sample(kind, predict, latent, context, num_steps, guidance):
    """The picture by Euler's method. predict(step, time, **inputs): of the model."""
    sigmas = [*sigmas_at(kind, torch.linspace(0, 1, num_steps)), torch.tensor(0.0)]
    x = latent * sigmas[0]
    for step, (sigma, following) in enumerate(zip(sigmas, sigmas[1:])):
        scale, time = (sigma ** 2 + 1).rsqrt(), time_of(sigma)
        scaled = (x * scale).repeat(2, 1, 1, 1)
        predicted = predict(step, time.item(), sample=scaled, timestep=time.repeat(len(scaled)),
                            encoder_hidden_states=context)
        if kind == "sd15":
            slope = predicted
        else:                                                  # clean = x scale^2 - sigma scale v
            slope = (x * sigma * scale ** 2).repeat(2, 1, 1, 1) + predicted * scale
        wanted, unwanted = slope.chunk(2)
        x = x + (following - sigma) * (unwanted + guidance * (wanted - unwanted))
    return x


def measure(options):
    """Prints, as a table in Markdown and for each setting, the mean PSNR to one device, over all pictures,
    and its standard error."""
    entries = chosen_entries(options.share, options.entries)
    model = new(options.kind).eval()
    model.load_state_dict(torch.load(options.out / f"{options.kind}.weights.pt", weights_only=True)["model"])
    numbers = range(options.first, options.first + options.images)
    prompts = [prompt(entries[number % len(entries)], number * 5 % len(BACKGROUNDS)) for number in numbers]
    noise = torch.stack([torch.randn(CHANNELS, options.side, options.side,
                                     generator=torch.Generator().manual_seed(number))
                         for number in numbers])
    context, _ = load_text_encoder().encode([*prompts, *[""] * len(prompts)])

    def one(step, time, **inputs):
        return model(**inputs, return_dict=False)[0]
    whole = sample(options.kind, one, noise, context, options.steps, options.guidance).clamp(-1, 1)
    print(f"{options.kind}: pictures {options.first} to {numbers[-1]}, {options.side} rows, {options.steps} steps, "
          f"guidance {options.guidance:g}\n\n| N | rows a rank | mode | W | forecast | PSNR, dB | +- |\n"
          "| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    if options.sheet:
        from torchvision.utils import save_image
        save_image(whole / 2 + 0.5, options.sheet, nrow=8)
    for num_ranks in options.ranks:
        ranks, bands = Ranks(model, num_ranks), cut_bands(options.side, num_ranks, 4)
        for mode, warmup_steps, forecast in itertools.product(options.modes, options.warmup_steps, options.forecast):
            ranks.begin(forecast if MODES[mode].publishes else 0.0)

            def together(step, time, ranks=ranks, mode=mode, bands=bands, warmup_steps=warmup_steps, **inputs):
                return ranks.predict(step >= max(1, warmup_steps), MODES[mode], bands, time, **inputs)
            image = sample(options.kind, together, noise, context, options.steps, options.guidance).clamp(-1, 1)
            psnr = -10 * ((image - whole) / 2).square().mean((1, 2, 3)).clamp(min=1e-10).log10()
            print(f"| {num_ranks} | {options.side // num_ranks} | {mode} | {warmup_steps} | {forecast:g} | "
                  f"{psnr.mean():.1f} | {psnr.std() / len(psnr) ** 0.5:.1f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("kind", choices=tuple(KINDS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights")
    parser.add_argument("--share", default="/usr/share", help=f"usr/share of the Debian packages {PACKAGES}")
    parser.add_argument("--entries", type=int, default=16, help="emoji to learn")
    parser.add_argument("--training-steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate's peak")
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--first", type=int, default=0, help="number of the first picture, which its seed is")
    parser.add_argument("--side", type=int, default=SIDE, help="rows and columns of a picture")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4, 8))
    parser.add_argument("--modes", choices=tuple(MODES), nargs="+", default=tuple(MODES))
    parser.add_argument("--warmup-steps", type=int, nargs="+", default=(1,))
    parser.add_argument("--forecast", type=float, nargs="+", default=(0.0, 0.6))
    parser.add_argument("--sheet", type=Path, help="where one device's pictures go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "train":
        train(options.kind, options.out, options.share, options.entries, options.training_steps, options.rate)
        return
    with torch.no_grad():
        measure(options)


if __name__ == "__main__":
    main()
