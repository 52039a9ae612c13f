"""Plan of an upscaling: the tiles of ComfyUI's node in its order, and the rank of each."""

import itertools
from dataclasses import dataclass

# of ComfyUI's ImageUpscaleWithModel: pixels of a tile and of the overlap; the smallest tile after out-of-memory errors
TILE, OVERLAP, LEAST_TILE = 512, 32, 128


@dataclass(frozen=True)
class Tile:
    """A rectangle of pixels of one image of a batch."""

    image: int
    top: int
    left: int
    rows: int
    columns: int

    def of(self, images_BCHW):
        """Its pixels, (1, C, rows, columns), a view."""
        return images_BCHW[self.image:self.image + 1, :, self.top:self.top + self.rows,
                           self.left:self.left + self.columns]


def tiles_of(num_images, rows, columns, tile=TILE, overlap=OVERLAP):
    """Return the tiles of a batch of images in the order of comfy.utils.tiled_scale: by image, row and column.

    Tiles of `tile` x `tile` pixels overlap by `overlap`; the last one of a row or column is smaller. An image that fits
    in a tile has one, and an image of 0 pixels none.
    """
    return [Tile(image, top, left, height, width)
            for image in range(num_images if rows and columns else 0)
            for (top, height), (left, width) in itertools.product(_spans(rows, tile, overlap),
                                                                  _spans(columns, tile, overlap))]


def _spans(size, tile, overlap):
    """[(start, length)] of the tiles along one dim."""
    if size <= tile:
        return [(0, size)]
    return [(start, min(tile, size - start)) for start in range(0, size - overlap, tile - overlap)]


def assign_tiles(tiles, speeds):
    """Return the rank of each tile: the one that finishes it first, if it begins its tiles in their order.

    speeds: relative speed of each rank. The time of a tile is that of its pixels. Of ranks that finish at the same
    time, the fastest is used, then the first.
    """
    ends, ranks = [0.0] * len(speeds), []
    for tile in tiles:
        pixels = tile.rows * tile.columns
        rank = min(range(len(speeds)), key=lambda rank: (ends[rank] + pixels / speeds[rank], -speeds[rank], rank))
        ends[rank] += pixels / speeds[rank]
        ranks.append(rank)
    return ranks
