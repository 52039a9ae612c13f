"""Small random model patches (ControlNets and the like that nodes put inside of a MODEL) for the tiny models, in the
published formats.

They are loaded by ComfyUI's own Load Model Patch, whose classes have the widths of the published ones and are thin
meanwhile. Used by tests/programs/model_nodes.py.
"""

import importlib
import sys
from contextlib import contextmanager

import torch
from safetensors.torch import save_file

from tests.support.tiny_checkpoints import SEED, families, fill

# node: what its patch is
PATCHES = {"AnimaLLLiteApply": "lllite", "QwenImageDiffsynthControlnet": "qwen-blockwise",
           "ZImageFunControlnet": "z-image-fun",
           "USOStyleReference": "uso", "WanUni3CControlnetApply": "uni3c", "WanInfiniteTalkToVideo": "infinite-talk"}
# What ComfyUI's loader does not read from a file: the widths of the published ones. "module:class": a thin one's
# arguments; the loader's own module has no name to import it by
THIN = {
    ":QwenImageBlockWiseControlNet": {"num_layers": 3, "dim": 128},
    ":SigLIPMultiFeatProjModel": {"siglip_token_nums": 4, "style_token_nums": 3, "siglip_token_dims": 8,
                                  "hidden_size": 256},
    ":MultiTalkModelPatch": {"num_layers": 3},
    "comfy.ldm.wan.model_multitalk:SingleStreamMultiAttention": {"num_heads": 2},
    "comfy.ldm.lumina.controlnet:ZImage_Control": {"dim": 384, "n_heads": 4, "n_kv_heads": 4}}
# of Z-Image's Fun ControlNets: that of so many layers adds to the refiner too, and takes a picture to fill in
FILLING = {"additional_in_dim": 17, "refiner_control": True}


@contextmanager
def thin_classes(loader, control_layers=1):
    """While active, ComfyUI's classes are the thin ones. loader: its class of Load Model Patch. control_layers: of
    Z-Image's Fun ControlNets."""
    originals = {}
    try:
        for place, fixed in THIN.items():
            if place.endswith(":ZImage_Control"):
                fixed = fixed | {"n_control_layers": control_layers} | (FILLING if control_layers != 6 else {})
            module_name, _, name = place.partition(":")
            module = importlib.import_module(module_name) if module_name else sys.modules[loader.__module__]
            originals[module, name] = made = getattr(module, name)
            setattr(module, name, type(name, (made,), {"__init__": _with(made, fixed)}))
        yield
    finally:
        for (module, name), made in originals.items():
            setattr(module, name, made)


def _with(made, fixed):
    return lambda self, *args, **named: made.__init__(self, *args, **{**named, **fixed})


def save_model_patch(name, path, loader):
    """Write a model patch's file. The classes are thin."""
    modules = _modules(name, sys.modules[loader.__module__])
    with torch.no_grad():
        fill(modules, torch.Generator().manual_seed(SEED))
    tensors = {key: tensor.contiguous() for key, tensor in modules.state_dict().items()}
    if name == "uso":
        tensors = {f"feature_embedder.{key}": tensor for key, tensor in tensors.items()}
    save_file(tensors, str(path))


def _modules(name, patches):
    """The modules of a file, under its names. patches: the loader's own module."""
    import comfy.ldm.anima.lllite as lllite
    import comfy.ldm.lumina.controlnet as lumina
    import comfy.ldm.wan.uni3c as uni3c
    from comfy.ops import disable_weight_init
    place = {"device": "cpu", "dtype": torch.float32, "operations": disable_weight_init}
    if name == "lllite":
        width, modules = families()["anima"].testing.arguments["model_channels"], torch.nn.Module()
        modules.lllite_conditioning1 = lllite.AnimaLLLiteConditioning(3, 16, 12, 1, (), **place)
        for layer in ("self_attn_q_proj", "self_attn_v_proj", "cross_attn_q_proj", "mlp_layer1"):
            modules.add_module(f"lllite_dit_blocks_0_{layer}", lllite.AnimaLLLiteModule(width, 12, 8, **place))
        return modules
    if name == "uni3c":
        return uni3c.WanUni3CControlnet(conv_out_dim=32, dim=256, ffn_dim=64, num_layers=2, time_embed_dim=256,
                                        out_proj_dim=256, mid_channels=8, **place)
    if name == "infinite-talk":
        return patches.MultiTalkModelPatch(intermediate_dim=8, in_dim=256, out_dim=24, context_tokens=32, device="cpu",
                                           operations=disable_weight_init)
    classes = {"qwen-blockwise": patches.QwenImageBlockWiseControlNet, "uso": patches.SigLIPMultiFeatProjModel,
               "z-image-fun": lumina.ZImage_Control}
    return classes[name](**place)


class SupirStandIn(torch.nn.Module):
    """What SUPIR's node asks of its patch, in the place of a network that has the size of half an SDXL."""

    def __init__(self):
        super().__init__()
        self.control_model = lambda hint, timesteps, latent, context, y: [hint] * 12
        self.project_modules = torch.nn.ModuleList(_Adapter() for _ in range(12))


class _Adapter(torch.nn.Module):
    def forward(self, feature, *hidden, control_scale):
        return torch.cat(hidden[::-1], 1) * (1 + 0.1 * control_scale * feature.mean())
