"""Tiny random diffusers models of each family, with inputs for them. Used by the exactness tests, in float64."""

import importlib
import types
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.support.comfyui_server import comfyui_folder
from xdit_backend.checkpoints.build_transformer import build
from xdit_backend.checkpoints.loader import Transformer
from xdit_backend.checkpoints.tensor_sharding import narrow, tensor_splits
from xdit_backend.hooks.function_overrides import in_file, torch_with
from xdit_backend.models import FAMILIES
from xdit_backend.models.common.example_inputs import conditioning_of, latent_size
from xdit_backend.models.common.split_linear import SplitLinear
from xdit_backend.worker.models import Loaded


@dataclass
class Example:
    """A model, its family, and what ComfyUI would hand to it."""

    model: torch.nn.Module
    family: object
    config: dict
    latent: torch.Tensor
    times: torch.Tensor                        # (B,), or (B, frames or tokens): as parts of the sampler's
    timestep: torch.Tensor
    conditioning: dict

    def at(self, sigma):
        """The timestep at a noise level."""
        return self.times * sigma * self.family.inputs.time_scale

    def loaded(self, hooks, blocks=None):
        """As a worker has it, with these blocks of it; None: all."""
        of_no_file = types.SimpleNamespace(family=self.family, config=self.config)
        transformer = Transformer(self.model, of_no_file, None, torch.device("cpu"))
        return Loaded(transformer, hooks, self.latent.dtype, range(hooks.num_blocks) if blocks is None else blocks)

    def run(self):
        """The model's own prediction, like the latent."""
        return self.run_parts()[0]

    def run_parts(self):
        """The same, of each part of the latent."""
        output = self.model(**self.family.forward_arguments(self.latent, self.timestep, self.conditioning, self.config),
                            return_dict=False)[0]
        return [self.family.prediction(output, self.latent), *self.family.component_predictions(output).values()]


def lacks_module(family):
    """Does the family run as a module that the ComfyUI of the tests is too old for?"""
    module, _, _ = family.transformer.partition(":")
    folder = comfyui_folder()
    return (family.is_comfyuis and folder is not None
            and not folder.joinpath(*module.split(".")).with_suffix(".py").is_file())


# All, but for those that need a newer diffusers or ComfyUI than is installed.
CONFIGS = {name: family.testing.config for name, family in FAMILIES.items()
           if not family.plan.is_unet and not lacks_module(family)
          and not any(refusal.__name__ == "older_diffusers" and refusal({}) for refusal in family.detection.refusals)}


def takes(family, degrees):
    """Does the Family run under all these methods, such as {"ring": 2}?"""
    return not degrees.keys() & family.refused.keys()


def having(method, names=CONFIGS):
    """Those of the families that run under a method, such as "ring"."""
    return [name for name in names if takes(FAMILIES[name], {method: 2})]


# Of CONFIGS, those that a folder has whole: the text of the others is prepared by a part that has a folder of its own
# there.
FOLDERS = [name for name in CONFIGS if name not in ("Anima", "LTX-2", "Chroma Radiance")
           and not FAMILIES[name].is_comfyuis]
PIPELINES = {"LTX-Video": "LTXConditionPipeline"}              # of folders that tell by that which model they have
# Of them, those whose latents have no images concatenated, and whose folder says all of them: a host can draw these
# with no more.
BARE = [name for name, config in CONFIGS.items() if name in FOLDERS and not FAMILIES[name].detection.settings
        and FAMILIES[name].taken_channels(config) == FAMILIES[name].num_channels(config)]
# Families whose plans are those of others again, or nearly; and one that tests of its own run under other layouts.
ALIKE = ("PixArt-Alpha", "HunyuanImage", "HunyuanImage refiner", "HunyuanImage distilled",
         "HunyuanVideo 1.5 distilled", "AnyFlow", "CogVideoX-I2V", "Z-Image-Omni", "AuraFlow", "Cosmos-Predict1",
         "Cosmos-Predict2", "Anima", "CogVideoX 1.5", "Mochi", "HunyuanDiT", "LTX-2")
