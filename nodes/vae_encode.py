"""Distributed VAE Encode: VAE Encode with the rows of the image split across devices."""

from comfy_api.latest import io

from ..xdit_backend.autoencoders import supported
from ..xdit_backend.config import ParallelConfig
from .bridge.compatibility.input_checks import check_links
from .bridge.vae.distributed_vae import encode
from .parallel_config import Parallel


class XDiTVAEEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTVAEEncode",
            display_name="Distributed VAE Encode",
            category="xDiT",
            description="Encodes an image or video on all devices, split by rows. Equal to VAE Encode, without tile "
                        "seams.",
            search_aliases=["vae encode", "encode", "image to latent", "multi gpu"],
            inputs=[
                io.Image.Input("pixels", tooltip="The image to be encoded; for a video VAE, the frames."),
                io.Vae.Input("vae", tooltip=f"The VAE of {supported(last='or')}."),
                Parallel.Input("parallel", optional=True,
                               tooltip="Settings from xDiT Parallel Config. Not connected: the running workers, or all "
                               "GPUs if there are none."),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, pixels, vae, parallel=None) -> io.NodeOutput:
        check_links(pixels=pixels, vae=vae, parallel=parallel)
        return io.NodeOutput({"samples": encode(vae, pixels, parallel or ParallelConfig())})
