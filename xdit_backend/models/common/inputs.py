"""Words for describing a family as data: what a file's shapes say, how latents become tokens, what the forward is
given.

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
from .rope_scaling import moved

# --- rules over the shapes of a file: {name: shape} ---

def size(name, dim, divided_by=1):
    """One size of a tensor."""
    return lambda shapes: shapes[name][dim] // divided_by


def optional_size(name, dim):
    """One size of a tensor; None where the file lacks it."""
    return lambda shapes: shapes[name][dim] if name in shapes else None


def blocks(prefix):
    """Number of blocks named `prefix`0., `prefix`1., ..., of which there are at most MAX_BLOCKS."""
    return lambda shapes: count_blocks(prefix, shapes)


def has(*names):
    """Are all these tensors there? A name that ends in "." stands for any tensor under it."""
    return lambda shapes: all(name in shapes or name.endswith(".") and any(other.startswith(name) for other in shapes)
                              for name in names)


def config_of(**rules):
    """A config from shapes: rules are asked, anything else stands as it is."""
    return ConfigRules(rules)


def because(reason, condition):
    """A refusal for Family.refusals: the reason, where the condition holds for the shapes."""
    return lambda shapes: reason if condition(shapes) else None


def only_parts(known):
    """A refusal for Family.refusals: of files with tensors under other names than these, up to the first "."."""
    def more_parts(shapes):
        extra = sorted({name.split(".")[0] for name in shapes} - known)
        return f"it has parts that models xDiT knows lack ({', '.join(extra)})" if extra else None
    return more_parts


def in_config_json(shapes):
    """The rule for what config.json of a diffusers folder alone says."""


def folder_alone(shapes):
    """A refusal for Family.refusals: of every single file."""
    return ("a single file does not say all that config.json does: put it with that into a folder of "
            "models/diffusers, under transformer")


def needs_diffusers(version):
    """A refusal for Family.refusals: of a diffusers that is older,
    whose transformer's forward takes other arguments."""
    def older_diffusers(shapes):
        installed = importlib.metadata.version("diffusers")
        return (f"it needs diffusers {version} or newer, and this is {installed}"
                if Version(installed) < Version(version) else None)
    return older_diffusers


def diffusers_converter(name):
    """A converter of diffusers' single-file loader, for Family.convert. Only those that read widths from the tensors.

    Tensors that it leaves out keep their names, so that they are noticed.
    """
    def convert(tensors, config):
        left = dict(tensors)
        with _UncopiedParts():
            converted = getattr(importlib.import_module("diffusers.loaders.single_file_utils"), name)(left)
        return {**left, **converted}
    return convert


