"""MiniMax H3's VAE at its full size, four tiles of a few frames, shared by two ranks: no rank holds more than is
forecast, no operator mixes devices, and the host waits for none."""

import pytest
import torch
import torch.distributed as dist

from tests.unit.tools.dry_run.rows import place_of
from xdit_backend.autoencoders import FAMILIES
from xdit_backend.checkpoints.build_vae import class_of
from xdit_backend.comfyui.install_location import find_comfyui
from xdit_backend.comfyui.native_models import able_to_compute
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.parallel.vae_rows import Ranks, decode_rows, encode_rows
from xdit_backend.parallel.vae_tile_memory import tiles_of
from xdit_backend.tools.dry_run.fake_cuda import CUDA, fake_cuda_device, fake_group
from xdit_backend.tools.dry_run.op_counter import DeviceWork

pytestmark = pytest.mark.skipif(find_comfyui() is None, reason="there is no ComfyUI; set XDIT_COMFYUI to its folder")
SHAPES = {"decode": ((1, 24, 7, 24, 24), 1), "encode": ((1, 3, 17, 384, 384), 16)}
RESULTS = {"decode": (1, 3, 22, 384, 384), "encode": (1, 24, 2, 24, 24)}


def full_size():
    family = FAMILIES["minimax_h3"]
    cls = class_of(family)
    with torch.device("meta"), able_to_compute():
        return cls().to(torch.float16).eval().requires_grad_(False)


def there(tensor):
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
    return torch.nn.Parameter(made, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else made


def counted(way, rank):
    """(DeviceWork of this rank of two, bytes before it, the Share)."""
    vae, (shape, scale) = full_size(), SHAPES[way]
    with fake_group(rank, 2), fake_cuda_device(), DeviceWork() as work:
        for module in vae.modules():
            for own in (module._parameters, module._buffers):
                own |= {name: there(tensor) for name, tensor in own.items() if tensor is not None}
        given, before_bytes = torch.empty(shape, dtype=vae.dtype, device=CUDA), work.resident_bytes
        work.start_over()
        ranks = Ranks(dist.group.WORLD)
        # what is pretended knows no inference mode; nothing asks for a gradient
        share = (decode_rows.__wrapped__(vae, given, ranks, Traffic()) if way == "decode"
                 else encode_rows.__wrapped__(vae, given, scale, ranks, Traffic()))
    return work, before_bytes, share


@pytest.mark.parametrize("way", SHAPES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_lives_in_what_was_forecast(way, rank):
    work, before_bytes, share = counted(way, rank)
    tiles = tiles_of(full_size().to("meta"), *SHAPES[way])

    assert work.mixed == {}
    # without bytes, of what is on the meta device
    assert {place_of(wait) for wait in work.waits} <= ({f"copy at vae.py {way}"} if rank else set())
    assert tiles.num_tiles == 4 and 0 < work.peak_bytes - before_bytes < tiles.peak_bytes < 3e9
    assert share is None if rank else tuple(share.tensor.shape) == RESULTS[way]
