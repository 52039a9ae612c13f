"""xDiT Parallel Config: devices and degrees."""

from comfy_api.latest import io

from ..xdit_backend.config import APPROXIMATE, ATTENTIONS, COMPILES, DISPLACED_MODES, WARMUPS, ParallelConfig
from ..xdit_backend.protocol.specs import EXCHANGES
from .bridge.workers.worker_groups import devices_of, show_text

Parallel = io.Custom("XDIT_PARALLEL")

DEGREES = {
    "cfg_degree": "2: the two branches of guidance on different devices. Sends the least between devices; needs cfg "
                  "above 1.",
    "data_degree": "Images of a batch on different devices.",
    "pipefusion_degree": "Stages of a pipeline, each holding its part of the model: for models too large for one "
                         "device, and for devices with a slow connection. Pieces of the image flow through the stages "
                         "and use keys and values of the step before, so the picture differs a little from one "
                         "device's.",
    "ring_degree": "Ring sequence parallelism: tokens on different devices, any number of heads.",
    "ulysses_degree": "Ulysses sequence parallelism: must divide the model's attention heads.",
    "tensor_degree": "Every layer spread over devices: each holds its part of the weights and computes its part of "
                     "each layer, and the picture is one device's but for rounding. For models too large for one "
                     "device; sends much, so devices should have fast links. Must divide the model's attention heads.",
}


class XDiTParallelConfig(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTParallelConfig",
            display_name="xDiT Parallel Config",
            category="xDiT",
            description="Which devices run the model, and how the work is split. Without this node all GPUs are used "
                        "and the split is chosen for each run.",
            search_aliases=["multi gpu", "ulysses", "ring", "usp", "cfg parallel", "pipefusion", "distrifusion"],
            inputs=[
                io.String.Input("devices", default="auto",
                                tooltip='"auto" takes every GPU, or two CPU workers where there is none. '
                                'Or name them: "cuda:0,cuda:1", "cpu,cpu". Of another machine: '
                                '"cuda:0,other-pc/cuda:0".'),
                io.Combo.Input("mode", options=["auto", "manual"], default="auto",
                               tooltip="auto chooses the degrees for each run. manual uses the degrees below; their "
                               "product must equal the number of devices."),
                *(io.Int.Input(name, default=1, min=1, max=64, tooltip=text) for name, text in DEGREES.items()),
                *_pipefusion_inputs(),
                *_displaced_inputs(),
                io.Combo.Input("approximate", options=list(APPROXIMATE), default=APPROXIMATE[0], optional=True,
                               tooltip="May the picture differ a little from one device's? allowed: in auto mode, a "
                               "model that is too large for one device runs by PipeFusion, or by tensor parallelism "
                               "where that is about as fast. not allowed: by tensor parallelism, or by stages that "
                               "wait for each other, and degrees of manual mode that change the picture are "
                               "refused. for speed: as allowed, and auto also takes PipeFusion for a model that fits "
                               "where it is forecast to be at least 1.15 times as fast; the devices are measured for "
                               "that."),
                io.String.Input("weights_memory", default="auto", optional=True,
                                tooltip="How much of each device's memory the model's weights may take. The others "
                                "stay in the computer's memory and come to the device in every step, while it "
                                "computes: the picture is the same. auto: as much as the run leaves, and all where "
                                'they fit. A number: so many GB, such as "10". "all on the device": a model that does '
                                "not fit is refused."),
                *_computing_inputs(),
            ],
            outputs=[Parallel.Output(display_name="parallel")],
        )

    @classmethod
    def validate_inputs(cls, **values):
        """Refuse impossible settings when the workflow is queued; ComfyUI shows the text on the node.

        Raised, not returned: what is returned ComfyUI repeats for each widget this takes, and the rules need them all.
        """
        devices_of(ParallelConfig(**{name: value for name, value in values.items() if value is not None}))
        return True

    @classmethod
    def execute(cls, **values) -> io.NodeOutput:
        config = ParallelConfig(**values)
        devices = devices_of(config)
        named = [name.strip() for name in config.devices.lower().split(",") if name.strip()]
        if named != ["auto"] and len(named) != len(devices):
            show_text(f"devices names {', '.join(named)}: of these, this machine runs on {', '.join(devices)}")
        return io.NodeOutput(config)


