"""Rules for the files of families: sizes from a file's shapes, latents as tokens, and arguments of the forward.

# B batch, C channels, T tokens
"""

import importlib.metadata
import math
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch.overrides import TorchFunctionMode

from ...protocol.errors import ConfigError, UnsupportedError
from .family import ConfigRules
from .limits import count_blocks
from .reference_latents import method_of, reference_positions, references
from .rope_scaling import scaled_positions

# --- rules over the shapes of a file: {name: shape} ---

def size(name, dim, divided_by=1):
    """Size of one dim of a tensor."""
    return lambda shapes: shapes[name][dim] // divided_by


def optional_size(name, dim):
    """Size of one dim of a tensor; None if the file lacks the tensor."""
    return lambda shapes: shapes[name][dim] if name in shapes else None


def blocks(prefix):
    """Number of blocks named `prefix`0., `prefix`1., ..., at most MAX_BLOCKS."""
    return lambda shapes: count_blocks(prefix, shapes)


def has(*names):
    """Whether all these tensors exist. A name that ends in "." matches any tensor under it."""
    return lambda shapes: all(name in shapes or name.endswith(".") and any(other.startswith(name) for other in shapes)
                              for name in names)


def config_of(**rules):
    """A config from shapes. Functions are called with the shapes; other values are constants."""
    return ConfigRules(rules)


def because(reason, condition):
    """Entry of Detection.refusals: the reason, if the condition holds for the shapes."""
    return lambda shapes: reason if condition(shapes) else None


def only_prefixes(known):
    """Entry of Detection.refusals: rejects files with tensors whose first name component is not in `known`."""
    def extra_prefixes(shapes):
        extra = sorted({name.split(".")[0] for name in shapes} - known)
        return f"it has modules that the models xDiT supports lack ({', '.join(extra)})" if extra else None
    return extra_prefixes


def in_config_json(shapes):
    """Config rule for a setting that only config.json of a diffusers folder has."""


def folder_alone(shapes):
    """Entry of Detection.refusals: rejects every single file."""
    return ("a single file lacks settings that config.json has: put both into a folder of models/diffusers, under "
            "transformer")


def needs_diffusers(version):
    """Entry of Detection.refusals: rejects an older diffusers, whose transformer's forward takes other arguments."""
    def older_diffusers(shapes):
        installed = importlib.metadata.version("diffusers")
        return (f"it needs diffusers {version} or newer, and this is {installed}"
                if Version(installed) < Version(version) else None)
    return older_diffusers


def diffusers_converter(name):
    """Converter of diffusers' single-file loader, for Detection.convert. Only for converters that read widths from the
    tensors.

    Tensors that the converter leaves out keep their names, so that unknown ones are reported.
    """
    def convert(tensors, config):
        left = dict(tensors)
        with _SingleCatWithoutCopy():
            converted = getattr(importlib.import_module("diffusers.loaders.single_file_utils"), name)(left)
        return {**left, **converted}
    return convert


