"""xDiT Parallel Config: devices, parallel degrees and options."""

import logging

from comfy_api.latest import io

from ..xdit_backend.config import (
    APPROXIMATE,
    ATTENTIONS,
    COMPILES,
    DENSE,
    DISPLACED_MODES,
    SPARSE_ATTENTIONS,
    WARMUPS,
    ParallelConfig,
)
from ..xdit_backend.protocol.specs import EXCHANGES
from .bridge.workers.worker_groups import describe_missing, devices_of, show_text

log = logging.getLogger(__name__)

Parallel = io.Custom("XDIT_PARALLEL")

DEGREES = {
    "cfg_degree": "2: run the positive and the negative prompt on different devices. Least communication; needs cfg "
                  "above 1.",
    "data_degree": "Split the images of a batch across devices.",
    "pipefusion_degree": "Number of PipeFusion stages, each with a part of the model's blocks: for models larger than "
                         "one device, and for slow links. Patches of the image flow through the stages and use keys "
                         "and values of the previous step, so the image differs slightly from a single-GPU run.",
    "ring_degree": "Ring sequence parallelism: splits the tokens across devices, for any number of attention heads.",
    "ulysses_degree": "Ulysses sequence parallelism: must divide the number of attention heads.",
    "tensor_degree": "Tensor parallelism: each device has a shard of every layer's weights. The image equals a "
                     "single-GPU run up to rounding. For models larger than one device; communicates most, so the "
                     "devices should have fast links. Must divide the number of attention heads.",
}


class XDiTParallelConfig(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTParallelConfig",
            display_name="xDiT Parallel Config",
            category="xDiT",
            description="Selects the devices that run the model and how they split the work. Without this node, all "
                        "GPUs are used and the split is chosen for each run.",
            search_aliases=["multi gpu", "ulysses", "ring", "usp", "cfg parallel", "pipefusion", "distrifusion"],
            inputs=[
                io.String.Input("devices", default="auto",
                                tooltip='"auto": every GPU, or two CPU workers if there is no GPU. Or a list: '
                                '"cuda:0,cuda:1", "cpu,cpu". With a device of another machine: '
                                '"cuda:0,other-pc/cuda:0".'),
                io.Combo.Input("mode", options=["auto", "manual"], default="auto",
                               tooltip="auto: choose the degrees for each run. manual: use the degrees below; their "
                               "product must equal the number of devices."),
                *(io.Int.Input(name, default=1, min=1, max=64, tooltip=text) for name, text in DEGREES.items()),
                *_pipefusion_inputs(),
                *_displaced_inputs(),
                io.Combo.Input("approximate", options=list(APPROXIMATE), default=APPROXIMATE[0], optional=True,
                               tooltip="Allow results that differ slightly from a single-GPU run. allowed: in auto "
                               "mode, a model larger than one device runs with PipeFusion, or with tensor parallelism "
                               "if that is about as fast. not allowed: with tensor parallelism, or with PipeFusion "
                               "without overlap (one patch); manual settings that change the image are rejected. for "
                               "speed: like allowed, and auto also uses PipeFusion for a model that fits if it is "
                               "estimated to be at least 1.15 times as fast; the devices are measured for this."),
                io.String.Input("weights_memory", default="auto", optional=True,
                                tooltip="Memory for the model's weights on each device. Other weights are offloaded to "
                                "system RAM and streamed to the device at every step while it computes; the image is "
                                "identical. auto: whatever the run leaves free; nothing is offloaded if all weights "
                                'fit. A number: GB, such as "10". "all on the device": no offloading; a model that '
                                "does not fit is rejected."),
                *_computing_inputs(),
            ],
            outputs=[Parallel.Output(display_name="parallel")],
        )

    @classmethod
    def validate_inputs(cls, **values):
        """Reject impossible settings when the workflow is queued; ComfyUI shows the message on the node.

        Raises instead of returning the message: ComfyUI repeats a returned message for every widget that this method
        takes, and the rules need all of them.
        """
        devices_of(ParallelConfig(**{name: value for name, value in values.items() if value is not None}))
        return True

    @classmethod
    def execute(cls, **values) -> io.NodeOutput:
        config = ParallelConfig(**values)
        devices = devices_of(config)
        missing = describe_missing(config)
        if missing:                                            # in a workflow of another machine
            log.warning("xDiT Parallel Config: %s, and uses %s", missing, ", ".join(devices))
            show_text(f"using {', '.join(devices)}: {missing}")
        return io.NodeOutput(config)


