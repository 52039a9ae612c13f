"""Distributed VAE Decode: VAE Decode with the rows of the image split across devices."""

from comfy_api.latest import io

from ..xdit_backend.autoencoders import supported
from ..xdit_backend.config import ParallelConfig
from .bridge.compatibility.input_checks import check_links
from .bridge.vae.distributed_vae import decode
from .parallel_config import Parallel


class XDiTVAEDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTVAEDecode",
            display_name="Distributed VAE Decode",
            category="xDiT",
            description="Decodes a latent image on all devices, split by rows. Equal to VAE Decode, without tile "
                        "seams.",
            search_aliases=["vae decode", "decode", "latent to image", "multi gpu"],
            inputs=[
                io.Latent.Input("samples", tooltip="The latent to be decoded."),
                io.Vae.Input("vae", tooltip=f"The VAE of {supported(last='or')}."),
                Parallel.Input("parallel", optional=True,
                               tooltip="Settings from xDiT Parallel Config. Not connected: the running workers, or all "
                               "GPUs if there are none."),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, samples, vae, parallel=None) -> io.NodeOutput:
        check_links(samples=samples, vae=vae, parallel=parallel)
        return io.NodeOutput(decode(vae, samples["samples"], parallel or ParallelConfig()))
