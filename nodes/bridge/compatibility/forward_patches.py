"""Forward patches: functions that nodes put in place of the forwards of modules inside the diffusion model. Known ones
are mapped to named operations of the workers, or compute what the module's own forward does.

A function that computes the same is recognised by its results alone, such as a feed-forward layer in chunks; any other
one by the file and name of its definition and by its result for a test input.

# B batch, T tokens, C channels
"""

import copy
import math
import os
import types

import torch
import torch.nn.functional as F

from . import enhance_video, token_shuffle
from .unet_patches import cell

# operations: see ForwardPatches
OWN, SAME, GUIDE, ENHANCE, SHUFFLE = "own", "same", "guide", "enhance", "shuffle"
KNOWN = {("model_optimization_nodes.py", "WanCrossAttentionPatch.__get__.<locals>.wrapped_attention"): GUIDE}
EMBEDDERS = "rope_embedder", "pe_embedder" # rotary embeddings of ComfyUI's Wan and HunyuanVideo
RIFLEX = "nodes.py", "EmbedND_RifleX.forward"
FORWARD = ".forward"                       # end of the name of an object patch
LENGTHS = 3, 20_000                        # tokens of tests; nodes cut sequences from a few thousand on
WIDTH = 4                                  # channels of tests
TOLERANCE = 1e-4                           # absolute


class ForwardPatches:
    """The forward patches of a proxy model. Each function is tested once."""

    def __init__(self):
        self._known = {}                                       # id of a function -> (function, operation)

    def operation(self, module, function):
        """Return the operation of a function in place of a module's forward: OWN, if it is that, which ComfyUI sets as
        an attribute when it removes a patch; SAME, if it computes what that does; GUIDE, if it guides attention to the
        text (see text_guide); ENHANCE, if it multiplies that (see enhance_video.py); SHUFFLE, if it
        may shuffle its tokens before that (see token_shuffle.py); None, if it is not known."""
        if id(function) not in self._known:
            self._known[id(function)] = function, _operation(module, function)
        return self._known[id(function)][1]

    def of_attribute(self, modules, path, name, value):
        """The operation of a changed attribute of a module. modules: of proxy_modules.remember_modules. path: of the
        module. name, value: of the attribute."""
        return self.operation(modules[path][0], value) if name == "forward" and path in modules else None

    def of_object_patch(self, modules, name, value):
        """The operation of an object patch of the diffusion model. name: below "diffusion_model"."""
        return self.of_attribute(modules, name.removesuffix(FORWARD), "forward", value) if name.endswith(
            FORWARD) else None

    def running(self, modules):
        """{path: (operation, function)} of the functions that are in place of forwards now."""
        found = {}
        for path, (module, remembered) in modules.items():
            function = vars(module).get("forward")
            if path and function is not None and function is not remembered.get("forward"):
                found[path] = self.operation(module, function), function
        return {path: known for path, known in found.items() if known[0] != OWN}


    def riflex(self, modules, name, module):
        """(number of the frequency, frames) if a module in place of a rotary embedding lowers one frequency of the
        frames; None otherwise. name: of the module in the diffusion model."""
        if name not in EMBEDDERS or name not in modules or module is modules[name][0]:
            return None
        if id(module) not in self._known:
            self._known[id(module)] = module, _riflex(modules[name][0], module)
        return self._known[id(module)][1]

    def positions(self, modules):
        """{"riflex": (1, 2) int64} of a call with such an embedding, see models/common/riflex.py; else {}."""
        inside = vars(modules[""][0])["_modules"]
        found = [pair for name in EMBEDDERS if (pair := self.riflex(modules, name, inside.get(name)))]
        return {"riflex": torch.tensor(found)} if found else {}

    def describe_idle(self, modules):
        """Suffix of a run's status text if nodes have replaced forwards by others of the same result."""
        count = sum(operation == SAME for operation, _ in self.running(modules).values())
        return f", {count} module{'s' * (count > 1)} with a node's lower memory use unchanged" if count else ""

    def is_local(self, modules, name, value):
        """Whether an object patch changes nothing, or each token by itself. name: below "diffusion_model"."""
        return bool(self.of_object_patch(modules, name, value) in (OWN, SAME, GUIDE)
                    or self.riflex(modules, name, value))

    def guides(self, modules):
        """{path: function} of the forwards in place that guide attention to the text."""
        return {path: function for path, (operation, function) in self.running(modules).items() if operation == GUIDE}

    def enhanced(self, modules):
        """{path: (frames, weight)} of the forwards in place that are Enhance-A-Video's."""
        return {path: enhance_video.settings_of(function)
                for path, (operation, function) in self.running(modules).items() if operation == ENHANCE}

    def shuffling(self, modules):
        """{path: key of an option} of the forwards in place that shuffle tokens, in the order of the modules."""
        return {path: token_shuffle.option_of(modules[path][0], function)
                for path, (operation, function) in self.running(modules).items() if operation == SHUFFLE}


def text_guide(function):
    """(text (1, T, C), scale, alpha, tau, whether every image of a batch is guided) of an operation GUIDE."""
    patch = cell(function.__func__, "self").cell_contents
    return (patch.nag_context, float(patch.nag_scale), float(patch.nag_alpha), float(patch.nag_tau),
            patch.input_type == "batch" and not patch.i2v)


