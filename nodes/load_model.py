"""Load xDiT Model: Load Diffusion Model for several GPUs."""

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
            description="Loads a diffusion model onto all devices: a file for Load Diffusion Model of one of the "
                        "supported families (see the help page), or the diffusion model of an all-in-one checkpoint.",
            search_aliases=["load diffusion model", "unet loader", "multi gpu"],
            inputs=[
                io.Combo.Input("model_name", options=model_names(), tooltip=f"A .safetensors file of "
                               f"{supported(last='or')}, in models/diffusion_models or models/checkpoints; a .gguf "
                               f"file in models/diffusion_models; or a folder in models/diffusers."),
                io.Combo.Input("weight_dtype", options=list(WEIGHT_DTYPES), default="default",
                               tooltip="The data type of the weights. default: the same as in ComfyUI's own loader; "
                               "quantised files stay quantised. fp8_e4m3fn and fp8_e5m2 halve the memory and change "
                               "the image slightly; fp8_e4m3fn_fast also uses fp8 matrix multiplication on GPUs that "
                               "support it. int8 (one scale per row) halves the memory, nf4 needs a little over a "
                               "quarter: both quantise linear layers at load time (nf4 requires the package "
                               "bitsandbytes)."),
                Parallel.Input("parallel", optional=True,
                               tooltip="Settings from xDiT Parallel Config. Not connected: all GPUs, and the split is "
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
        """Return a value that changes when the model's files are replaced; ComfyUI then runs the node again."""
        return fingerprint(path_of(model_name))
