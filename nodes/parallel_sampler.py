"""Parallel Sampler: KSampler on a MODEL of Load xDiT Model."""

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
            description="Denoises the latent on all devices. The picture is the one a single device would have made; "
                        "with PipeFusion it differs a little.",
            search_aliases=["ksampler", "sampler", "denoise", "multi gpu"],
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of Load xDiT Model."),
                io.Int.Input("seed", default=0, min=0, max=0xffffffffffffffff, control_after_generate=True,
                             tooltip="The random seed of the noise."),
                io.Int.Input("steps", default=20, min=1, max=10000, tooltip="The number of denoising steps."),
                io.Float.Input("cfg", default=8.0, min=0.0, max=100.0, step=0.1, round=0.01,
                               tooltip="Guidance scale. 1 evaluates the positive prompt only."),
                io.Combo.Input("sampler_name", options=comfy.samplers.KSampler.SAMPLERS,
                               tooltip="ComfyUI's own samplers."),
                io.Combo.Input("scheduler", options=comfy.samplers.KSampler.SCHEDULERS,
                               tooltip="ComfyUI's own schedulers."),
                io.Conditioning.Input("positive", tooltip="What the image should show."),
                io.Conditioning.Input("negative", tooltip="What the image should not show."),
                io.Latent.Input("latent_image", tooltip="The latent to denoise."),
                io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01,
                               tooltip="Below 1, part of the structure of the latent is kept, as for img2img."),
            ],
            outputs=[io.Latent.Output(tooltip="The denoised latent.")],
        )

    @classmethod
    def execute(cls, model, seed, steps, cfg, sampler_name, scheduler, positive, negative, latent_image,
                denoise) -> io.NodeOutput:
        """Called by ComfyUI with the node's inputs, by their names."""
        check(model, cfg, positive, negative, latent_image)
        model = patchwise(model)
        return io.NodeOutput(*nodes.common_ksampler(model, seed, steps, cfg, sampler_name, scheduler, positive,
                                                    negative, latent_image, denoise=denoise))


def patchwise(model):
    """The MODEL whose stages, if it has any, stay full from step to step,
    where the workflow can be cut into patches."""
    model = model.clone()
    model.model_options["transformer_options"][PATCHWISE] = True
    return model


def check(model, cfg, positive, negative, latent_image):
    """Refuse what cannot work, before anything is launched."""
    check_links(model=model, positive=positive, negative=negative, latent_image=latent_image)
    if not isinstance(model, ProxyPatcher):
        raise ConfigError("Connect Load xDiT Model, or use KSampler: Parallel Sampler needs a MODEL from there, and "
                          "this one comes from another loader.")
    for _, options in [*positive, *negative]:
        if options.get("gligen") is not None:
            raise UnsupportedError("Remove the GLIGEN conditioning, or use KSampler with Load Diffusion Model: "
                                   "Parallel Sampler does not support it, and it would be dropped without notice.")
    config = model.remote.config
    one_branch = cfg == 1.0 and not model.model_options.get("disable_cfg1_optimization")
    if config.mode == "manual" and config.cfg_degree == 2 and one_branch:
        raise ConfigError("Set cfg above 1, or mode to auto: cfg_degree=2 needs two branches, and cfg=1.0 evaluates "
                          "only the positive prompt, so half of the devices would do nothing.")
    check_latent(model.remote.setup, comfy.sample.fix_empty_latent_channels(model, latent_image["samples"]))