def _pipefusion_inputs():
    return [
        io.Int.Input("num_patches", default=0, min=0, max=64,
                     tooltip="Number of patches that PipeFusion cuts the image into. 0: twice the number of stages. 1: "
                     "no stale keys and values, so the image is exact, but the stages wait for each other. Unused if "
                     "pipefusion_degree is 1; the sampler node says so."),
        io.Int.Input("warmup_steps", default=1, min=0, max=100,
                     tooltip="Number of first steps that run synchronously, before PipeFusion or DistriFusion uses "
                     "values of the previous step. More steps are slower and closer to a single-GPU run."),
        io.String.Input("stage_blocks", default="", optional=True, advanced=True,
                        tooltip="Number of blocks in each PipeFusion stage, such as "
                        '"20,37" for heterogeneous GPUs. Empty: balanced automatically.'),
        io.Combo.Input("warmup", options=list(WARMUPS), default="auto", optional=True, advanced=True,
                       tooltip="How PipeFusion runs its warm-up steps. whole: the full image through one stage after "
                       "the other. micro_batches: the images of a batch and both CFG branches follow each other "
                       "through the stages. sequence: sequence parallelism, which needs the full model on every "
                       "device. auto: sequence if the model takes less than 40 % of a device's memory, otherwise "
                       "micro_batches. The image is the same."),
        io.Boolean.Input("offload_keys_values", default=False, optional=True, advanced=True,
                         tooltip="Offload PipeFusion's stale keys and values to system RAM and fetch them layer by "
                         "layer, for resolutions at which they do not fit in VRAM."),
        io.Float.Input("forecast_keys_values", default=0.6, min=0.0, max=1.0, step=0.05, optional=True, advanced=True,
                       tooltip="PipeFusion and DistriFusion: extrapolate the keys and values of the previous step by "
                       "this fraction of their last change. Closer to a single-GPU run at the same speed, but stores "
                       "them twice. 0: no extrapolation, stored once. 1: full extrapolation."),
    ]


def _displaced_inputs():
    return [
        io.Int.Input("displaced_degree", default=1, min=1, max=64, optional=True,
                     tooltip="DistriFusion: each device computes its rows of the image in every layer and uses the "
                     "other devices' rows from the previous step. For single images of U-Nets (SD 1.5, SDXL); the "
                     "image differs slightly from a single-GPU run. Never chosen by auto."),
        io.Combo.Input("displaced_mode", options=list(DISPLACED_MODES), default=DISPLACED_MODES[0],
                       optional=True, advanced=True, tooltip="What DistriFusion synchronises after the warm-up steps. "
                       "auto: corrected_async_gn, or sync_gn if a device has fewer than 4 rows of a U-Net's smallest "
                       "feature maps; the sampler node says which. corrected_async_gn: nothing; stale group norm "
                       "statistics are corrected with the device's own rows. sync_gn: group norm statistics; devices "
                       "wait in every norm; closer to a single-GPU run. full_sync: everything; the exact image, and "
                       "the slowest mode. The other modes are for comparison."),
    ]


def _computing_inputs():
    return [
        io.Combo.Input("compile", options=list(COMPILES), default=COMPILES[0], optional=True, advanced=True,
                       tooltip="blocks: compile each block of the model with torch.compile, for fewer and larger "
                       "kernels. The first step, and the first one at each new image size, takes minutes to compile: "
                       "for many images of one size. Equal up to rounding. auto: compile where the estimated saving "
                       "over the planned steps exceeds the measured time of compiling; the sampler node says so. "
                       "TorchCompileModel does the same as blocks for a single MODEL."),
        io.Combo.Input("attention", options=list(ATTENTIONS), default=ATTENTIONS[0], optional=True,
                       tooltip="The attention backend. as ComfyUI: the one that ComfyUI was started with "
                       "(--use-sage-attention, --use-flash-attention, --use-ck-attention, or xFormers if it is "
                       "installed), otherwise, and where that one is unsupported, PyTorch SDPA. auto: the same, but in "
                       "place of an exact one the exact operator that was measured to be the fastest on the GPUs. "
                       "sdpa: PyTorch SDPA. "
                       "flash (FlashAttention 2), flash3 (FlashAttention 3), xformers: equal up to rounding. sage "
                       "(SageAttention), comfy_kitchen_int8 (comfy-kitchen): 8-bit, faster, and the image differs "
                       "slightly; comfy_kitchen_int8 does not run with Ring attention. Each needs its package in "
                       "ComfyUI's Python. Attention with a mask uses PyTorch SDPA, except with xformers and "
                       "comfy_kitchen_int8."),
        io.Combo.Input("exchange", options=list(EXCHANGES), default=EXCHANGES[0], optional=True, advanced=True,
                       tooltip="The data type in which devices that split an image's tokens (Ulysses, Ring) send each "
                       "other queries, keys and values. fp8 sends about half the bytes, for slow links; the image "
                       "differs slightly from a single-GPU run."),
        io.Combo.Input("sparse_attention", options=list(SPARSE_ATTENTIONS), default=DENSE, optional=True, advanced=True,
                       tooltip="Block-sparse self-attention for long videos: less time, and the image changes. "
                       "Each block of 64 tokens attends to the blocks of keys with the highest scores, and to the "
                       "means of the others. sol-attn: scores above a threshold. sla: a fixed percentage; for models "
                       "or LoRAs that were trained with it. It equals a single GPU with the same setting, with all "
                       "methods except DistriFusion. Sequences below min_tokens and masked attention stay dense; the "
                       "sampler node shows how many attentions were sparse."),
        io.String.Input("sparse_settings", default="", optional=True, advanced=True,
                        tooltip="Settings of sparse_attention, separated by commas, such as "
                        '"tau=1.5, dense_blocks=0 1 47-49". tau: threshold of sol-attn in standard deviations, 1.3; '
                        "higher is sparser. keep_percent: of sla, 10. start_percent and end_percent: the part of "
                        "sampling that is sparse, 0.2 and 1. dense_blocks: blocks that stay dense. min_tokens: 12288. "
                        "sink_conditioning: exact_kv_and_rows (text, references and audio stay dense), exact_kv "
                        "(every token attends to them) or off."),
    ]
