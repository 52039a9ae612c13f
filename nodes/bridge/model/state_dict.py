"""Weights of a proxy model from its file, under ComfyUI's names, for nodes that save or merge a MODEL; and the few
tensors whose values ComfyUI reads when it detects a model.
"""

import torch

from ....xdit_backend.checkpoints.memory_map import map_tensors
from ....xdit_backend.checkpoints.quantisation.gguf import read_tensors
from ....xdit_backend.checkpoints.tensor_reader import read_file, read_plain
from ....xdit_backend.protocol.errors import CheckpointError, UnsupportedError
from .diffusers_keys import marker_tensors_of, under_comfyui_names


def read_weights(checkpoint, base_model):
    """Return {name in base_model.diffusion_model: tensor of the file, in its dtype, memory-mapped on the CPU}.

    Raises UnsupportedError for a quantised file, which might not fit in memory when dequantised.
    """
    if checkpoint.is_packed:
        raise UnsupportedError("Use the bf16, fp16 or plain fp8 file of this model for nodes that write or mix a "
                               "MODEL's own weights (ModelSave, CheckpointSave, LoraSave, ModelMerge nodes that take "
                               f"it as their second model): {checkpoint.name} has quantised weights or is a GGUF file. "
                               "As the first model of a ModelMerge node, and with LoRA, it works.")
    tensors = {checkpoint.name_of(name, file): mapped() for file in checkpoint.files
               for name, mapped in map_tensors(file).items()
               if checkpoint.name_of(name, file)}
    if checkpoint.folder_config is not None:                              # a diffusers folder
        tensors = under_comfyui_names(tensors, checkpoint) | marker_tensors_of(checkpoint)
    tensors = base_model.model_config.process_unet_state_dict(tensors)
    return {name: tensors[name] for name in base_model.diffusion_model.state_dict() if name in tensors}


def read_weight(checkpoint, found, base_model, name):
    """Return one weight of a file that read_weights rejects, dequantised to float32. found: of weight_sources."""
    sources = {source for source, _ in found[name]}
    tensors = read_plain(checkpoint, read_file(checkpoint, sources.__contains__))
    return base_model.model_config.process_unet_state_dict(tensors)[name]


def read_values(checkpoint, names):
    """Return {name: tensor} for those of these names that the file has, inside or outside the diffusion model."""
    found = read_tensors(checkpoint, names.__contains__) if checkpoint.stored else {}
    found = {name: tensor for name, tensor in found.items() if name in names}
    for path in checkpoint.files if names and not checkpoint.stored else ():
        there = {checkpoint.name_of(key, path) or key.removeprefix(checkpoint.prefix): mapped
                 for key, mapped in map_tensors(path).items()}
        found |= {name: there[name]() for name in names if name in there}
    return found


def prepare_text(base_model, checkpoint, prefixes, context, **options):
    """Run ComfyUI's preprocess_text_embeds on a text. The weights that it needs are read for this call only.

    base_model: of a proxy model. prefixes: of the names of those weights. context: (B, T, C). Raises CheckpointError if
    the file lacks them.
    """
    module, patcher = base_model.diffusion_model, base_model.current_patcher
    weights = read_plain(checkpoint, read_file(checkpoint, lambda name: name.startswith(prefixes)))
    weights = patcher.patched_weights({name: weight for name, weight in weights.items() if name.startswith(prefixes)},
                                      checkpoint.quantised)
    weights = {name: weight.to(context) for name, weight in weights.items()}
    try:
        return torch.func.functional_call(
            _Preparing(module), {f"module.{name}": weight for name, weight in weights.items()}, (context,), options)
    except UnsupportedError as error:
        # the data of a missing weight was read
        raise CheckpointError("Use the publisher's full file, or a text encoder that prepares this text: "
                              f"{checkpoint.name} lacks the weights {' and '.join(prefixes)} that ComfyUI needs for "
                              "it.") from error


def call_with_weights(base_model, remote, path, forward, tensor):
    """Run the forward of a module of a proxy model for a node that calls it. The weights are the file's, without the
    patches of a MODEL, and are read for this call only.

    base_model: of the proxy model. path: of the module in the diffusion model. forward: its class's. tensor: its input.
    """
    checkpoint, module = remote.checkpoint, base_model.diffusion_model.get_submodule(path)
    names = [f"{path}.{name}" for name, _ in module.named_parameters()]
    if checkpoint.is_packed:
        sources = remote.weight_sources()
        weights = {name: read_weight(checkpoint, sources, base_model, name) for name in names}
    else:
        weights = read_weights(checkpoint, base_model)
    return torch.func.functional_call(_Calling(module, forward), {
        f"module.{name.removeprefix(path)[1:]}": weights[name].to(tensor) for name in names}, (tensor,))


class _Calling(torch.nn.Module):
    """Module whose forward is the given one of another module, for torch.func.functional_call."""

    def __init__(self, module, forward):
        super().__init__()
        self.module, self._forward = module, forward

    def forward(self, tensor):
        return self._forward(self.module, tensor)


class _Preparing(torch.nn.Module):
    """Module whose forward is ComfyUI's preprocess_text_embeds, for torch.func.functional_call."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, context, **options):
        return type(self.module).preprocess_text_embeds(self.module, context, **options)


def weight_sources(checkpoint, base_model):
    """Return {name in base_model.diffusion_model: [(name in the file, rows)]}.

    rows: None if the weight is that tensor; else, for each row of the weight, its row in the tensor, or -1 if it is not
    from there. ComfyUI's conversions move full rows, so running them on row numbers instead of weights shows where each
    row goes.
    """
    start, numbers, starts = 0, {}, {}
    for name, shape in checkpoint.shapes.items():
        count = shape[0] if shape else 1
        numbers[name], starts[name] = torch.arange(start, start + count), start
        start += count
    # some conversions write to their inputs
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
