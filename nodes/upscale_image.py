"""Distributed Upscale Image: Upscale Image (using Model) with the tiles and frames distributed over the devices."""

from comfy_api.latest import io

from ..xdit_backend.config import ParallelConfig
from .bridge.compatibility.input_checks import check_links
from .parallel_config import Parallel


class XDiTUpscaleImage(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTUpscaleImage",
            display_name="Distributed Upscale Image",
            category="xDiT",
            description="Upscales images or the frames of a video with an upscale model, with the tiles and frames "
                        "distributed over all devices. Equal to Upscale Image (using Model).",
            search_aliases=["upscale", "upscaler", "super resolution", "enlarge image", "esrgan", "multi gpu"],
            inputs=[
                io.UpscaleModel.Input("upscale_model", tooltip="The upscale model, from Load Upscale Model."),
                io.Image.Input("image", tooltip="The image to be upscaled; for a video, the frames."),
                Parallel.Input("parallel", optional=True,
                               tooltip="Settings from xDiT Parallel Config. Not connected: the running workers, or all "
                               "GPUs if there are none."),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, upscale_model, image, parallel=None) -> io.NodeOutput:
        check_links(upscale_model=upscale_model, image=image, parallel=parallel)
        from .bridge.upscale.distributed_upscale import upscale  # ComfyUI's node needs spandrel, which is optional
        return io.NodeOutput(upscale(upscale_model, image, parallel or ParallelConfig()))
