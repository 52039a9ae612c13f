"""Load a diffusers transformer from a file of any format its family knows, or from a diffusers folder. Called by the engine on each rank.

All ranks map the same file, so the machine holds it once; a rank reads only the tensors it needs.
"""

import importlib
import json
import os

import torch

from ..protocol.errors import CheckpointError
from ..protocol.transfers import Ferry
from .casting import Casts, add_at_use, cast_at_use, unpack_at_use
from .changes import changed, factors
from .gguf import read_tensors
from .header import header_of
from .packed import hold_packed, packed_weights, unpacked
from .quantise import quantised
from .shares import narrow, tensor_splits


def load_transformer(spec, family, device, on_progress=lambda done, total: None, choose_blocks=None, files=None, casts=None,
                     splits=None, tensor_rank=0):
    """Build the family's diffusers model with the weights of a file or folder, in spec's dtypes, on `device`.

    choose_blocks(model without weights) -> a range: load these blocks only, and read nothing of the others, which stay on
    the meta device. Blocks are numbered over all of the plan's lists. Returns (model, config).

    files: a dict to fill with {id of a weight: the map of its part of the file}, of weights that are there as the device has them.
    casts: the Casts of weights that are held in another type than spec's compute dtype; None: kept by nobody.
    splits: a dict to fill with the Split of each weight of which this rank, the tensor_rank-th of spec.tensor_degree, holds a share.
    Weights that are held in the dtype of the file stay maps of it on CPU devices. on_progress(done, total) counts bytes
    of the file, after each tensor, and may raise to give up. Raises CheckpointError when the tensors of the file and of the model do not
    match, or the file is another by now.
    """
    from accelerate import init_empty_weights

    header = header_of(spec)
    config = model_config(header, family)
    with init_empty_weights():
        model = build(family, config)
    packed = packed_weights(header, family, config, model, spec.quantisation)
    hold_packed(model, packed)
    blocks = choose_blocks(model) if choose_blocks else None
    tensors = read_file(header, lambda name: _is_here(name, blocks, model, family, header))
    maps = list(tensors.values())                              # kept until the end, so that no other tensor gets their addresses
    splits = {} if splits is None else splits
    if spec.tensor_degree > 1:
        splits |= tensor_splits(model, family.plan, spec.tensor_degree)
    tensors = _converted(tensors, header, family, config, packed)
    to_quantise = {name: (tensors.pop(name), how.type) for name, how in packed.items() if not how.is_in_file}
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    missing = [name for name in missing if name not in to_quantise and name.removesuffix("_scale") not in to_quantise]
    if missing or unexpected:
        raise CheckpointError(f"{spec.path} does not fit {family.transformer}: {len(missing)} tensors are missing "
                              f"({', '.join(missing[:3])} ...), {len(unexpected)} are unknown ({', '.join(unexpected[:3])} ...). "
                              f"Use another file of this model, or Load Diffusion Model.")
    model.eval().requires_grad_(False)
    homes = _move(model, device, family, spec, on_progress, _addresses(maps), splits, tensor_rank, to_quantise)
    if files is not None:
        files |= homes
    narrow(model, splits, spec.tensor_degree, tensor_rank)
    if spec.storage_dtype != spec.compute_dtype:
        cast_at_use(model, getattr(torch, spec.compute_dtype), casts or Casts())
    unpack_at_use(model, packed, casts or Casts())
    return model, config


