"""Comparison of the workers' class of a family with the class of the user's ComfyUI, on the CPU, at a small size.

The contract is to equal this ComfyUI, whose classes change from version to version. Once for each version and class, a
small random model is computed by both, from one file's tensors, with the family's conditioning: without and with a
LoRA. The result is stored (class_comparisons.py).
"""

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

import comfy.lora
import comfy.lora_convert
import comfy.ops
from comfy.ldm.modules.attention import attention_pytorch

from ....xdit_backend.checkpoints.build_transformer import build
from ....xdit_backend.hooks.function_overrides import FunctionOverrides, in_file
from ....xdit_backend.models.common.example_inputs import example_call
from ....xdit_backend.protocol.errors import UnsupportedError, XDiTError
from ..compatibility import class_comparisons
from ..compatibility.comfyui_variants import constants_of, variant_of
from ..compatibility.comfyui_version import newer_comfyui
from ..compatibility.weight_creation import weights_at_construction
from .state_dict import weight_sources
from .weight_patches import PREFIX, patched

TOLERANCE = 1e-4                           # relative, float32; ComfyUI 0.30.0: up to 7e-6
LOW_PRECISION = 0.05                       # the same, where the CPU rounds the factors of float32 products
ATTENTION, VAR_ATTENTION = ("optimized_attention", "optimized_attention_masked"), "optimized_var_attention"
ATTENTION_FOR_DEVICE = "optimized_attention_for_device"        # returns one of ATTENTION
OVERRIDE = "optimized_attention_override"  # key of transformer_options
RANK, STRENGTH = 4, 0.7                    # of the LoRA
MAX_FILLED = 1 << 20                       # elements of a tensor that is filled with NaN
SAMPLING, LORA = "prediction", "lora"      # entries of a result
# what classes raise that are called in another way than they are written for
FAILURES = (RuntimeError, TypeError, AttributeError, KeyError, IndexError, ValueError, NotImplementedError,
            AssertionError, ArithmeticError, ImportError, XDiTError)

log = logging.getLogger(__name__)


def compare_in_background(family, base_model):
    """Begin the comparison for the class of a proxy model; returns a Future of {entry: a clause about the difference,
    or ""}. base_model: the proxy model's, of which only classes and settings are read.

    The models are built here, since construction depends on state of the process: the default random generator, and
    functions of torch.nn that others replace meanwhile. A thread computes them.
    """
    result: Future = Future()
    if not family.testing.native:                              # ComfyUI has no such model
        result.set_result({})
        return result
    cls = type(base_model.diffusion_model)
    name = f"{family.name} {cls.__name__}"
    key = class_comparisons.key_of(cls.__module__, "comfy.lora", "comfy.lora_convert", "comfy.supported_models")
    found = class_comparisons.stored(name, key)
    if found is not None:
        result.set_result(found)
        return result
    try:
        pair = build_pair(family, base_model)
    except FAILURES as error:
        result.set_result({SAMPLING: f"a small {cls.__name__} cannot be built in a test ({_described(error)})"})
        return result

    def compute():
        try:
            found = compare(pair)
            class_comparisons.store(name, key, found)
            result.set_result(found)
        except BaseException as error:                         # raised where the result is awaited
            log.debug("the comparison of %s failed", name, exc_info=error)
            is_of_class = isinstance(error, FAILURES) and not isinstance(error, UnsupportedError)
            if is_of_class:
                result.set_result({SAMPLING: f"{cls.__name__} fails in a test ({_described(error)})"})
            else:
                result.set_exception(error)
    threading.Thread(target=compute, name=f"compare {name}", daemon=True).start()
    return result


def refuse_difference(family, found, has_patches):
    """Raise UnsupportedError if the workers would compute another prediction than this ComfyUI. found: see
    compare_in_background. has_patches: of weights, such as a LoRA."""
    what = found.get(SAMPLING) or has_patches and found.get(LORA)
    if what:
        raise newer_comfyui(family.name, what)


@dataclass(frozen=True)
class Pair:
    """A small model of ComfyUI's class, and the workers' with the same weights.

    base_model: ComfyUI's, around its model. tensors: as in a file. config: of the workers' model. constants: arguments
    of every call.
    """

    family: object
    base_model: torch.nn.Module
    model: torch.nn.Module
    config: dict
    tensors: dict
    constants: dict

    @property
    def native(self):
        return self.base_model.diffusion_model


