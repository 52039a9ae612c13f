"""Load xDiT Model: where Load Diffusion Model was."""

from comfy_api.latest import io

from ..xdit_backend.config import ParallelConfig
from ..xdit_backend.models import supported
from .bridge.compatibility.input_checks import check_links
from .bridge.model.checkpoint_cache import fingerprint
from .bridge.model.detection import WEIGHT_DTYPES
from .bridge.model.model_paths import model_names, path_of
from .bridge.model.proxy_model import load_proxy
from .parallel_config import Parallel


class XDiTLoadModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTLoadModel",
            display_name="Load xDiT Model",
            category="xDiT",
            description="Loads a diffusion model on all devices: a file that Load Diffusion Model takes, of the "
                        "families that the help page lists, or the diffusion model of an all-in-one checkpoint.",
            search_aliases=["load diffusion model", "unet loader", "multi gpu"],
            inputs=[
                io.Combo.Input("model_name", options=model_names(), tooltip=f"A .safetensors file of "
                               f"{supported(last='or')}, in models/diffusion_models or models/checkpoints; a .gguf "
                               f"file in models/diffusion_models; or a folder of models/diffusers."),
                io.Combo.Input("weight_dtype", options=list(WEIGHT_DTYPES), default="default",
                               tooltip="How the weights are held. default: as ComfyUI's own loader would; what is "
                               "quantised in a file stays so. fp8_e4m3fn and fp8_e5m2 halve the memory and change the "
                               "picture a little; fp8_e4m3fn_fast also multiplies in that type, on cards that can. "
                               "int8 halves it, with a scale for each row, and nf4 takes a bit more than a quarter: "
                               "layers are quantised when they are loaded (nf4: with the package bitsandbytes)."),
                Parallel.Input("parallel", optional=True,
                               tooltip="From xDiT Parallel Config. Not connected: all GPUs, split "
                               "chosen for each run."),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model_name, weight_dtype, parallel=None) -> io.NodeOutput:
        check_links(model_name=model_name, weight_dtype=weight_dtype, parallel=parallel)
        path = path_of(model_name)
        return io.NodeOutput(load_proxy(path, weight_dtype, parallel or ParallelConfig()))

    @classmethod
    def fingerprint_inputs(cls, model_name, **others):
        """ComfyUI runs the node again where this changes: when other files have taken the place of the model's."""
        return fingerprint(path_of(model_name))