def change_weights(model, config, family, spec, device, changes, blocks=None, files=None, splits=(), tensor_rank=0,
                   leave=lambda weights: None):
    """Give a loaded model other values of some tensors of its file. Nothing is read of the others.

    changes: {name in the file, without its prefix: messages.Change}. blocks: those that are held here; None: all. files: as of
    load_transformer, brought up to date. splits, tensor_rank: as load_transformer left them. leave(weights) is called before these get
    other values; with None where what changes is not values of weights alone. Of what is changed to how the file has it, every bit is
    as when it was loaded.
    """
    header, ferry = header_of(spec), Ferry(device)
    here = {name: change for name, change in changes.items() if _is_here(name, blocks, model, family, header)}
    packed = {name: how for name, how in packed_weights(header, family, config, model, spec.quantisation).items() if how.source in here}
    tensors = read_file(header, lambda name: name in here and here[name].whole is None)
    addresses = _addresses(tensors.values())
    maps = list(tensors.values())
    plain = read_plain(header, tensors, {how.source for how in packed.values()})
    for name, change in here.items():
        if change.whole is not None or not plain[name].is_meta:
            plain[name] = changed(plain[name], change, ferry)
    converted = header.under_diffusers_names(plain, family, config)
    held = {name: (weight, dtype) for name, weight, dtype in _held(model, family, spec)}
    for name, how in packed.items():
        terms = here[how.source].terms + here[how.source].hooked
        if here[how.source].whole is None and held[name][0].dtype.itemsize == 1:
            del converted[name]                                # it is as it was loaded
        elif here[how.source].whole is None:
            rows = how.take(tensors[how.source])
            converted[name] = rows if how.is_in_file else quantised(_moved(rows, device, torch.float32, ferry), how.type)[0]
        if name in converted:
            held[name] = held[name][0], getattr(torch, spec.compute_dtype) if converted[name].dtype.itemsize > 1 else converted[name].dtype
        product = factors(terms, how, header.shapes[how.source], ferry) if terms else (None, None)
        if terms and name in splits:                           # of the matrix a rank has some rows, or some columns
            dim = splits[name].dim
            product = tuple(splits[name].own(each, spec.tensor_degree, tensor_rank) if each is product[dim] else each for each in product)
        add_at_use(model.get_submodule(name.removesuffix(".weight")), *product)
    shares = {name: _share(name, tensor, spec, splits, tensor_rank, addresses) for name, tensor in converted.items()}
    shares = {name: share for name, share in shares.items() if share is not None and not share.is_meta}
    leave(None if packed else [held[name][0] for name in shares])
    for name, tensor in shares.items():
        weight, dtype = held[name]
        weight.data = _moved(tensor, device, dtype, ferry)
        if files is not None:
            files.pop(id(weight), None)
            if tensor.dtype == dtype and tensor.untyped_storage().data_ptr() in addresses:
                files[id(weight)] = tensor
    del maps                                                   # kept until now, so that no other tensor got their addresses


def model_config(header, family):
    """Arguments of the diffusers class: from a file's shapes; of a folder, from its config.json, but for what ComfyUI tells by tensors."""
    if header.config is None:
        return family.config(header.shapes) | said_settings(header, family)
    rules = {name: family.config.rules[name] for name in family.by_tensors}
    rules = {name: rule(header.shapes) if callable(rule) else rule for name, rule in rules.items()}
    return header.config | rules | said_settings(header, family)


def metadata_of(header, family):
    """What a file's metadata says; of a diffusers folder, what it says of the family's settings, in the same words."""
    if header.config is None or not family.settings:
        return header.metadata
    said = family.in_folder(header.folder)
    if said is None:
        raise CheckpointError(f"{os.path.basename(header.path)} is a {family.name} model, of which a folder with its vae/config.json alone "
                              f"says which of them it is. Download the whole folder, or use the file of this model in ComfyUI's format.")
    return {"config": json.dumps({"transformer": said})}


