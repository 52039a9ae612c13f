"""Every kind of VAE at its full size, pictures of 1024 x 1024 and videos of 81 frames of 720p, decoded and encoded by
one rank and by two: the most that lives is what is forecast before a decode, by which it is refused or computed in
blocks; no operator mixes devices, and the host waits where it is allowed to."""

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import diffusers
import pytest
import torch
import torch.distributed as dist

from tests.support.tiers import by_default
from tests.unit.tools.dry_run.rows import place_of
from xdit_backend.autoencoders import family_of
from xdit_backend.checkpoints.offload.layer_offload import StreamedLayers
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.parallel.vae_memory import MARGIN, need_of
from xdit_backend.parallel.vae_rows import Ranks, SplitOptions, decode_rows, encode_rows, max_shards, split_dim
from xdit_backend.planner.memory_model import memory_budget
from xdit_backend.tools.dry_run.fake_cuda import CUDA, fake_cuda_device, fake_group
from xdit_backend.tools.dry_run.op_counter import DeviceWork
from xdit_backend.tools.dry_run.simulated_rank import CopiesInLine

ALLOWED = 0.05
ALLOWED_WAITS = {
    "copy at spatial_ops.py fractions": "a few numbers, once a decode, which norms keep",
    "equal at vae_rows.py _same_images":
        "frames that the encoder has in another order: one is read, before a padding"}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A published VAE. scale: pixels of a latent row; times: frames of a latent's frame, 0 of pictures.
    frames: of a latent; 0: of about 80. encodes_frames: one by one."""

    name: str
    channels: int
    scale: int = 8
    times: int = 0
    options: dict = dataclasses.field(default_factory=dict)
    pixels: tuple = (1280, 720)
    frames: int = 0
    encodes_frames: bool = False

    def make(self):
        with torch.device("meta"):
            vae = getattr(diffusers, self.name)(**self.options).to("meta", torch.bfloat16).eval().requires_grad_(False)
            family_of(vae).finish(vae, {})
        return vae

    def shapes(self):
        """Of a latent and of its picture or video."""
        columns, rows = self.pixels if self.times else (1024, 1024)
        columns, rows = columns // self.scale, rows // self.scale
        frames = self.frames or (80 // self.times + 1 if self.times else 0)
        latent = (1, self.channels, *([frames] if frames else []), rows, columns)
        times = [(frames - 1) * self.times + 1] if frames and not self.encodes_frames else []
        return latent, (1, 3, *times, rows * self.scale, columns * self.scale)


OF_FLUX = {"latent_channels": 16, "block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
           "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4,
           "use_quant_conv": False, "use_post_quant_conv": False}
OF_SVD = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2,
          "down_block_types": ("DownEncoderBlock2D",) * 4}
OF_WAN22 = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12,
            "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}
OF_HUNYUAN_IMAGE = {"in_channels": 3, "out_channels": 3, "latent_channels": 64, "layers_per_block": 2,
                    "block_out_channels": (128, 256, 512, 512, 1024, 1024), "spatial_compression_ratio": 32,
                    "sample_size": 384}
OF_COGVIDEOX = {"block_out_channels": (128, 256, 256, 512), "layers_per_block": 3, "latent_channels": 16,
                "down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
OF_SANA = {"latent_channels": 32, "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
           "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
           "encoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)),
           "decoder_qkv_multiscales": ((), (), (), (5,), (5,), (5,)), "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
           "downsample_block_type": "Conv", "upsample_block_type": "interpolate"}
KINDS = {
    "flux": Kind("AutoencoderKL", 16, options=OF_FLUX), "taesd": Kind("AutoencoderTiny", 4),
    "sana": Kind("AutoencoderDC", 32, 32, options=OF_SANA),
    "hunyuan image": Kind("AutoencoderKLHunyuanImage", 64, 32, options=OF_HUNYUAN_IMAGE),
    "wan": Kind("AutoencoderKLWan", 16, 8, 4),
    "wan 2.2": Kind("AutoencoderKLWan", 48, 16, 4, OF_WAN22),
    "hunyuan": Kind("AutoencoderKLHunyuanVideo", 16, 8, 4),
    "hunyuan 1.5": Kind("AutoencoderKLHunyuanVideo15", 32, 16, 4),
    "ltx": Kind("AutoencoderKLLTXVideo", 128, 32, 8, pixels=(1280, 704)),
    "mochi": Kind("AutoencoderKLMochi", 12, 8, 6),
    "svd": Kind("AutoencoderKLTemporalDecoder", 4, 8, 1, OF_SVD, (1024, 576), 25, True),
    "cogvideox": Kind("AutoencoderKLCogVideoX", 16, 8, 4, OF_COGVIDEOX),
    "cosmos": Kind("AutoencoderKLCosmos", 16, 8, 8)}
KINDS = {key: kind for key, kind in KINDS.items() if hasattr(diffusers, kind.name)}
FULL_SIZE = Path(__file__).parents[4] / "docs" / "benchmarks.md"
TITLES = {"flux": "Flux.1", "taesd": "TAESD", "sana": "Sana", "hunyuan image": "HunyuanImage", "wan": "Wan 2.1",
          "wan 2.2": "Wan 2.2", "hunyuan": "HunyuanVideo", "hunyuan 1.5": "HunyuanVideo 1.5", "ltx": "LTX-Video",
          "mochi": "Mochi (79 frames)", "svd": "Stable Video Diffusion (25 frames of 1024 x 576)",
          "cogvideox": "CogVideoX", "cosmos": "Cosmos-Predict1"}
DEFAULT = {("flux", "decode", 2, True), ("cosmos", "decode", 2, False), ("ltx", "encode", 2, False)}


def counted(kind, way, world_size, whole):
    """(DeviceWork of a decode or encode by the first rank, bytes before it). whole: with convolutions all at once, else
    in blocks as the forecast counts them."""
    vae, (latent, image) = kind.make(), kind.shapes()
    shape, scale = (latent, 1) if way == "decode" else (image, kind.scale)
    dim = split_dim(vae, shape, scale)
    rows = -(-max_shards(shape, scale, dim) // world_size) * scale
    options = SplitOptions() if whole else SplitOptions(
        dim, block_size=rows + (dim == -3) if scale == 1 else -(-rows // 8))
    with fake_group(0, world_size), fake_cuda_device(), DeviceWork() as work:
        for module in vae.modules():
            for own in (module._parameters, module._buffers):
                own |= {name: _there(tensor) for name, tensor in own.items() if tensor is not None}
        given = torch.empty(shape, dtype=vae.dtype, device=CUDA)
        before_bytes = work.resident_bytes
        work.start_over()
        ranks = Ranks(dist.group.WORLD) if world_size > 1 else None
        # what is pretended knows no inference mode; nothing asks for a gradient
        run = decode_rows if way == "decode" else functools.partial(encode_rows, scale=scale)
        _plain(run)(vae, given, ranks=ranks, traffic=Traffic(), options=options)
    return work, before_bytes


def _there(tensor):
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
    return torch.nn.Parameter(there, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else there


def _plain(run):
    if isinstance(run, functools.partial):
        return functools.partial(run.func.__wrapped__, **run.keywords)
    return run.__wrapped__


def forecast_of(kind, way, world_size, whole):
    latent, image = kind.shapes()
    return need_of(kind.make(), *((latent, 1) if way == "decode" else (image, kind.scale)), world_size,
                   whole).peak_bytes


@pytest.mark.parametrize("key, way, world_size, whole", [
    pytest.param(*row, marks=[] if row in DEFAULT else pytest.mark.slow)
    for row in ((key, way, world_size, whole) for key in KINDS for way in ("decode", "encode")
                for world_size, whole in ((1, True), (2, True), (2, False)))])
def test_a_decode_lives_in_what_was_forecast(key, way, world_size, whole):
    kind = KINDS[key]
    work, before_bytes = counted(kind, way, world_size, whole)

    assert work.mixed == {}
    assert {place_of(wait) for wait in work.waits} <= set(ALLOWED_WAITS)
    assert abs(forecast_of(kind, way, world_size, whole) / (work.peak_bytes - before_bytes) - 1) < ALLOWED


def held_and_needed(title):
    """GB of the decoder, of its largest layer, [needed in addition by 1, 2 and 4 ranks]. docs/benchmarks.md."""
    five = r" ([\d.]+) \|" * 5
    cells, = re.findall(rf"^\| {re.escape(title)} \|{five}$", FULL_SIZE.read_text(encoding="utf-8"), re.MULTILINE)
    decoder, layer, *needed = map(float, cells)
    return decoder, layer, needed


@pytest.mark.parametrize("key", by_default(["sana"], KINDS))
def test_the_table_of_decoders_is_what_they_hold_and_need(key):
    kind, vae = KINDS[key], KINDS[key].make()
    parts = [part for name, part in vae.named_children() if name.startswith(("decoder", "post_quant"))]
    layers = [sum(weight.nbytes for weight in module.parameters(recurse=False))
              for part in parts for module in part.modules()]
    needed = [need_of(vae, kind.shapes()[0], 1, num_ranks).peak_bytes * MARGIN for num_ranks in (1, 2, 4)]

    decoder, layer, said = held_and_needed(TITLES[key])
    assert abs(decoder - sum(layers) / 1e9) < (6e-4 if decoder < 0.01 else 6e-3)
    assert abs(layer - max(layers) / 1e9) < 6e-4 and said == [round(each / 1e9, 2) for each in needed]


@pytest.mark.parametrize("key", by_default(["flux"], ["flux", "hunyuan 1.5", "wan"]))
def test_layers_that_come_from_host_memory_leave_the_device_to_the_frames(key):
    """Of a decoder its device has two buffers of the largest layer, and what is small; beside them it lives in what was
    forecast."""
    kind, vae = KINDS[key], KINDS[key].make()
    del vae.encoder
    latent, _ = kind.shapes()
    with fake_group(0, 1), fake_cuda_device(), DeviceWork() as work:
        for module in vae.modules():
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu" if tensor.ndim > 1 else CUDA)
                    module._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
        layers = StreamedLayers(vae, CUDA, CopiesInLine([]))
        resident_bytes, given = work.resident_bytes, torch.empty(latent, dtype=vae.dtype, device=CUDA)
        work.start_over()
        for _ in range(2):
            with layers.running():
                _plain(decode_rows)(vae, given)

    decoder, layer, _ = held_and_needed(TITLES[key])
    assert resident_bytes / 1e9 < min(2.1 * layer + 0.01, decoder)
    assert work.peak_bytes - resident_bytes <= 1.005 * need_of(kind.make(), latent, 1, 1,
                                                               True).peak_bytes + given.nbytes


def test_weights_from_host_memory_give_few_decodes_room_that_have_none_else():
    """As docs say: beside two of its largest layers at a time three more decodes have room."""
    more, num_fitting, num_rows = [], 0, 0
    for title, gpu_gb in itertools.product(TITLES.values(), (8, 12, 16, 24)):
        decoder, layer, needed = held_and_needed(title)
        for num_ranks, own in zip((1, 2, 4), needed):
            fits, would_fit = (own + held <= memory_budget(gpu_gb * 1e9) / 1e9
                               for held in (decoder, min(decoder, 2 * layer)))
            num_rows, num_fitting = num_rows + 1, num_fitting + fits
            more += [(title, num_ranks, gpu_gb)] if would_fit and not fits else []
    said = re.search(r"these are (\d+) decodes \(\w+\)\. (\d+) fit", FULL_SIZE.read_text(encoding="utf-8"))

    assert said.groups() == (str(num_rows), str(num_fitting))
    assert more == [("Wan 2.1", 1, 12), ("HunyuanVideo 1.5", 4, 8), ("CogVideoX", 4, 12)]
