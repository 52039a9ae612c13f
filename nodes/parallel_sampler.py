"""Parallel Sampler: KSampler for a MODEL from Load xDiT Model. It has KSampler's inputs: conversion maps them by name
(SAME_INPUTS in web/convert.js)."""

import comfy.sample
import comfy.samplers
import nodes
from comfy_api.latest import io

from ..xdit_backend.protocol.errors import ConfigError, UnsupportedError
from .bridge.compatibility.input_checks import check_latent, check_links
from .bridge.compatibility.pipefusion_support import PATCHWISE
from .bridge.model.model_patcher import ProxyPatcher


class XDiTParallelSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTParallelSampler",
            display_name="Parallel Sampler",
            category="xDiT",
            description="Denoises the latent image on all devices. The result equals a single-GPU run, except that "
                        "PipeFusion and DistriFusion differ slightly.",
            search_aliases=["ksampler", "sampler", "denoise", "multi gpu"],
            inputs=[
                io.Model.Input("model", tooltip="The model from Load xDiT Model."),
                io.Int.Input("seed", default=0, min=0, max=0xffffffffffffffff, control_after_generate=True,
                             tooltip="The random seed used for creating the noise."),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="The number of denoising steps."),
                io.Float.Input("cfg", default=8.0, min=0.0, max=100.0, step=0.1, round=0.01,
                               tooltip="The classifier-free guidance scale. At 1, only the positive prompt is used."),
                io.Combo.Input("sampler_name", options=comfy.samplers.KSampler.SAMPLERS,
                               tooltip="The sampling algorithm, one of ComfyUI's own."),
                io.Combo.Input("scheduler", options=comfy.samplers.KSampler.SCHEDULERS,
                               tooltip="The noise schedule, one of ComfyUI's own."),
                io.Conditioning.Input("positive", tooltip="The conditioning that describes the desired image."),
                io.Conditioning.Input("negative", tooltip="The conditioning that describes what to avoid."),
                io.Latent.Input("latent_image", tooltip="The latent image to denoise."),
                io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01,
                               tooltip="The amount of denoising. Lower values preserve the structure of the latent "
                                       "image, for image to image."),
            ],
            outputs=[io.Latent.Output(tooltip="The denoised latent image.")],
        )

    @classmethod
    def execute(cls, model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image,
                denoise) -> io.NodeOutput:
        """Sample on the workers; ComfyUI passes the inputs by name."""
        check(model, cfg, positive, negative, latent_image)
        model = patchwise(model)
        return io.NodeOutput(*nodes.common_ksampler(model, seed, steps, cfg, sampler_name, scheduler, positive,
                                                    negative, latent_image, denoise=denoise))


def patchwise(model):
    """Clone the MODEL and allow one sampler per patch, so that PipeFusion stages stay busy across steps.

    Only used where the workflow can be sampled patch by patch.
    """
    model = model.clone()
    model.model_options["transformer_options"][PATCHWISE] = True
    return model


def check(model, cfg, positive, negative, latent_image):
    """Reject unsupported inputs before anything is launched."""
    check_links(model=model, positive=positive, negative=negative, latent_image=latent_image)
    if not isinstance(model, ProxyPatcher):
        raise ConfigError("Connect Load xDiT Model, or use KSampler: Parallel Sampler needs a MODEL from Load xDiT "
                          "Model, and this one is from another loader.")
    for _, options in [*positive, *negative]:
        if options.get("gligen") is not None:
            raise UnsupportedError("Remove the GLIGEN conditioning, or use KSampler with Load Diffusion Model: "
                                   "Parallel Sampler does not support it and would ignore it.")
    config = model.remote.config
    one_branch = cfg == 1.0 and not model.model_options.get("disable_cfg1_optimization")
    if config.mode == "manual" and config.cfg_degree == 2 and one_branch:
        raise ConfigError("Set cfg above 1, or mode to auto: cfg_degree=2 needs two branches, and cfg=1.0 evaluates "
                          "only the positive prompt, so half of the devices would be idle.")
    check_latent(model.remote.setup, comfy.sample.fix_empty_latent_channels(model, latent_image["samples"]))
