"""Memory of a decode by rows: measured it is what was estimated, a rank has its share of it,
and what does not fit is refused."""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.ranks import run_ranks
from tests.support.tolerances import within
from tests.support.vae_zoo import KINDS, image, latent, tiny_vae
from xdit_backend.parallel import vae_memory
from xdit_backend.parallel.vae_memory import (
    MARGIN,
    ActivationBytes,
    RowPlanner,
    free_bytes,
    least_free,
    meta_copy,
    need_of,
)
from xdit_backend.parallel.vae_rows import Ranks, SplitOptions, decode_rows, encode_rows
from xdit_backend.protocol.errors import ConfigError

SIZE = (1, 48, 8)


def peak_bytes(rank, world_size, kind, way, block_size):
    vae, ranks = tiny_vae(kind, torch.float32), Ranks(dist.group.WORLD)
    given = latent(kind, *SIZE, torch.float32) if way == "decode" else image(kind, *SIZE, torch.float32)
    with ActivationBytes() as footprint:
        if way == "decode":
            decode_rows(vae, given, ranks, options=SplitOptions(block_size=block_size, on_frames=lambda share: None))
        else:
            encode_rows(vae, given, KINDS[kind].scale, ranks, options=SplitOptions(block_size=block_size))
    return footprint.peak_bytes


@pytest.mark.parametrize("way", ["decode", "encode"])
@pytest.mark.parametrize("kind, world_size", [
    ("sd", 2), ("ltx", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        ("sd", 1), ("sd", 3), ("wan", 2), ("hunyuan", 2), ("cogvideox", 2)])])
def test_measured_memory_is_what_was_estimated(kind, way, world_size):
    """But for the halos: at this size a rank borrows two rows for each 64 to 384 of its own."""
    shape, scale = ((latent(kind, *SIZE).shape, 1) if way == "decode"
                    else (image(kind, *SIZE).shape, KINDS[kind].scale))
    meta_model = meta_copy(tiny_vae(kind, torch.float32))
    need = need_of(meta_model, shape, scale, world_size, unblocked=world_size == 1)

    measured = max(run_ranks(peak_bytes, world_size, kind, way, None if world_size == 1 else 8))

    assert 0.85 * need.peak_bytes < measured < 1.1 * need.peak_bytes


def peak_bytes_by_frames(rank, world_size, shape):
    with ActivationBytes() as footprint:
        share = decode_rows(tiny_vae("ltx", torch.float32), torch.ones(shape), Ranks(dist.group.WORLD),
                            options=SplitOptions(block_size=4))
    return footprint.peak_bytes, share.dim


def test_memory_by_frames_is_what_was_estimated_too():
    """But for a frame before a rank's own, and the halos."""
    shape = (1, 8, 49, 4, 4)
    meta_model = meta_copy(tiny_vae("ltx", torch.float32))
    one, two = (need_of(meta_model, shape, 1, count).peak_bytes for count in (1, 2))

    measured, dims = zip(*run_ranks(peak_bytes_by_frames, 2, shape))

    assert dims == (-3, -3)
    assert 0.9 * two < max(measured) < 1.15 * two
    assert two < 0.56 * one


@pytest.mark.parametrize("kind", ["hunyuan", "cogvideox", "wan"])
def test_memory_does_not_grow_with_the_frames_of_what_is_decoded_in_pieces(kind):
    """Only that at the latent's scale does, of which Wan's has none but the latent."""
    meta_model = meta_copy(tiny_vae(kind, torch.float32))
    short, long = (need_of(meta_model, (1, 4, num_frames, 16, 16), 1, 1).peak_bytes for num_frames in (5, 17))

    assert long < (1.02 if kind == "wan" else 1.2) * short


@pytest.mark.parametrize("kind", ["hunyuan", "cogvideox", "wan"])
def test_a_vae_that_keeps_its_frames_needs_more_for_more_of_them(kind, monkeypatch):
    """What the test before would notice."""
    monkeypatch.setattr(vae_memory, "decode_rows", lambda vae, latent, options: decode_rows(
        vae, latent, options=dataclasses.replace(options, on_frames=None)))
    meta_model = meta_copy(tiny_vae(kind, torch.float32))
    short, long = (need_of(meta_model, (1, 4, num_frames, 16, 16), 1, 1).peak_bytes for num_frames in (5, 17))

    assert long > (1.02 if kind == "wan" else 1.2) * short


@pytest.mark.parametrize("kind", ["hunyuan", "cogvideox", "wan"])
def test_frames_are_those_of_a_decode_of_all(kind):
    vae, given, shares = tiny_vae(kind, torch.float32), latent(kind, 5, 6, 7, torch.float32), []

    assert decode_rows(vae, given, options=SplitOptions(on_frames=shares.append)) is None
    assert len(shares) > 1
    assert torch.equal(torch.cat([share.tensor for share in shares], 2), decode_rows(vae, given).tensor)


