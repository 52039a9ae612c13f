"""Tile upscalers in the manner of UltimateSDUpscale, with ComfyUI's nodes on the MODEL of Load xDiT Model: each tile is
encoded, sampled by KSampler with part of the noise, decoded and pasted into the image. The result equals that of
ComfyUI's own loaders."""

import pytest
import torch

from tests.support.tolerances import close

# tiles of one prompt: rows and columns of pixels, of the image and of its seams. With smaller ones, norms of the thin
# U-Net see one pixel, and amplify rounding.
TILES = [(64, 64), (64, 96)]


class TileUpscaler:
    """Two nodes of a graph that share one MODEL: samples an image tile by tile, then its seams in other tiles."""

    def __init__(self, comfyui, model, positive, negative, vae, encode, decode):
        self._comfyui, self._model, self._conditioning = comfyui, model, (positive, negative)
        self._vae, self._encode, self._decode = vae, encode, decode
        self.shapes = []

    def run(self, image_BHWC, tile, offset=(0, 0), seed=5):
        """Sample the tiles from `offset` on, in rows; the last ones end at the image's border."""
        result = image_BHWC.clone()
        rows, columns = result.shape[1:3]
        for number, (top, left) in enumerate((top, left) for top in range(offset[0], rows - offset[0], tile[0])
                                             for left in range(offset[1], columns - offset[1], tile[1])):
            bottom, right = min(top + tile[0], rows), min(left + tile[1], columns)
            piece = result[:, top:bottom, left:right]
            result[:, top:bottom, left:right] = self._sampled(piece, seed + number)
        return result

    def _sampled(self, piece, seed):
        self.shapes.append(tuple(piece.shape[1:3]))
        latent = {"samples": self._encode(self._vae, piece)}
        sampled = self._comfyui.nodes.KSampler().sample(self._model, seed, 4, 4.0, "euler", "simple",
                                                        *self._conditioning, latent, denoise=0.5)[0]
        return self._decode(self._vae, sampled).reshape(piece.shape)


def graph(comfyui, model, kind, vae, encode, decode):
    """(image of the graph, shapes of the tiles): tiles and smaller remainders, then the seam between their rows."""
    upscaler = TileUpscaler(comfyui, model, comfyui.conditioning(kind, 1), comfyui.conditioning(kind, 2), vae, encode,
                            decode)
    image = torch.rand(1, 128, 160, 3, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        whole = upscaler.run(image, TILES[0])
        return upscaler.run(whole, TILES[1], offset=(32, 0), seed=50), upscaler.shapes


def nodes_of(comfyui):
    """(encode, decode) of ComfyUI's own nodes."""
    return (lambda vae, pixels: comfyui.nodes.VAEEncode().encode(vae, pixels)[0]["samples"],
            lambda vae, latent: comfyui.nodes.VAEDecode().decode(vae, latent)[0])


def distributed(comfyui, config):
    """(encode, decode) of the distributed nodes."""
    return (lambda vae, pixels: comfyui.vae_encode.execute(pixels, vae, config).args[0]["samples"],
            lambda vae, latent: comfyui.vae_decode.execute(latent, vae, config).args[0])


@pytest.mark.parametrize("kind, vae, degrees", [("sd3", "vae-sd3", {"cfg": 2}), ("sd3", "vae-sd3", {"ulysses": 2}),
                                                ("sd15", "vae-sd", {"cfg": 2})], ids=str)
def test_tiles_of_several_sizes_in_one_prompt_equal_comfyuis(comfyui, vae_of, kind, vae, degrees):
    config, vae = comfyui.config("cpu,cpu", **degrees), vae_of(vae, encoder=True)
    want, shapes = graph(comfyui, comfyui.native(kind), kind, vae, *nodes_of(comfyui))
    model = comfyui.ours(kind, config)
    result, again = graph(comfyui, model, kind, vae, *distributed(comfyui, config))
    mixed, _ = graph(comfyui, model, kind, vae, *nodes_of(comfyui))

    assert shapes == again and set(shapes) == {(64, 64), (64, 32), (64, 96)} and want.std() > 0.01
    close(result, want, 1e-4)
    close(mixed, want, 1e-4)


@pytest.mark.parametrize("mutant", ["a tile not sampled", "another seed"])
def test_the_comparison_notices_a_wrong_tile(comfyui, vae_of, monkeypatch, mutant):
    config, vae = comfyui.config("cpu,cpu", cfg=2), vae_of("vae-sd3", encoder=True)
    want, _ = graph(comfyui, comfyui.native("sd3"), "sd3", vae, *nodes_of(comfyui))
    sampled_tile = TileUpscaler._sampled

    def wrong(upscaler, piece, seed):
        if len(upscaler.shapes) == 2:
            upscaler.shapes.append(tuple(piece.shape[1:3]))
            return piece if mutant == "a tile not sampled" else sampled_tile(upscaler, piece, seed + 1)
        return sampled_tile(upscaler, piece, seed)
    monkeypatch.setattr(TileUpscaler, "_sampled", wrong)
    result, _ = graph(comfyui, comfyui.ours("sd3", config), "sd3", vae, *distributed(comfyui, config))

    with pytest.raises(AssertionError):
        close(result, want, 1e-4)
