"""The weights of a shell as its file holds them, under ComfyUI's names. For nodes that save or merge a MODEL; see
model_patcher.py.

And the few tensors whose values ComfyUI looks at when it makes a model; see detection.py.
"""

import torch

from ....xdit_backend.checkpoints.memory_map import map_tensors
from ....xdit_backend.checkpoints.quantisation.gguf import read_tensors
from ....xdit_backend.checkpoints.tensor_reader import read_file, read_plain
from ....xdit_backend.protocol.errors import CheckpointError, UnsupportedError
from .diffusers_keys import marker_tensors_of, under_comfyui_names


def read_weights(checkpoint, base_model):
    """{name in base_model.diffusion_model: tensor of the file, in the file's dtype, a map of it on the CPU}.

    Raises UnsupportedError for a quantised file: unpacked, it might not fit in memory.
    """
    if checkpoint.is_packed:
        raise UnsupportedError("Use the bf16, fp16 or plain fp8 file of this model for nodes that write or mix a "
                               "MODEL's own weights (ModelSave, CheckpointSave, LoraSave, ModelMerge nodes that take "
                               f"it as their second model): {checkpoint.name} holds quantised weights or is a GGUF "
                               "file. As the first model of a ModelMerge node, and with LoRA, it works.")
    tensors = {checkpoint.name_of(name, file): mapped() for file in checkpoint.files
               for name, mapped in map_tensors(file).items()
               if checkpoint.name_of(name, file)}
    if checkpoint.folder_config is not None:                              # a diffusers folder
        tensors = under_comfyui_names(tensors, checkpoint) | marker_tensors_of(checkpoint)
    tensors = base_model.model_config.process_unet_state_dict(tensors)
    return {name: tensors[name] for name in base_model.diffusion_model.state_dict() if name in tensors}


def read_weight(checkpoint, found, base_model, name):
    """One weight of a file that read_weights refuses; dequantised to float32. found: of weight_sources."""
    sources = {source for source, _ in found[name]}
    tensors = read_plain(checkpoint, read_file(checkpoint, sources.__contains__))
    return base_model.model_config.process_unet_state_dict(tensors)[name]


def read_values(checkpoint, names):
    """{name: tensor} of those of these names that the file has, in the diffusion model or beside it."""
    found = read_tensors(checkpoint, names.__contains__) if checkpoint.stored else {}
    found = {name: tensor for name, tensor in found.items() if name in names}
    for path in checkpoint.files if names and not checkpoint.stored else ():
        there = {checkpoint.name_of(key, path) or key.removeprefix(checkpoint.prefix): mapped
                 for key, mapped in map_tensors(path).items()}
        found |= {name: there[name]() for name in names if name in there}
    return found


def prepare_text(base_model, checkpoint, prefixes, context, **options):
    """Run ComfyUI's own preprocess_text_embeds on a text. The weights that it needs are read for this call alone.

    base_model: of a shell. prefixes: what the names of those weights begin with. context: (B, T, C). Raises
    CheckpointError where the file lacks them.
    """
    net, patcher = base_model.diffusion_model, base_model.current_patcher
    weights = read_plain(checkpoint, read_file(checkpoint, lambda name: name.startswith(prefixes)))
    weights = patcher.patched_weights({name: weight for name, weight in weights.items() if name.startswith(prefixes)},
                                      checkpoint.quantised)
    weights = {name: weight.to(context) for name, weight in weights.items()}
    try:
        return torch.func.functional_call(_Preparing(net), {f"net.{name}": weight for name, weight in weights.items()},
                                          (context,), options)
    except UnsupportedError as error:
        # a weight that is not here was asked for more than its shape
        raise CheckpointError("Use the publisher's whole file, or a text encoder that prepares this text: "
                              f"{checkpoint.name} lacks weights of {' and '.join(prefixes)} with which ComfyUI "
                              f"does.") from error


class _Preparing(torch.nn.Module):
    """A model whose forward is ComfyUI's preprocess_text_embeds: for torch.func.functional_call."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, context, **options):
        return type(self.net).preprocess_text_embeds(self.net, context, **options)


def weight_sources(checkpoint, base_model):
    """{name in base_model.diffusion_model: [(name in the file, which rows of the tensor there the rows here are)]}.

    rows: None for all, in order; else, for each row here, its row there, or -1. ComfyUI's conversions move whole rows,
    so running them on row numbers instead of weights shows where each row goes.
    """
    start, numbers, starts = 0, {}, {}
    for name, shape in checkpoint.shapes.items():
        count = shape[0] if shape else 1
        numbers[name], starts[name] = torch.arange(start, start + count), start
        start += count
    # some conversions write into what they are given
    converted = {name: rows.clone() for name, rows in numbers.items()}
    if checkpoint.folder_config is not None:
        converted = under_comfyui_names(converted, checkpoint)
    names, first = list(starts), torch.tensor(list(starts.values()))
    found = {}
    for name, rows in base_model.model_config.process_unet_state_dict(converted).items():
        whose = torch.searchsorted(first, rows, right=True) - 1
        found[name] = [(names[index], _rows(rows, whose, index, numbers[names[index]]))
                       for index in whose.unique().tolist()]
    return found


def _rows(rows, whose, index, numbers):
    return None if torch.equal(rows, numbers) else torch.where(whose == index, rows - numbers[0], -1)