@pytest.mark.parametrize("kind", ["sd", "wan"])
def test_two_ranks_each_need_at_most_055_of_what_one_needs(kind):
    alone, = run_ranks(peak_bytes, 1, kind, "decode", 8)

    assert max(run_ranks(peak_bytes, 2, kind, "decode", 8)) <= 0.55 * alone


def least(rank, world_size, free, machines):
    return least_free(free[rank], Ranks(dist.group.WORLD, machines), torch.device("cpu"))


@pytest.mark.parametrize("machines, expected", [((), 30), (("", "", "other"), 45), (("", "other", "third"), 90)])
def test_ranks_share_free_memory_with_those_on_the_same_machine_alone(machines, expected):
    """Devices of two machines have the same numbers."""
    assert run_ranks(least, 3, (90, 100, 200), machines) == [expected] * 3


def plan(rank, world_size, kind, shape, scale, free):
    try:
        return RowPlanner(tiny_vae(kind, torch.float32)).plan(shape, scale, Ranks(dist.group.WORLD), free[rank])[:2]
    except ConfigError as error:
        return str(error)


def test_convolutions_are_computed_all_at_once_where_there_is_room_and_else_in_blocks():
    shape = latent("sd", *SIZE).shape
    meta_model = meta_copy(tiny_vae("sd", torch.float32))
    need = need_of(meta_model, shape, 1, 1)
    enough, tight = 2 ** 25 // need.row_bytes, int(1.2 * need.peak_bytes)

    assert run_ranks(plan, 1, "sd", shape, 1, [2 ** 62]) == [(None, need.num_convolutions)]
    (block_size, num_convolutions), = run_ranks(plan, 1, "sd", shape, 1, [tight])
    assert 0 < block_size * need.row_bytes <= 0.25 * need.peak_bytes < enough * need.row_bytes
    assert num_convolutions == need.num_convolutions
    assert run_ranks(plan, 2, "sd", shape, 1, [2 ** 62] * 2) == [(None, need.num_convolutions)] * 2
    tight = 2 * int(1.2 * need_of(meta_model, shape, 1, 2).peak_bytes)        # the two share a machine
    (block_size, num_convolutions), other = run_ranks(plan, 2, "sd", shape, 1, [2 ** 62, tight])
    assert (block_size, num_convolutions) == other and block_size > 0 and num_convolutions == need.num_convolutions