UNETS = {name: family.testing.config for name, family in FAMILIES.items() if family.plan.takes_unet_patches}
WHOLE = [name for name, family in FAMILIES.items() if family.plan.hooks == "replicated"]  # U-shaped too, but ComfyUI's
# what references are called, of families that have some
WITH_REFERENCES = {name: word for name in CONFIGS for word in ("ref_latents", "context_latents")
                   if word in FAMILIES[name].inputs.conditioning}
EVEN_REFERENCES = ("Z-Image-Omni",)        # whose class in ComfyUI takes references of even sides alone
IN_FLOAT32 = ("comfy.ldm.audio.dit",)
# families of which parts of a latent may be at times of their own -> how many parts a latent has; of HunyuanVideo, a
# given frame
APART = {"Wan": lambda family, shape: shape[2], "Cosmos-Predict2": lambda family, shape: shape[2],
         "LTX-Video": lambda family, shape: family.inputs.latent.num_tokens(shape),
         "LTX-2": lambda family, shape: family.inputs.latent.num_tokens(shape), "HunyuanVideo": None}


def rotate_in_float64(is_wide):
    """Have ComfyUI's modules rotate queries and keys by what takes float64, or again by kernels, none of which does."""
    importlib.import_module("comfy.model_management").in_training = is_wide
    importlib.import_module("comfy.ldm.joyimage.model").comfy_kitchen = (
        types.SimpleNamespace(rms_rope=_rms_rope) if is_wide else importlib.import_module("comfy_kitchen"))


def _rms_rope(q, k, freqs_cis, q_scale, k_scale, epsilon):
    return tuple((freqs_cis.to(x.dtype) * F.rms_norm(x, x.shape[-1:], scale, epsilon).unflatten(-1, (-1, 1, 2))).sum(
        -1).flatten(-2) for x, scale in ((q, q_scale), (k, k_scale)))


def matrix(names, layouts, one, family=lambda name: name):
    """Every (name, layout) for a test's parameters; of families that are like others, with `one` layout alone.
    family(name): whose."""
    return [(name, layout) for name in names for layout in layouts if family(name) not in ALIKE or layout == one]


def example(name, dtype=torch.float64, rows=6, columns=10, num_text_tokens=7, batch=1, frames=None, masked=False,
            apart=False, references=(), method=None, audio=5, seed=1, more={},
            thin=True):
    """A model with seeded weights; rows x columns are latent pixels, or of models of pixels as many as make as many
    tokens. The same on every rank. masked: some text is not attended to.
    apart: parts of the latent are at times of their own. references: rows and columns of reference latents, rounded up
    for EVEN_REFERENCES; method: how they are placed. seed: of all but the weights. more: of the config. thin: is what
    its class has of one size alone left out? Else its inputs are.
    """
    family = FAMILIES[name]
    config = family.testing.config | more
    batch *= family.testing.frames if family.has_frames_as_batch else 1
    torch.manual_seed(0)
    model = build(family, config).eval().to(dtype).requires_grad_(False)
    _wake(model)
    if family.is_comfyuis:
        if thin:
            family.testing.thin(model)
        _draw(model)
        rotate_in_float64(dtype == torch.float64)
        if dtype == torch.float64:
            _widen(model)
    generator = torch.Generator().manual_seed(seed)
    # they have no positions for latents of less than 66 rows and columns
    shape = latent_size(family, rows, columns + 60 * name.startswith("PixArt"), frames)
    latent = torch.randn(batch, family.taken_channels(config), *shape, generator=generator).to(dtype)
    conditioning = conditioning_of(family, config, generator, {"context": num_text_tokens}, batch, shape)
    if not thin:
        conditioning.pop("face_pixel_values", None)            # of 512 x 512 pixels
    for number, size in enumerate(references):
        size = [side + side % 2 for side in size] if name in EVEN_REFERENCES else size
        conditioning[f"{WITH_REFERENCES[name]}.{number}"] = torch.randn(*latent.shape[:2], *latent.shape[2:-2], *size,
                                                            generator=generator)
    if method is not None:
        conditioning[f"ref_latents_method.{method}"] = torch.zeros(1)
    if masked:
        cached = torch.arange(num_text_tokens) < torch.arange(2, 2 + 2 * batch, 2)[:, None]
        conditioning["attention_mask"] = cached.long()
    times = torch.ones(batch, dtype=dtype)
    if apart and APART[name] is None:
        conditioning["guiding_frame_index"] = torch.zeros(batch)
    elif apart:
        times = torch.rand(batch, APART[name](family, latent.shape), generator=generator).to(dtype)
    if family.inputs.components.names:
        conditioning |= beside(family, config, generator, (latent.shape, audio), apart)
    return Example(model, family, config, latent, times, times * 0.7 * family.inputs.time_scale, {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in conditioning.items()})