def build_pair(family, base_model):
    """Build both models on the CPU. Raises what ComfyUI's class raises if it is built in another way."""
    generator = torch.Generator().manual_seed(1)
    with (torch.inference_mode(False), torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]),
          weights_at_construction()):
        with _MarkedMemory():
            native = type(base_model.diffusion_model)(**family.testing.arguments, dtype=torch.float32, device="cpu",
                                                      operations=comfy.ops.disable_weight_init).eval()
        family.testing.thin(native)
        _randomise(native, generator)
        tensors = family.testing.in_file(dict(native.state_dict()))
        config = family.detection.config({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        config |= {f"_{name}": family.testing.arguments.get(name, values[0])
                   for name, values in family.detection.settings.items()}
        model = build(family, config).eval()
        family.testing.thin(model)
        small = _around(native, base_model)
        _load(native, base_model.model_config.process_unet_state_dict(dict(tensors)))
        _load(model, family.detection.convert(dict(tensors), config))
        for each in (native, model):
            each.requires_grad_(False)
            _use_pytorch_attention(each)
    return Pair(family, small, model, config, tensors, constants_of(base_model))


def compare(pair):
    """Return {entry: a clause about the difference between the two models, or ""}."""
    family = pair.family
    # two prompts, since a class may cache what it computes of one (HiDream-O1)
    with torch.inference_mode(), torch.device("cpu"):
        calls = [example_call(family, pair.config, torch.Generator().manual_seed(seed)) for seed in (2, 3)]
        calls = [replace(call, arguments=call.arguments | pair.constants) for call in calls]
        found = {SAMPLING: _difference(pair, calls[0]), LORA: ""}
        if not found[SAMPLING] and _apply_lora(pair):
            found[LORA] = _difference(pair, calls[1], " with a LoRA in the publisher's names")
    return found


def _difference(pair, call, how=""):
    native = pair.native
    options = call.options | {OVERRIDE: _pytorch_attention}
    wanted = native(call.latent, call.timestep, **call.arguments, transformer_options=dict(options))
    predicted = predict(pair.family, pair.model, pair.config, call)
    name = type(native).__name__
    for want, own in zip(*(each if isinstance(each, (list, tuple)) else [each] for each in (wanted, predicted)),
                         strict=True):
        if want.shape != own.shape:
            return (f"{name} predicts the shape {tuple(want.shape)} in a test{how}, where xDiT's workers predict "
                    f"{tuple(own.shape)}")
        error = ((own - want).norm() / want.norm()).item()
        limit = LOW_PRECISION if _rounds_factors() else TOLERANCE
        if not error <= limit:
            return (f"{name} predicts another latent in a test{how} than xDiT's workers (relative difference "
                    f"{error:.2g})")
    return ""


def _rounds_factors():
    """Whether this CPU's products of float32 matrices have factors of fewer bits, which PyTorch can be set to."""
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(4))
    exact = matrix.double() @ matrix.double()
    return bool((matrix @ matrix - exact).norm() > 1e-5 * exact.norm())


def predict(family, model, config, call):
    """Predict as the workers do for a call of ComfyUI's class, without communication: like the latent."""
    latent, options, finish = family.inputs.components.rescale(call.latent, call.timestep, call.arguments, call.options)
    arguments, timestep = family.inputs.unfold(call.arguments | variant_of(family)), call.timestep
    of_call, has_components = family.inputs.per_call_inputs(timestep, options), isinstance(latent, list)
    if has_components:
        latent, timestep, of_call = family.inputs.components.split(latent, timestep, config, options)
    conditioning = family.tensors(arguments) | of_call
    inputs = family.forward_arguments(latent, timestep, conditioning, config)
    if family.is_comfyuis:
        inputs["transformer_options"] = inputs.get("transformer_options", {}) | {OVERRIDE: _pytorch_attention}
    output = model(**inputs, return_dict=False)[0]
    prediction = family.prediction(output, latent)
    if has_components:
        prediction = [family.inputs.components.first(prediction), *family.component_predictions(output).values()]
    return finish(prediction)


def _around(native, base_model):
    """ComfyUI's BaseModel of a small model, for ComfyUI's table of LoRA names."""
    small = object.__new__(type(base_model))
    torch.nn.Module.__init__(small)
    small.model_config, small.diffusion_model = base_model.model_config, native
    return small


class _MarkedMemory(TorchFunctionMode):
    """Fill the tensors of torch.empty with NaN, so that a buffer that only a file fills (SD3's pos_embed) is known.
    Large ones are one NaN, expanded: a class of fixed sizes (MiniMax Music 3) takes no memory before it is thin."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is not torch.empty or not result.is_floating_point():
            return result
        if result.numel() > MAX_FILLED:
            return result.new_full((1,), torch.nan).expand(result.shape)
        return result.fill_(torch.nan)


def _randomise(module, generator):
    """Random weights that keep activations near 1. Buffers keep the values that the class has computed; where it
    computes none, they are random too."""
    unfilled = [(name, buffer) for name, buffer in module.named_buffers()
                if buffer.is_floating_point() and buffer.isnan().any()]
    for name, parameter in (*module.named_parameters(), *unfilled):
        parameter.data = parameter.data.contiguous()           # if it was one number, expanded
        numbers = torch.randn(parameter.shape, generator=generator)
        leaf, fan_in = name.rpartition(".")[2], parameter[0].numel() if parameter.ndim > 1 else 1
        if leaf == "weight" and parameter.ndim > 1:
            parameter.copy_(numbers * fan_in ** -0.5)
        else:
            parameter.copy_(0.1 * numbers + (leaf in ("weight", "scale")))


def _load(module, tensors):
    """Load all weights of a model. Raises KeyError for parameters without a tensor and tensors without a parameter."""
    missing, unknown = module.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, strict=False,
                                              assign=True)
    needed = {name for name, _ in module.named_parameters()}
    wrong = [name for name in missing if name in needed] + unknown
    if wrong:
        raise KeyError(f"{wrong[0]} of {type(module).__name__}")


def _apply_lora(pair):
    """Change the weights of both models by a LoRA for all matrices that its names can express. Returns whether there
    are any."""
    generator, lora = torch.Generator().manual_seed(3), {}
    names = comfy.lora.model_lora_keys_unet(pair.base_model, {})
    for name, tensor in pair.tensors.items():
        layer = f"{PREFIX}{name.removesuffix('.weight')}"
        if name.endswith(".weight") and tensor.ndim == 2 and layer in names:
            rows, columns = tensor.shape
            lora |= {f"{layer}.lora_up.weight": torch.randn(rows, RANK, generator=generator) * 0.5,
                     f"{layer}.lora_down.weight": torch.randn(RANK, columns, generator=generator) * columns ** -0.5,
                     f"{layer}.alpha": torch.tensor(float(RANK))}
    shapes = {name: tuple(tensor.shape) for name, tensor in pair.tensors.items()}
    sources = weight_sources(SimpleNamespace(shapes=shapes, folder_config=None), pair.base_model)
    state, tensors = pair.native.state_dict(), dict(pair.tensors)
    for target, adapter in comfy.lora.load_lora(comfy.lora_convert.convert_lora(lora), names).items():
        key, offset, function = (target, None, None) if isinstance(target, str) else (*target, None)[:3]
        name = key.removeprefix(PREFIX)
        weight = patched(key, [(STRENGTH, adapter, 1.0, offset, function)], state[name], torch.float32,
                         torch.device("cpu"), torch.float32)
        state[name].copy_(weight)
        for source, rows in sources[name]:
            if rows is None:
                tensors[source] = weight.clone()
            else:
                tensors[source] = tensors[source].clone()
                tensors[source][rows[rows >= 0]] = weight[rows >= 0]
    _load(pair.model, pair.family.detection.convert(tensors, pair.config))
    return bool(lora)


def _pytorch_attention(function, *args, **options):
    return attention_pytorch(*args, **options)


def _use_pytorch_attention(model):
    """Compute attention by PyTorch, whichever backend this ComfyUI uses on its GPU."""
    of_sequences = {"_attention": SimpleNamespace(optimized_attention=attention_pytorch)}
    overrides = FunctionOverrides(around={VAR_ATTENTION: lambda function: in_file(function, of_sequences)},
                                  **dict.fromkeys(ATTENTION, attention_pytorch),
                                  **{ATTENTION_FOR_DEVICE: lambda *args, **options: attention_pytorch})
    for module in model.modules():
        overrides.install_if_used(module, (*ATTENTION, VAR_ATTENTION, ATTENTION_FOR_DEVICE))
        if hasattr(module, "processor"):
            overrides.install(module)


def _described(error):
    return f"{type(error).__name__}: {error}".partition("\n")[0]
