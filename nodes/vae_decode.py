"""Distributed VAE Decode: VAE Decode, with the rows of the picture spread over the devices."""

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
            description="Decodes a latent on all devices, each with its rows of the picture or video. Equal to VAE "
                        "Decode, without tile seams.",
            search_aliases=["vae decode", "decode", "latent to image", "multi gpu"],
            inputs=[
                io.Latent.Input("samples", tooltip="The latent to decode."),
                io.Vae.Input("vae", tooltip=f"The ordinary VAE of {supported(last='or')}."),
                Parallel.Input("parallel", optional=True,
                               tooltip="From xDiT Parallel Config. Not connected: the workers that are "
                               "running, else all GPUs."),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, samples, vae, parallel=None) -> io.NodeOutput:
        check_links(samples=samples, vae=vae, parallel=parallel)
        return io.NodeOutput(decode(vae, samples["samples"], parallel or ParallelConfig()))
