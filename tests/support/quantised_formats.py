"""Steps of tiny files in ComfyUI's quantised formats under a layout, beside one device's, on ranks that are taken for
cards that multiply every format: what is rounded is rounded as it is, all else is in float64.

Used by tests/integration/test_quantised_formats.py.
"""

import itertools

import torch.nn.functional as F

from tests.support.comfy_quants import SMOOTHED, WRITTEN, save_comfy_quant
from tests.support.compare_single_device import Saved, errors_of_saved, examples, execute, layouts_of, words
from tests.support.tiny_checkpoints import VARIANTS, families
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.quantisation import kitchen_layers
from xdit_backend.checkpoints.quantisation.layer_formats import FORMATS
from xdit_backend.config import DEGREES

TEXTS = 9, 11                              # tokens of the two branches
METHODS = [degree.removesuffix("_degree") for degree in DEGREES]
HOWS = [how for how in WRITTEN if how != "int8_per_row"]       # a format once, and ConvRot


def format_of(how):
    """The Format of what a test calls so."""
    return FORMATS[WRITTEN[how][0]]


def cells():
    """(kind of file, how its weights are written, method) for the formats, methods and families of
    docs/reference/models.md."""
    return [(kind, how, words(layout)) for kind, family in families().items() if kind not in VARIANTS
            for how in HOWS if not (family.plan.takes_unet_patches and format_of(how).numbers > 1)
            for layout in layouts_of(family.name, 1)]


def covering(every, generator):
    """Some of `every` cell that have all pairs of values between them. generator: random.Random; another one draws
    others."""
    pool, seen, chosen = generator.sample(every, len(every)), set(), []
    for num_new in (3, 2, 1):              # first those that have most that no other one has
        for cell in pool:
            pairs = {*itertools.combinations(enumerate(cell), 2)}
            if len(pairs - seen) >= num_new:
                seen |= pairs
                chosen.append(cell)
    return chosen


def layout_of(kind, method):
    return next(layout for layout in layouts_of(families()[kind].name, 1) if words(layout) == method)


class Files:
    """What is asked of the files of a test."""

    def __init__(self, file_of, folder):
        self._file_of, self._folder, self._branches = file_of, folder, {}

    def saved(self, key):
        """The Saved of (kind, how, has it scales of inputs?)."""
        kind, how, scaled = key
        original, path = self._file_of(kind), self._folder / f"{kind}-{how}-{scaled}.safetensors"
        if not path.exists():
            save_comfy_quant(path, original, how, more=SMOOTHED if scaled else None)
        if kind not in self._branches:
            self._branches[kind] = examples(families()[kind].name, TEXTS, open_checkpoint(original).config)
        return Saved(f"{kind} {how} {scaled}", self._branches[kind], path)


def _rows(tensor):
    """In the place of kitchen's, also where tests have `to` do nothing."""
    return tensor.reshape(-1, tensor.shape[-1]).type(kitchen_layers._within(tensor))


def _product(layer, weight, beside, tensor, bias, inputs=None, product=kitchen_layers.product):
    """In the place of kitchen_layers.product: sums in float64 of what it has rounded."""
    if layer.rounds_inputs:
        result = product(layer, weight, beside, tensor, None, inputs)
    else:
        inputs = kitchen_layers.rounded_inputs(layer, beside, tensor) if inputs is None else inputs
        held = kitchen_layers.quantised_tensor(layer, weight, beside, kitchen_layers._within(tensor))
        result = F.linear(inputs.dequantize().double(), held.dequantize().double())
        result = result.view(*tensor.shape[:-1], len(weight)).to(tensor.dtype)
    return result if bias is None else result + bias


def sharpen(set_=setattr):
    """Have kitchen multiply what CPUs unpack, round as it does, and compute the rest in float64."""
    set_(kitchen_layers, "_rows", _rows)
    set_(kitchen_layers, "product", _product)
    set_(kitchen_layers, "has_products", lambda layer, device: True)


def execute_sharp(rank, world_size, runs):
    sharpen()
    execute(rank, world_size, runs)


def execute_wrong(rank, world_size, runs):
    """The mutant: the second rank takes the next row's weights."""
    if rank == 1:
        kitchen_layers.quantised_tensor = lambda layer, weight, *more, tensor=kitchen_layers.quantised_tensor: tensor(
            layer, weight.roll(1, 0), *more)
    execute_sharp(rank, world_size, runs)


def errors(requested, files, patch, execute=execute_sharp):
    """{cell: the largest error of its steps, or what was raised}. asked: cells. patch: pytest's MonkeyPatch.

    nvfp4 without scales of inputs rounds each image by its own numbers where ranks have some
    (docs/design/quantisation.md): there it has such scales.
    """
    keys = {((kind, how, (how, method) == ("nvfp4", "data")), layout_of(kind, method)): (kind, how, method)
            for kind, how, method in requested}
    with patch.context() as patched:
        sharpen(patched.setattr)
        outcomes = errors_of_saved(keys, files.saved, 2, execute=execute)
    return {keys[key]: outcome for key, outcome in outcomes.items()}
