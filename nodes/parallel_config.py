"""xDiT Parallel Config: devices and degrees."""

from comfy_api.latest import io

from ..xdit_backend.config import ParallelConfig
from .bridge.groups import devices_of

Parallel = io.Custom("XDIT_PARALLEL")

DEGREES = {
    "cfg_degree": "2: the two branches of guidance on different devices. The fastest split; needs cfg above 1.",
    "data_degree": "Images of a batch on different devices.",
    "pipefusion_degree": "Stages of a pipeline, each with its part of the model. Not available yet: must be 1.",
    "ring_degree": "Ring sequence parallelism: tokens on different devices, any number of heads.",
    "ulysses_degree": "Ulysses sequence parallelism: must divide the model's attention heads.",
    "tensor_degree": "Every layer spread over devices. Not available yet: must be 1.",
}


class XDiTParallelConfig(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTParallelConfig",
            display_name="xDiT Parallel Config",
            category="xDiT",
            description="Which devices run the model, and how the work is split. Without this node all GPUs are used and the "
                        "split is chosen for each run.",
            search_aliases=["multi gpu", "ulysses", "ring", "usp", "cfg parallel", "pipefusion"],
            inputs=[
                io.String.Input("devices", default="auto", tooltip='"auto" takes every GPU, or one CPU worker where there is none. '
                                'Or name them: "cuda:0,cuda:1", "cpu,cpu".'),
                io.Combo.Input("mode", options=["auto", "manual"], default="auto", tooltip="auto chooses the degrees for each "
                               "run. manual uses the degrees below; their product must equal the number of devices."),
                *(io.Int.Input(name, default=1, min=1, max=64, tooltip=text) for name, text in DEGREES.items()),
                io.Int.Input("num_patches", default=0, min=0, max=64, tooltip="PipeFusion's pieces of the image. 0: chosen. Used "
                             "when pipefusion_degree is above 1."),
                io.Int.Input("warmup_steps", default=1, min=0, max=100, tooltip="First steps that run whole before PipeFusion "
                             "uses stale keys and values. Used when pipefusion_degree is above 1."),
            ],
            outputs=[Parallel.Output(display_name="parallel")],
        )

    @classmethod
    def validate_inputs(cls, **values):
        """Refuse impossible settings when the workflow is queued; ComfyUI shows the text on the node."""
        try:
            devices_of(ParallelConfig(**{name: value for name, value in values.items() if value is not None}))
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, **values) -> io.NodeOutput:
        config = ParallelConfig(**values)
        devices_of(config)
        return io.NodeOutput(config)