def _operation(module, function):
    if isinstance(function, types.FunctionType):
        return SHUFFLE if _option_of(module, function) is not None else None
    if not isinstance(function, types.MethodType) or function.__self__ is not module:
        return None
    if function.__func__ is type(module).forward:
        return OWN
    code = function.__func__.__code__
    known = KNOWN.get((os.path.basename(code.co_filename), function.__func__.__qualname__))
    try:
        if known == GUIDE:
            return GUIDE if _guides(function) else None
        if enhance_video.settings_of(function) is not None:
            width = next(each.in_features for each in module.modules() if hasattr(each, "in_features"))
            return ENHANCE if enhance_video.enhances(_light(module), width, type(module).forward, function) else None
        return SAME if _is_same(module, function.__func__) else None
    except Exception:                                          # raised by a node's code for a test's inputs
        return None


def _option_of(module, function):
    try:
        return token_shuffle.option_of(module, function)
    except Exception:                                          # raised by a node's code for a test's inputs
        return None


class _Scaling(torch.nn.Module):
    """Stands for a layer with weights: scales and shifts its input, each layer by other numbers. It returns at most as
    many channels as the layer."""

    weight = None                          # comfy.ops.linear_input_act reads its type

    def __init__(self, number, layer):
        super().__init__()
        self.number, self.num_channels = number, getattr(layer, "out_features", None)

    def forward(self, tensor):
        return tensor[..., :self.num_channels] * (1 + 0.1 * self.number) + 0.01 * self.number


def _is_same(module, function):
    """Whether a function of (module, tokens (B, T, C)) computes what the forward of the module's class does, for short
    and long sequences. Layers with weights are replaced by elementwise functions; the module itself has no weights."""
    if any(True for _ in module.parameters(recurse=False)) or not any(True for _ in module.children()):
        return False
    light = _light(module)
    for length in LENGTHS:
        tokens = torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length))
        expected = type(module).forward(light, tokens.clone())
        if expected.shape != tokens.shape or not torch.allclose(function(light, tokens.clone()), expected,
                                                                atol=TOLERANCE):
            return False
    return True


def _light(module, numbers=None):
    """A copy of a module in which each module with weights of its own is replaced."""
    numbers = iter(range(1, 100)) if numbers is None else numbers
    if any(True for _ in module.parameters(recurse=False)):
        return _Scaling(next(numbers), module)
    light = copy.copy(module)
    light.__dict__ = {name: value for name, value in vars(module).items() if name not in ("forward", "_apply")}
    light._modules = {name: child and _light(child, numbers) for name, child in module._modules.items()}
    return light


def _riflex(original, module):
    """(number, frames) if a module computes what xdit_backend/models/common/riflex.py does; else None."""
    code = type(module).forward.__code__
    if (os.path.basename(code.co_filename), type(module).forward.__qualname__) != RIFLEX:
        return None
    number, frames = int(module.k), int(module.num_frames)
    ids = torch.randint(0, 50, (1, 7, 3), generator=torch.Generator().manual_seed(0)).float()
    expected = original(ids).clone()                           # (1, 1, T, frequencies, 2, 2)
    if not 1 <= number <= original.axes_dim[0] // 2 or frames < 1:
        return None
    angles = ids[..., 0].double() * 0.9 * 2 * math.pi / frames
    cosine, sine = angles.cos(), angles.sin()
    expected[:, 0, :, number - 1] = torch.stack([cosine, -sine, sine, cosine], -1).unflatten(-1, (2, 2)).to(expected)
    found = module(ids)
    is_this = found.shape == expected.shape and torch.allclose(found, expected, atol=TOLERANCE)
    return (number, frames) if is_this else None


def _guides(function):
    """Whether this function computes what guide_text of xdit_backend/hooks/injected_networks.py does. Tested with heads
    of four channels, for one image and for two, and with other prompts."""
    patch = copy.copy(cell(function.__func__, "self").cell_contents)
    context, x, text = torch.randn(3, 2, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    patch.nag_context = context[:1]
    called = function.__func__
    same = types.FunctionType(called.__code__, called.__globals__, "same", called.__defaults__,
                              (types.CellType(patch),))
    layers = dict.fromkeys(("q", "k", "v", "o", "norm_q", "norm_k", "k_img", "v_img", "norm_k_img"),
                           torch.nn.Identity())
    _, *strengths, is_batch = text_guide(function)
    for size in (1, 2):
        module = types.SimpleNamespace(**layers, num_heads=1)
        more = {"context_img_len": 2} if patch.i2v else {}
        found = same(module, x[:size].clone(), text[:size].clone(), **more)
        images, prompts = (text[:size, :2], text[:size, 2:]) if patch.i2v else (None, text[:size])
        expected = F.scaled_dot_product_attention(x[:size], prompts, prompts)
        count = size if is_batch else 1
        against = F.scaled_dot_product_attention(x[:count], context[:1].expand(count, -1, -1),
                                                 context[:1].expand(count, -1, -1))
        expected[:count] = _guided(expected[:count], against, *strengths)
        if images is not None:
            expected = expected + F.scaled_dot_product_attention(x[:size], images, images)
        if not torch.allclose(found, expected, atol=TOLERANCE):
            return False
    return True


def _guided(positive, negative, scale, alpha, tau):
    far = positive * scale - negative * (scale - 1)
    ratio = far.abs().sum(-1, keepdim=True) / positive.abs().sum(-1, keepdim=True)
    return alpha * far * (ratio.clamp_max(tau) / ratio) + (1 - alpha) * positive