class _UncopiedParts(TorchFunctionMode):
    """torch.cat of one tensor, which is how diffusers' converters write a part of a fused one, is that tensor: a map of
    the file stays one, and a rank reads what it needs of it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.cat and args and len(args[0]) == 1:
            return args[0][0]
        return function(*args, **(kwargs or {}))


# --- latents as hidden states; rules for the argument that takes them ---

ALL_FRAMES = 1 << 30


@dataclass(frozen=True)
class Unpacked:
    """Latents that the model itself cuts into tokens. patch: latent pixels of a token along each dim after C.

    Padded at their end to whole patches, wrapping around, as ComfyUI's models do. A prediction may have more channels
    than the latent (variances): they are left out.
    """

    patch: tuple[int, ...]
    wraps = True                           # is a latent's end padded with its beginning?

    def counts(self, shape):
        """Tokens along each dim of a latent of this shape."""
        return [-(-length // patch) for length, patch in zip(shape[2:], self.patch)]

    def num_tokens(self, shape):
        return math.prod(self.counts(shape))

    def sequences(self, shape):
        """Sequences of tokens that a latent of this shape is in blocks, each an image of their batch."""
        return 1

    def channels(self, in_channels):
        """Channels of a latent, where the diffusers class has this for `in_channels`."""
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
class Whole(Unpacked):
    """Latents that the model itself pads to whole patches, with zeros."""

    wraps = False

    def padded(self, latent):
        return latent


@dataclass(frozen=True)
class PerFrame(Unpacked):
    """Latents (B, C, F, H, W) of whose frames each is a sequence of its own; where these are cut, all are cut at the
    same places.

    patch: its first is ALL_FRAMES, since a place has all of them.
    """

    def sequences(self, shape):
        return shape[2]

    def padded(self, latent):
        return Unpacked((1, *self.patch[1:])).padded(latent)


@dataclass(frozen=True)
class Packed(Unpacked):
    """Latents that travel as tokens (B, T, C * pixels of a token), those of reference latents after the image's.

    method, step: how references are placed where a workflow does not say; see reference_latents.reference_positions.
    """

    method: str = "index"
    step: int = 1

    def channels(self, in_channels):
        return in_channels // math.prod(self.patch)

    def __call__(self, call):
        pieces = [self.tokens(latent) for latent in (call.latent, *references(call.conditioning))]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def tokens(self, latent):
        # (B, C, n, p, m, q) -> (B, n * m, C * p * q)
        latent, dims = self.padded(latent), len(self.patch)
        cut = latent.reshape(*latent.shape[:2], *chain.from_iterable(zip(self.counts(latent.shape), self.patch)))
        order = (0, *range(2, 2 + 2 * dims, 2), 1, *range(3, 3 + 2 * dims, 2))
        return cut.permute(order).flatten(1 + dims).flatten(1, dims)

    def unpack(self, output, latent):
        """Tokens after the latent's own (of reference pictures) are left out."""
        counts, dims = self.counts(latent.shape), len(self.patch)
        cut = output[:, :math.prod(counts)].unflatten(1, counts).unflatten(1 + dims, (-1, *self.patch))
        order = (0, 1 + dims, *chain.from_iterable((1 + dim, 2 + dims + dim) for dim in range(dims)))
        whole = cut.permute(order).reshape(len(output), -1,
                                           *(count * patch for count, patch in zip(counts, self.patch)))
        return super().unpack(whole, latent)

    def positions(self, call):
        """(T, 3): each token's frame, row and column in the whole latent; of a reference, its index, row and column."""
        starts, pieces = [0, 0, 0], []
        if call.patch is not None:
            dim = call.patch.dim - 2
            starts[dim - len(self.patch)] = call.patch.start // self.patch[dim]
        for counts, at in zip(self.shapes(call)[0], ([0] * 3, *self.reference_positions(call))):
            own = moved([torch.arange(float(start), float(start + count), device=call.latent.device)
                         for start, count in zip(starts, counts)], call)
            pieces.append(torch.cartesian_prod(*(first + place if first else place for first, place in zip(at, own))))
            starts = 0, 0, 0                                   # of a reference
        return torch.cat(pieces)

    def shapes(self, call):
        """[[(frames, token rows, token columns), those of each reference ...]] for each image."""
        latents = call.latent, *references(call.conditioning)
        return [[tuple([1] * (3 - len(self.patch)) + self.counts(latent.shape))
                 for latent in latents]] * len(call.latent)

    def reference_positions(self, call):
        """[(index, token row, token column)] at which references begin."""
        return reference_positions(call, self.patch[-1], method_of(call.conditioning, self.method), self.step)

    def num_reference_tokens(self, conditioning):
        return sum(self.num_tokens(latent.shape) for latent in references(conditioning))


def num_tokens_of(latent, name):
    """For Family.lengths, of a conditioning that is cut into tokens as the latent is."""
    return lambda conditioning: latent.num_tokens(conditioning[name].shape) if name in conditioning else 0


def whole_shape(call):
    """Of the latent; where that is a patch, of the one that it is of."""
    shape = list(call.latent.shape)
    if call.patch is not None:
        shape[call.patch.dim] = call.patch.whole
    return shape


def token_rows(call, latent):
    """(first token, tokens, tokens of the whole) of what is asked about. latent: the Unpacked or Packed of its
    family."""
    counts = latent.counts(call.latent.shape)
    count = whole = math.prod(counts)
    if call.patch is None:
        return 0, count, whole
    dim = call.patch.dim - 2
    a_row = count // counts[dim]
    return call.patch.start // latent.patch[dim] * a_row, count, -(-call.patch.whole // latent.patch[dim]) * a_row