class _SingleCatWithoutCopy(TorchFunctionMode):
    """Return the tensor itself from torch.cat of one tensor, which diffusers' converters use to write one chunk of a
    fused weight. Memory-mapped tensors stay memory-mapped, and a rank reads only what it needs."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.cat and args and len(args[0]) == 1:
            return args[0][0]
        return function(*args, **(kwargs or {}))


# --- latents as hidden states; rules for the argument that takes them ---

ALL_FRAMES = 1 << 30


@dataclass(frozen=True)
class Unpacked:
    """Latents that the model itself cuts into tokens. patch: latent pixels of a token along each dim after C.

    Latents are padded at their end to full patches, wrapping around, as ComfyUI's models do. Channels of a prediction
    beyond the latent's (variances) are dropped.
    """

    patch: tuple[int, ...]
    wraps = True                           # padding at a latent's end repeats its beginning

    def counts(self, shape):
        """Number of tokens along each dim of a latent of this shape."""
        return [-(-length // patch) for length, patch in zip(shape[2:], self.patch)]

    def num_tokens(self, shape):
        return math.prod(self.counts(shape))

    def sequences(self, shape):
        """Number of token sequences per image: in the blocks, each is an image of the batch."""
        return 1

    def channels(self, in_channels):
        """Channels of a latent, for a class whose `in_channels` are these."""
        return in_channels

    def padded(self, latent):
        pad = [length for size, patch in zip(reversed(latent.shape[2:]), reversed(self.patch))
               for length in (0, -size % patch)]
        return F.pad(latent, pad, mode="circular") if any(pad) else latent

    def __call__(self, call):
        return self.padded(call.latent)

    def unpack(self, output, latent):
        return output[tuple(slice(length) for length in (None, *latent.shape[1:]))]


@dataclass(frozen=True)
class PaddedByModel(Unpacked):
    """Latents that the model itself pads to full patches, with zeros."""

    wraps = False

    def padded(self, latent):
        return latent


@dataclass(frozen=True)
class PerFrame(Unpacked):
    """Latents (B, C, F, H, W) of which each frame is a sequence of its own. All frames are cut into patches at the same
    rows.

    patch: the first entry is ALL_FRAMES, since a patch has the same rows of all frames.
    """

    def sequences(self, shape):
        return shape[2]

    def padded(self, latent):
        return Unpacked((1, *self.patch[1:])).padded(latent)


@dataclass(frozen=True)
class Packed(Unpacked):
    """Latents passed to the model as tokens (B, T, C * pixels of a token), followed by the tokens of reference latents.

    method, step: position of references in workflows that do not set it; see reference_latents.reference_positions.
    """

    method: str = "index"
    step: int = 1

    def channels(self, in_channels):
        return in_channels // math.prod(self.patch)

    def __call__(self, call):
        tokens = [self.tokens(latent) for latent in (call.latent, *references(call.conditioning))]
        return tokens[0] if len(tokens) == 1 else torch.cat(tokens, 1)

    def tokens(self, latent):
        # (B, C, n, p, m, q) -> (B, n * m, C * p * q)
        latent, dims = self.padded(latent), len(self.patch)
        cut = latent.reshape(*latent.shape[:2], *chain.from_iterable(zip(self.counts(latent.shape), self.patch)))
        order = (0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2))
        return cut.permute(order).flatten(1 + dims).flatten(1, dims)

    def unpack(self, output, latent):
        """Convert tokens to the latent's layout. Tokens after the latent's own, those of references, are dropped."""
        counts, dims = self.counts(latent.shape), len(self.patch)
        cut = output[:, :math.prod(counts)].unflatten(1, counts).unflatten(1 + dims, (-1, *self.patch))
        order = (0, 1 + dims, *chain.from_iterable((1 + dim, 2 + dims + dim) for dim in range(dims)))
        padded = cut.permute(order).reshape(len(output), -1,
                                            *(count * patch for count, patch in zip(counts, self.patch)))
        return super().unpack(padded, latent)

    def positions(self, call):
        """Position of each token, (T, 3): frame, row and column in the full latent; for a reference, its index, row
        and column."""
        starts, positions = [0, 0, 0], []
        if call.patch is not None:
            dim = call.patch.dim - 2
            starts[dim - len(self.patch)] = call.patch.start // self.patch[dim]
        for counts, at in zip(self.shapes(call)[0], ([0] * 3, *self.reference_positions(call))):
            axes = scaled_positions([torch.arange(float(start), float(start + count), device=call.latent.device)
                                     for start, count in zip(starts, counts)], call)
            positions.append(torch.cartesian_prod(*(first + own if first else own for first, own in zip(at, axes))))
            starts = 0, 0, 0                                   # references are not cut into patches
        return torch.cat(positions)

    def shapes(self, call):
        """Token counts for each image: [[(frames, token rows, token columns), those of each reference, ...], ...]."""
        latents = call.latent, *references(call.conditioning)
        return [[tuple([1] * (3 - len(self.patch)) + self.counts(latent.shape))
                 for latent in latents]] * len(call.latent)

    def reference_positions(self, call):
        """Position at which each reference begins: [(index, token row, token column), ...]."""
        return reference_positions(call, self.patch[-1], method_of(call.conditioning, self.method), self.step)

    def num_reference_tokens(self, conditioning):
        return sum(self.num_tokens(latent.shape) for latent in references(conditioning))


def num_tokens_of(latent, name):
    """Entry of Inputs.lengths for a conditioning that is cut into tokens like the latent."""
    return lambda conditioning: latent.num_tokens(conditioning[name].shape) if name in conditioning else 0


def full_shape(call):
    """Shape of the latent, or of the full latent if the call has a patch of it."""
    shape = list(call.latent.shape)
    if call.patch is not None:
        shape[call.patch.dim] = call.patch.whole
    return shape


def token_range(call, latent):
    """Return (first token, number of tokens, number of tokens of the full latent) of a call. latent: the family's
    Unpacked or Packed."""
    counts = latent.counts(call.latent.shape)
    count = math.prod(counts)
    if call.patch is None:
        return 0, count, count
    dim = call.patch.dim - 2
    a_row = count // counts[dim]
    return call.patch.start // latent.patch[dim] * a_row, count, -(-call.patch.whole // latent.patch[dim]) * a_row


def even_sides(name, latent):
    """Rule of an Unpacked for a model of ComfyUI's that fails at odd sides. Raises ConfigError for those. name: of
    the family."""
    def rule(call):
        rows, columns = call.latent.shape[-2:]
        if rows % 2 or columns % 2:
            raise ConfigError(f"Use a width and a height that are multiples of 16 pixels: {name} takes latents with "
                              f"even sides, and this one has {rows} x {columns}.")
        return latent(call)
    return rule


# --- rules for other arguments of the forward ---

def timestep(times=1, plus=0):
    """plus + times * ComfyUI's timestep."""
    return lambda call: call.timestep if (times, plus) == (1, 0) else plus + times * call.timestep