def beside(family, config, generator, sizes, apart=False):
    """What a call of a model of video and audio has beside the video, as it reaches the workers. sizes: shape of the
    video, length of the audio."""
    found = {}
    for name, shape in family.inputs.components.shapes(config, *sizes).items():
        if name in family.inputs.components.names:
            found[name] = torch.randn(shape, generator=generator)
        elif name == "audio_times" and apart:
            found[name] = torch.rand(shape[0], sizes[1], 1, generator=generator)
        else:
            found[name] = 0.7 - 0.1 * torch.rand(1, generator=generator).expand(shape)
    return found


def _wake(model):
    """Give matrices that diffusers starts at zero, and with which a block would change nothing, seeded weights."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and (name.endswith(".weight") or ".pos_emb_" in name) and not parameter.any():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)


def _draw(model):
    """Seeded values for parameters that ComfyUI's classes leave as memory was."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.3 * drawn if parameter.ndim != 2 else drawn / parameter.shape[1] ** 0.5)


def _widen(model):
    """Have a model's attentions that turn queries and keys in float32 do it in float64."""
    for module in model.modules():
        if type(module).__module__ in IN_FLOAT32 and "float32" in type(module).forward.__code__.co_names:
            module.forward = types.MethodType(
                in_file(type(module).forward, {"torch": torch_with(float32=torch.float64)}), module)


def save_as_published(model, folder, **options):
    """model.save_pretrained, with the tensors of diffusers' own class: what the model has in halves is whole."""
    cached = []
    for path, halves in [*model.named_modules()]:
        if isinstance(halves, SplitLinear):
            first, second = halves
            whole = torch.nn.Linear(first.in_features, 2 * first.out_features, first.bias is not None)
            whole.load_state_dict({name: torch.cat([tensor, second.state_dict()[name]])
                                   for name, tensor in first.state_dict().items()}, assign=True)
            parent, _, leaf = path.rpartition(".")
            cached.append((model.get_submodule(parent), leaf, halves))
            setattr(*cached[-1][:2], whole)
    model.save_pretrained(folder, **options)
    for parent, leaf, halves in cached:
        setattr(parent, leaf, halves)


def save_transformer(model, folder):
    """Save a model as files of its family are published; the path to open. folder: an empty one."""
    if hasattr(model, "save_pretrained"):
        save_as_published(model, folder / "transformer")
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()},
              folder / "model.safetensors")
    return folder / "model.safetensors"


def hold_share(model, plan, degree, rank):
    """Have a whole model hold a rank's share of its layers, as the loader does it. Returns the splits."""
    splits = tensor_splits(model, plan) if degree > 1 else {}
    for name, parameter in model.named_parameters():
        own = splits[name].own(parameter.data, degree, rank) if name in splits else None
        parameter.data = parameter.data if own is None else own
    narrow(model, splits, degree, rank)
    return splits