def even_sides(name, latent):
    """The rule of an Unpacked for a model of ComfyUI's that fails at odd sides: they are refused. name: of the
    family."""
    def rule(call):
        rows, columns = call.latent.shape[-2:]
        if rows % 2 or columns % 2:
            raise ConfigError(f"Use a width and a height that are multiples of 16 pixels: {name} takes latents of "
                              f"even sides, and this one is of {rows} x {columns}.")
        return latent(call)
    return rule


# --- rules for other arguments of the forward ---

def timestep(times=1, plus=0):
    """plus + times * the timestep that ComfyUI gives."""
    return lambda call: call.timestep if (times, plus) == (1, 0) else plus + times * call.timestep


def type_of_arithmetic(model):
    """For Family.amend. () -> the type of the latent in this call of the model, which ComfyUI's models round the time's
    sines to; diffusers takes that of the time, or of weights that may be held in fewer bits.
    """
    now = []

    def remember(module, args, kwargs):
        latent = next(iter(kwargs.values()))                   # of Family.arguments, the first
        now[:] = [latent[0].dtype]
    model.register_forward_pre_hook(remember, with_kwargs=True)
    return lambda: now[0]


def stored_dtype(layer, otherwise):
    """For Family.amend, where ComfyUI's class computes in the type that this layer's weights are held in. That; or
    `otherwise`, where they are packed or of 8 bits."""
    held = layer.weight.dtype
    return held if held.is_floating_point and held.itemsize > 1 else otherwise


def frame_times(call):
    """The timestep as ComfyUI gives it, (B,), or (B, frames) where they differ; a patch has its own frames."""
    times = call.timestep
    if times.ndim == 1:
        return times
    start = call.patch.start if call.patch is not None and call.patch.dim == 2 else 0
    return times[:, start:start + call.latent.shape[2]]


def given(name, times=1, where=None, else_zeros=None):
    """A conditioning, one for each image. where: only if this of the config is set, else None. else_zeros: where a
    workflow has none, zeros as wide as this of the config says."""
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
    """(T, 3): text has no place in the picture."""
    return torch.zeros(call.conditioning["context"].shape[1], 3, device=call.latent.device)


def text_mask(call):
    """(B, T) bool, which text tokens are real, as ComfyUI's `attention_mask` says; None where it says nothing."""
    mask = given("attention_mask")(call)
    num_tokens = call.conditioning["context"].shape[1]
    if mask is not None:
        check_mask(mask.shape[1], num_tokens)
    if mask is not None and mask.is_floating_point():
        raise UnsupportedError("Use a text encoder whose mask is of ones and zeros, or Load Diffusion Model: the "
                               "conditioning weighs text tokens by an attention mask of fractions, which xDiT does "
                               "not support.")
    return None if mask is None else mask.bool()


def check_mask(num_masked, num_tokens):
    """Raise UnsupportedError where a mask is of another number of text tokens than there are."""
    if num_masked != num_tokens:
        raise UnsupportedError("Join the prompts as text, in one Text Encode node: the conditioning has "
                               f"{num_tokens} text tokens and an attention mask of {num_masked}, as Conditioning "
                               "(Concat) makes of prompts with masks.")


def all_text(call):
    """(B, T): a mask that says that every text token is real, for forwards that cannot do without one."""
    return torch.ones(call.conditioning["context"].shape[:2], dtype=torch.bool, device=call.latent.device)


def frames_first(model, config):
    """A rule for Family.amend: its forward takes, and gives, (B, C, F, rows, columns)."""
    forward = model.forward
    model.forward = lambda *, hidden_states, **inputs: tuple(
        output.transpose(1, 2) for output in forward(hidden_states=hidden_states.transpose(1, 2), **inputs))


def sigma_after(timestep, options):
    """For Family.per_call_inputs: {"sigma_after": the noise level that this step goes to, (B,)}.

    {} where a sampler asks for a level between those of its schedule: ComfyUI's models are then told none.
    """
    schedule, sigmas = options.get("sample_sigmas"), options.get("sigmas")
    if schedule is None or sigmas is None:
        return {}
    step = (schedule == sigmas[0].to(schedule)).nonzero().flatten()[:1].tolist()
    if not step or step[0] + 1 == len(schedule):
        return {}
    return {"sigma_after": schedule[step[0] + 1].to(timestep).expand(len(timestep))}