def said_settings(header, family):
    """What a file's metadata says of the family's settings, under "_" and their names. Raises CheckpointError for what is not run."""
    metadata = metadata_of(header, family) if family.settings else {}
    try:
        said = dict(json.loads(metadata.get("config", "{}")).get("transformer", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{os.path.basename(header.path)} has metadata that cannot be read ({error}). Download it again.") from error
    for name, values in family.settings.items():
        if said.get(name, values[0]) not in values:
            raise CheckpointError(f"{os.path.basename(header.path)} is a {family.name} model whose metadata says {name} = {said[name]!r}, "
                                  f"and xDiT runs {' or '.join(map(repr, values))} only. Use Load Diffusion Model.")
    return {f"_{name}": said.get(name, values[0]) for name, values in family.settings.items()}


def build(family, config):
    """The family's diffusers model, which computes as ComfyUI's does."""
    model = getattr(importlib.import_module("diffusers"), family.transformer).from_config(config)
    family.amend(model, config)
    return model


def held_bytes(model, family, spec, splits={}):
    """Bytes that a rank with all blocks holds of parameters and buffers. The model may be on the meta device.

    splits: of spec.tensor_degree's, whose first rank, which has most, is asked about.
    """
    return round(sum(tensor.numel() * dtype.itemsize * (splits[name].share(spec.tensor_degree) if name in splits else 1)
                     for name, tensor, dtype in _held(model, family, spec)))


def block_bytes(model, family, spec):
    """Bytes of each block, over all lists of the plan, as a rank holds them."""
    held = _held(model, family, spec)
    return [sum(tensor.numel() * dtype.itemsize for name, tensor, dtype in held if name.startswith(
                tuple(f"{each}.{index}." for each in list_.names)))
            for list_ in family.plan.blocks for index in range(len(model.get_submodule(list_.name)))]


def block_sizes(model, plan):
    """Parameters of each block, over all lists of the plan: [(number, share an image token meets)]."""
    def size(block):
        packed = sum(module.out_features * module.in_features - module.weight.numel() for module in block.modules()
                     if type(module) is torch.nn.Linear)
        return sum(parameter.numel() for parameter in block.parameters()) + packed
    return [(sum(map(size, twins)), list_.image_share) for list_ in plan.blocks for twins in zip(*map(model.get_submodule, list_.names))]


def read_file(header, wanted):
    """{name: tensor of the file, a map of it}; what is not wanted(name) is on the meta device."""
    from safetensors import safe_open
    if header.stored:
        return read_tensors(header, wanted)
    tensors = {}
    for path in header.files:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                short = header.name_of(name, path)
                if short is not None:
                    tensors[short] = file.get_tensor(name) if wanted(short) else torch.empty(header.shapes[short], device="meta")
    return tensors


def _read_scales(header, tensors):
    """{name of a scaled weight: its scale, (1, 1) or (rows, 1)}; on the meta device for a weight that is there."""
    from safetensors import safe_open
    with safe_open(header.files[0], "pt") as file:
        return {name: (torch.empty(count, device="meta") if tensors[name].is_meta else file.get_tensor(header.prefix + scale)
                       ).to(torch.float32).view(-1, 1) for name, (scale, count) in header.scales.items()}


def read_plain(header, tensors, without=()):
    """These tensors of a file as plain numbers, but for those of the names `without`, which are on the meta device."""
    scales, plain = _read_scales(header, tensors) if header.scales else {}, dict(tensors)
    for name in header.quantised | set(without):
        shape, tensor = header.shapes[name], tensors[name]
        plain[name] = torch.empty(shape, device="meta") if name in without or tensor.is_meta else \
            unpacked(tensor, header.dtypes[name], scales.get(name), torch.float32).view(shape)
    return plain


def _converted(tensors, header, family, config, packed):
    """{name in the model: tensor}. tensors: of the file. What is packed there stays so, beside its scale; the rest is plain numbers."""
    if header.config is not None:
        return header.under_diffusers_names(tensors, family, config)
    packed = {name: how for name, how in packed.items() if how.is_in_file}
    converted = family.convert(read_plain(header, tensors, {how.source for how in packed.values()}), config)
    scales = _read_scales(header, tensors) if header.scales else {}
    for name, how in packed.items():
        converted[name] = how.take(tensors[how.source])
        if how.num_scales:
            scale = scales[how.source]
            # A tensor of its own for each part of a fused weight: a module's buffers are told apart by what they are.
            converted[f"{name.removesuffix('weight')}weight_scale"] = scale.view_as(scale) if how.num_scales == 1 else how.take(scale)
    return converted


def _is_here(name, blocks, model, family, header):
    """Does a rank with these blocks hold this tensor of the file? blocks: None: all."""
    return blocks is None or (block := _block_of(name, model, family, header)) is None or block in blocks


def _block_of(name, model, family, header):
    """Index of the block that a tensor of the file belongs to, over all lists; None for what is outside the blocks."""
    first = 0
    if name.startswith(family.plan.outside):
        return None
    for list_ in family.plan.blocks:
        prefixes = [f"{each}." for each in list_.names] if header.config is not None else [list_.in_file]
        for prefix in prefixes:
            if name.startswith(prefix):
                return first + int(name[len(prefix):].partition(".")[0])
        first += len(model.get_submodule(list_.name))
    return None


def _held(model, family, spec):
    """[(name, tensor, the dtype in which a rank holds it)] of all parameters and buffers."""
    storage, compute = getattr(torch, spec.storage_dtype), getattr(torch, spec.compute_dtype)
    exact = set(getattr(model, "_keep_in_fp32_modules", None) or ()) if compute.itemsize == 2 else set()
    scales = {name for name, _ in model.named_buffers() if name.endswith(".weight_scale")}

    def dtype_of(name, tensor):
        parts = set(name.split("."))
        if not tensor.is_floating_point() or parts & {"freqs_cos", "freqs_sin", "inv_freq"}:     # rotary tables stay as they were made
            return tensor.dtype
        if name in scales or f"{name}_scale" in scales:        # as the file has it
            return tensor.dtype
        if storage != compute:                                 # cast where they are used
            return compute if parts & set(family.unrounded) else storage
        return torch.float32 if parts & exact else compute
    return [(name, tensor, dtype_of(name, tensor)) for name, tensor in (*model.named_parameters(), *model.named_buffers())]


def _addresses(maps):
    return {tensor.untyped_storage().data_ptr() for tensor in maps if not tensor.is_meta}


def _move(model, device, family, spec, on_progress, addresses, splits, tensor_rank, to_quantise):
    """Take this rank's share of one tensor after the other, move and cast it, so that never two copies of the model exist; cast on
    the device. Returns {id of a weight: its values} of those that are as they are in the map of the file. addresses: of its tensors.

    to_quantise: {name: (tensor, type)} of weights that the model lacks, which are quantised on the device; emptied. Rows stand alone, so
    a rank quantises its own; of columns it has a share when the rows were quantised whole.
    """
    tensors = [(name, weight, to_quantise[name][0] if name in to_quantise else weight, dtype) for name, weight, dtype in
               _held(model, family, spec)]
    tensors = [each for each in tensors if not each[2].is_meta]                               # not of another stage
    ferry, homes = Ferry(device), {}
    read_bytes = [source.nbytes * (splits[name].share(spec.tensor_degree, tensor_rank) if name in splits and not (
        name in to_quantise and splits[name].dim) else 1) for name, _, source, _ in tensors]
    done_bytes, total_bytes = 0.0, round(sum(read_bytes))
    for (name, weight, source, dtype), own_bytes in zip(tensors, read_bytes):
        done_bytes += own_bytes
        if name in to_quantise:
            linear, by_rows = model.get_submodule(name.removesuffix(".weight")), name in splits and splits[name].dim == 0
            own = _share(name, source, spec, splits, tensor_rank, addresses) if by_rows else source
            numbers, linear.weight_scale = quantised(_moved(own, device, torch.float32, ferry), to_quantise.pop(name)[1])
            linear.weight = torch.nn.Parameter(numbers if by_rows else _share(name, numbers, spec, splits, tensor_rank, addresses),
                                               requires_grad=False)
        elif (own := _share(name, weight.data, spec, splits, tensor_rank, addresses)) is None:
            weight.data = weight.data[:0]
        else:
            weight.data = _moved(own, device, dtype, ferry)
            if own.dtype == dtype and own.untyped_storage().data_ptr() in addresses:
                homes[id(weight)] = own
        on_progress(round(done_bytes), total_bytes)
    on_progress(total_bytes, total_bytes)
    return homes


def _share(name, tensor, spec, splits, tensor_rank, addresses):
    """This rank's share of a tensor, None where it has none. It keeps no more of memory than itself, but for a map of the file."""
    own = splits[name].own(tensor, spec.tensor_degree, tensor_rank) if name in splits else tensor
    is_part = own is not None and own is not tensor and own.untyped_storage().nbytes() > own.nbytes
    return own.clone() if is_part and own.untyped_storage().data_ptr() not in addresses else own


def _moved(tensor, device, dtype, ferry):
    return (ferry.bring(tensor) if device.type == "cuda" and tensor.device.type == "cpu" else tensor).to(device, dtype)