def compute_dtype_of(model):
    """Return a function () -> dtype of the latent in the current call of the model. For Family.adapt_model.

    ComfyUI's models round the sinusoids of the timestep to this dtype; diffusers rounds them to the dtype of the
    timestep, or of weights that may be stored in fewer bits.
    """
    now = []

    def remember(module, args, kwargs):
        latent = next(iter(kwargs.values()))                   # the first of Inputs.arguments
        now[:] = [latent[0].dtype]
    model.register_forward_pre_hook(remember, with_kwargs=True)
    return lambda: now[0]


def stored_dtype(layer, otherwise):
    """Dtype of a layer's weight, or `otherwise` if the weight is packed or has 8 bits. For Family.adapt_model, where
    ComfyUI's class computes in the dtype of this layer's weights."""
    dtype = layer.weight.dtype
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else otherwise


def frame_times(call):
    """ComfyUI's timestep, (B,), or (B, frames) if frames differ; for a patch, those of its own frames."""
    times = call.timestep
    if times.ndim == 1:
        return times
    start = call.patch.start if call.patch is not None and call.patch.dim == 2 else 0
    return times[:, start:start + call.latent.shape[2]]


def from_conditioning(name, times=1, where=None, else_zeros=None):
    """A conditioning, expanded to the batch size.

    times: factor. where: config argument that must be set; otherwise None is passed. else_zeros: config argument with
    the width of the zeros that replace a missing conditioning; without it, None is passed.
    """
    def rule(call):
        if where is not None and not call.config[where]:
            return None
        tensor = call.conditioning.get(name)
        if tensor is None:
            return None if else_zeros is None else call.latent.new_zeros(len(call.latent), call.config[else_zeros])
        tensor = tensor if len(tensor) == len(call.latent) else tensor.expand(len(call.latent), *tensor.shape[1:])
        return tensor if times == 1 else tensor * times
    return rule


def text_positions(call):
    """Positions of the text tokens, (T, 3): all zero."""
    return torch.zeros(call.conditioning["context"].shape[1], 3, device=call.latent.device)


def text_mask(call):
    """Mask of the real text tokens, (B, T) bool, from ComfyUI's `attention_mask`; None without one."""
    mask = from_conditioning("attention_mask")(call)
    num_tokens = call.conditioning["context"].shape[1]
    if mask is not None:
        check_mask(mask.shape[1], num_tokens)
    if mask is not None and mask.is_floating_point():
        raise UnsupportedError("Use a text encoder whose attention mask has only ones and zeros, or Load Diffusion "
                               "Model: the conditioning has an attention mask with fractions, which xDiT does not "
                               "support.")
    return None if mask is None else mask.bool()


def check_mask(num_masked, num_tokens):
    """Raise UnsupportedError if a mask does not have one entry for each text token."""
    if num_masked != num_tokens:
        raise UnsupportedError("Join the prompts as text, in one Text Encode node: the conditioning has "
                               f"{num_tokens} text tokens and an attention mask for {num_masked}, which Conditioning "
                               "(Concat) produces from prompts with masks.")


def all_text(call):
    """A mask (B, T) in which every text token is real, for forwards that require one."""
    return torch.ones(call.conditioning["context"].shape[:2], dtype=torch.bool, device=call.latent.device)


def frames_first(model, config):
    """Entry of Family.adapt_model: the forward takes and returns (B, C, F, rows, columns)."""
    forward = model.forward
    model.forward = lambda *, hidden_states, **inputs: tuple(
        output.transpose(1, 2) for output in forward(hidden_states=hidden_states.transpose(1, 2), **inputs))


def sigma_after(timestep, options):
    """The noise level at the end of this step: {"sigma_after": (B,)}. For Inputs.per_call_inputs.

    Returns {} if the sampler evaluates the model at a sigma between those of its schedule, for which ComfyUI's models
    receive none.
    """
    schedule, sigmas = options.get("sample_sigmas"), options.get("sigmas")
    if schedule is None or sigmas is None:
        return {}
    step = (schedule == sigmas[0].to(schedule)).nonzero().flatten()[:1].tolist()
    if not step or step[0] + 1 == len(schedule):
        return {}
    return {"sigma_after": schedule[step[0] + 1].to(timestep).expand(len(timestep))}