def _pipefusion_inputs():
    return [
        io.Int.Input("num_patches", default=0, min=0, max=64,
                     tooltip="PipeFusion's pieces of the image. 0: twice the stages. 1: no stale keys and values, the "
                     "exact picture, and stages wait for each other. The node that samples says so where it is not "
                     "used: pipefusion_degree is 1."),
        io.Int.Input("warmup_steps", default=1, min=0, max=100,
                     tooltip="First steps that run whole before PipeFusion or DistriFusion uses the step before. More "
                     "is closer to one device's picture, and slower."),
        io.String.Input("stage_blocks", default="", optional=True,
                        tooltip="How many of the model's blocks each stage of "
                        'PipeFusion runs, such as "20,37" for unlike devices. Empty: balanced.'),
        io.Combo.Input("warmup", options=list(WARMUPS), default="auto", optional=True,
                       tooltip="How PipeFusion's warm-up steps run. whole: the image through one stage after the "
                       "other. micro_batches: images and both branches of guidance follow each other through the "
                       "stages. sequence: by sequence parallelism, for which every device holds the whole model. auto: "
                       "sequence where that takes less than 40 % of a device's memory, else micro_batches. The picture "
                       "is the same."),
        io.Boolean.Input("offload_keys_values", default=False, optional=True,
                         tooltip="Keep PipeFusion's keys and values in the host's memory and fetch them layer by "
                         "layer, for resolutions where they outgrow the device."),
        io.Float.Input("forecast_keys_values", default=0.6, min=0.0, max=1.0, step=0.05, optional=True,
                       tooltip="PipeFusion and DistriFusion: keys and values of the step before go on as they went "
                       "until then, instead of being as they were. Nearer to one device's picture at the same speed, "
                       "but keeps them twice. 0: as they were, kept once. 1: in full."),
    ]


def _displaced_inputs():
    return [
        io.Int.Input("displaced_degree", default=1, min=1, max=64, optional=True,
                     tooltip="DistriFusion: each device has its rows of the picture, in every layer, and sees the "
                     "other devices' as they were a step before. For U-Nets (SD 1.5, SDXL) with one picture; the "
                     "picture differs a little from one device's. Never chosen by auto."),
        io.Combo.Input("displaced_mode", options=list(DISPLACED_MODES), default=DISPLACED_MODES[0],
                       optional=True, tooltip="What DistriFusion has fresh after the warm-up steps. auto: "
                       "corrected_async_gn, or sync_gn where a device has fewer than 4 rows of a U-Net's smallest "
                       "images; the node that samples says which. corrected_async_gn: its own rows, and norms "
                       "corrected by them. sync_gn: norms too, for which devices wait in each; nearer to one device's "
                       "picture. full_sync: everything, the exact picture, and the slowest. The others are for "
                       "comparison."),
    ]


def _computing_inputs():
    return [
        io.Combo.Input("compile", options=list(COMPILES), default=COMPILES[0], optional=True,
                       tooltip="blocks: the workers run each block of the model as torch.compile makes it, "
                       "with fewer and larger kernels. The first step takes the minutes that compiling takes, "
                       "and each new size of picture again; for many pictures of one size. The picture is "
                       "the same but for rounding. TorchCompileModel does the same for one MODEL."),
        io.Combo.Input("attention", options=list(ATTENTIONS), default=ATTENTIONS[0], optional=True,
                       tooltip="What computes attention. as ComfyUI: what ComfyUI was started with "
                       "(--use-sage-attention, --use-flash-attention, or xFormers where it is installed), else "
                       "PyTorch's own, and PyTorch's own where that does not fit. sdpa: PyTorch's own. flash "
                       "(FlashAttention 2), flash3 (FlashAttention 3), xformers: the same picture but for "
                       "rounding. sage (SageAttention): rounds to 8 bits, faster, and the picture differs a "
                       "little. Each needs its package in ComfyUI's Python; attention with a mask is "
                       "PyTorch's own, but for xformers."),
        io.Combo.Input("exchange", options=list(EXCHANGES), default=EXCHANGES[0], optional=True,
                       tooltip="In which form devices that share a picture's tokens (Ulysses, Ring) send each "
                       "other what attention needs. In fp8 half of the bytes travel, for devices with slow "
                       "links, and the picture differs a little from one device's."),
    ]
