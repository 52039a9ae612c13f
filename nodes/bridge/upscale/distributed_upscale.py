"""Distributed upscaling: ComfyUI's node ImageUpscaleWithModel, whose tiles the workers compute.

The node is executed unmodified, so that tiles, blending, progress and the smaller tiles after an out-of-memory error
are ComfyUI's own. Its upscale model is a TiledUpscaler, which has the workers compute the tiles before the node
requests them.
"""

import time

import torch

from comfy_extras.nodes_upscale_model import ImageUpscaleWithModel

from ....xdit_backend.checkpoints.build_upscaler import NODE
from ....xdit_backend.host.upscale_tiles import LEAST_TILE, TILE, assign_tiles, tiles_of
from ....xdit_backend.protocol.errors import UnsupportedError, WorkerOutOfMemoryError
from ..workers.worker_groups import GROUPS, check_packages, show_text
from .upscaler_patcher import remote_upscaler


def upscale(upscale_model, image, config):
    """Upscale an IMAGE (B, H, W, C) with an UPSCALE_MODEL; returns what ImageUpscaleWithModel returns.

    Raises UnsupportedError for upscale models that the workers cannot reproduce, and for images that the model does not
    take.
    """
    check_packages()
    client = GROUPS.client_for_decode(config)
    remote = remote_upscaler(upscale_model, client)
    if image.ndim != 4 or image.shape[-1] != upscale_model.input_channels:
        raise UnsupportedError(f"Connect an image of {upscale_model.input_channels} channels: the image has the shape "
                               f"{tuple(image.shape)}, and this upscale model takes {upscale_model.input_channels} "
                               "channels.")
    GROUPS.runs.begin_alone(client.devices)
    started_s, tiled = time.perf_counter(), TiledUpscaler(upscale_model, remote, image.movedim(-1, -3))
    try:
        [result] = ImageUpscaleWithModel.execute(tiled, image).args
        tiled.check_complete()
    except TileMemoryError as error:                           # the smallest tile is too large too
        show_text(GROUPS.runs.describe_interruption(error.__cause__))
        raise error.__cause__ from None
    except BaseException as error:
        show_text(GROUPS.runs.describe_interruption(error))    # replaces the progress
        raise
    finally:
        tiled.close()
    count = len(client.devices)
    GROUPS.runs.collect(client, client.report_if_idle)
    show_text(f"upscaled in {time.perf_counter() - started_s:.1f} s on {count} device{'s' * (count > 1)}"
              + f", tiles of {tiled.tile} pixels" * (tiled.tile < TILE))
    return result


class TileMemoryError(torch.OutOfMemoryError):
    """Out-of-memory error for ComfyUI's node, which then uses smaller tiles. Its cause: the worker's."""


class TiledUpscaler:
    """An upscale model for ImageUpscaleWithModel, which calls it with one tile after the other. The workers compute the
    tiles ahead, in the order of host/upscale_tiles.py. Other attributes are those of the UPSCALE_MODEL.

    upscale_model: the UPSCALE_MODEL. remote: its RemoteUpscaler. images_BCHW: what the node splits into tiles.
    """

    def __init__(self, upscale_model, remote, images_BCHW):
        self._upscale_model, self._remote, self._images = upscale_model, remote, images_BCHW
        self.patcher, self.tile = remote.patcher, TILE
        self._tiles, self._upscaled, self._num_taken = [], None, 0

    def __getattr__(self, name):
        return getattr(self._upscale_model, name)

    def __call__(self, tile_BCHW):
        """Upscale a tile, (1, C, H, W) float32 in [0, 1]; returns (1, C', H * scale, W * scale).

        Raises TileMemoryError if a worker is out of memory, and UnsupportedError if it is not the next tile.
        """
        if self._upscaled is None:
            self._begin()
        self._check_tile(tile_BCHW)
        self._num_taken += 1
        try:
            return next(self._upscaled)
        except WorkerOutOfMemoryError as error:
            self.close()
            if self.tile // 2 >= LEAST_TILE:
                self.tile //= 2
            raise TileMemoryError(str(error)) from error

    def check_complete(self):
        """Raise UnsupportedError if ComfyUI's node has not requested every tile."""
        if self._num_taken < len(self._tiles) or (self._upscaled is None and self._images.numel()):
            raise _newer_node(f"it used {self._num_taken} of {len(self._tiles)} tiles")

    def close(self):
        """Have the workers abort tiles that nobody needs any more."""
        if self._upscaled is not None:
            self._upscaled.close()
        self._upscaled = None

    def _begin(self):
        num_images, _, rows, columns = self._images.shape
        self._tiles, self._num_taken = tiles_of(num_images, rows, columns, self.tile), 0
        workers = self._remote.client.workers
        ranks = assign_tiles(self._tiles, workers.speeds or (1,) * len(workers.devices))
        self._upscaled = self._remote.client.upscalers.upscale(
            self._remote.name, [lambda tile=tile: tile.of(self._images).float() for tile in self._tiles], ranks,
            self._upscale_model.scale, self._upscale_model.output_channels)

    def _check_tile(self, tile_BCHW):
        if self._num_taken == len(self._tiles):
            raise _newer_node(f"it has more than {len(self._tiles)} tiles")
        known = self._tiles[self._num_taken].of(self._images).float()
        if known.shape != tile_BCHW.shape:
            raise _newer_node(f"tile {self._num_taken} has the shape {tuple(tile_BCHW.shape)}, where the pack knows "
                              f"{tuple(known.shape)}")
        if not torch.allclose(known, tile_BCHW.to(known.device), 0, 0, equal_nan=True):
            raise _newer_node(f"tile {self._num_taken} has other pixels")


def _newer_node(what):
    return UnsupportedError(f"Update xDiT, or use {NODE}: this ComfyUI splits the image into other tiles than the pack "
                            f"knows: {what}.")