def test_every_rank_refuses_what_does_not_fit_on_one_and_says_what_would_do():
    shape = latent("sd", 1, 64, 12).shape
    free = 2 * int(1.1 * need_of(meta_copy(tiny_vae("sd", torch.float32)), shape, 1, 8).peak_bytes * 1.1)

    first, second = run_ranks(plan, 2, "sd", shape, 1, [2 ** 62, free])

    assert first == second
    assert "decoding a latent of 12 x 64 needs" in first and "on each of 2 devices" in first
    assert any(f", {number} devices like these, or VAE Decode" in first for number in (7, 8))
    width, height = map(int, re.search(r"an image of at most (\d+) x (\d+) pixels, ", first).groups())
    pixels = 4                                                 # of this tiny VAE, along one side of a row
    meta_model, rows = meta_copy(tiny_vae("sd", torch.float32)), height // pixels
    columns = width // pixels
    assert height % pixels == width % pixels == 0 and rows < 64 and columns == max(2, 12 * rows // 64)
    needed = [need_of(meta_model, [*shape[:-2], size, max(2, 12 * size // 64)], 1, 2).peak_bytes * MARGIN
              for size in (rows, rows + max(1, rows // 16))]
    assert needed[0] <= free / 2 < needed[1]


def test_refuses_what_fits_on_no_number_of_devices():
    message, = run_ranks(plan, 1, "wan", image("wan", 1, 2, 2).shape, 8, [1000])

    assert ("encoding 16 x 16 pixels and 9 frames needs" in message
            and "Use a smaller image, or VAE Encode (Tiled)" in message)


def test_tells_the_free_memory_of_this_machine_or_of_its_container(monkeypatch):
    assert 2 ** 20 < free_bytes(torch.device("cpu"))
    monkeypatch.setattr(vae_memory, "available_memory", lambda: (12345, 2 ** 30))
    assert free_bytes(torch.device("cpu")) == 12345


def test_views_and_inputs_are_counted_once():
    given = torch.ones(1000)
    with ActivationBytes() as footprint:
        view = given[:10]
        made = given + 1
        other = made.view(10, 100)[0]
        del made

        assert footprint.activation_bytes == 4000
        del other
    assert (footprint.activation_bytes, footprint.peak_bytes) == (0, 4000)
    assert view.numel() == 10


# Sizes that one rank could not hold

STABLE_DIFFUSION = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 4,
                    "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}


def thin_vae(attention=True):
    """Stable Diffusion's structure with 4 channels: three levels of upsampling, attention in the middle."""
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        mid_block_add_attention=attention).eval()


def decode_thin(rank, world_size, side, attention):
    """(first row, the first two rows, the most rows a convolution gives as a share of the image's, peak bytes)"""
    vae, shares = thin_vae(attention), []
    given = torch.randn(1, 4, side, side, generator=torch.Generator().manual_seed(0))

    def note(module, inputs, output):
        shares.append(output.shape[-2] / output.shape[-1])

    for module in vae.decoder.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    with ActivationBytes() as footprint:
        share = decode_rows(vae, given, Ranks(dist.group.WORLD), options=SplitOptions(block_size=64))
    return share.start, share.tensor[:, :, :2].clone(), max(shares), footprint.peak_bytes


def test_a_thin_decoder_on_8_ranks_holds_an_eighth_of_the_rows():
    by_rank = run_ranks(decode_thin, 8, 64, True)

    with torch.inference_mode():
        whole = thin_vae().decode(torch.randn(1, 4, 64, 64, generator=torch.Generator().manual_seed(0))).sample
    need = need_of(meta_copy(thin_vae()), (1, 4, 64, 64), 1, 8)
    for start, rows, share, peak_bytes in by_rank:
        within((rows - whole[:, :, start:start + 2]).abs().max(), 1e-5)
        assert share == 1 / 8 and peak_bytes < 1.3 * need.peak_bytes


LARGE = (1, 4, 1280, 1280)                                     # of 10,240 x 10,240 pixels


class Given(TorchDispatchMode):
    """While active, notes how many rows convolutions have beyond an eighth of the picture's, at the scale of each."""

    def __init__(self):
        super().__init__()
        self.borrowed = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in vae_memory.CONVOLUTIONS:
            rows, columns = args[0].shape[-2:]
            self.borrowed.append(rows - columns / 8)
        return function(*args, **(kwargs or {}))


def decode_without_bytes(rank, world_size, ranks):
    """(first row, shape, the most rows that a convolution borrows, peak bytes) of each of these ranks of eight."""
    dist.destroy_process_group()
    with torch.device("meta"):
        vae, results = AutoencoderKL(**STABLE_DIFFUSION).eval(), []
    for one in ranks:
        # what others send is not there, its shape is
        dist.init_process_group("fake", store=FakeStore(), rank=one, world_size=8)
        with Given() as given, ActivationBytes() as footprint:
            share = decode_rows(vae, torch.empty(LARGE, device="meta"), Ranks(dist.group.WORLD))
        results.append((share.start, share.tensor.shape, max(given.borrowed), footprint.peak_bytes))
        dist.destroy_process_group()
    return results


def test_of_10240_pixels_each_of_8_ranks_has_an_eighth_of_the_rows_and_of_the_memory():
    """Stable Diffusion's decoder, with its attention, on the meta device: 322 GB in float32, or 40 GB on each rank."""
    ranks = (0, 3)
    with torch.device("meta"):
        alone, eighth = (need_of(AutoencoderKL(**STABLE_DIFFUSION).eval(), LARGE, 1, count, unblocked=True).peak_bytes
                         for count in (1, 8))

    results, = run_ranks(decode_without_bytes, 1, ranks)

    assert [(start, shape) for start, shape, *_ in results] == [(rank * 1280, (1, 3, 1280, 10240)) for rank in ranks]
    for _, _, borrowed, peak_bytes in results:
        assert 0 <= borrowed <= 2                              # one on either side
        assert eighth <= 1.001 * alone / 8 and eighth <= peak_bytes <= 1.001 * eighth


@pytest.mark.slow
def test_decodes_10240_pixels_on_8_ranks_with_an_eighth_of_the_rows_on_each():
    """Without attention, whose time grows with the square of the pixels: hours here.
    One rank would need eight times as much memory."""
    need = need_of(meta_copy(thin_vae(attention=False)), LARGE, 1, 8)
    by_rank = run_ranks(decode_thin, 8, LARGE[-1], False, timeout_s=3600)

    assert [start for start, *_ in by_rank] == [rank * 1280 for rank in range(8)]
    assert all(share == 1 / 8 and torch.isfinite(rows).all() for _, rows, share, _ in by_rank)
    assert max(peak for *_, peak in by_rank) < 1.1 * need.peak_bytes
