"""A checkpoint: a file or folder of a diffusion model, opened once, without its tensors, and everything known about
it."""

import hashlib
import logging
import os
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..models import FAMILIES
from ..models.common.family import Family
from ..models.common.unet import CLASSES, publishers_names
from ..protocol.errors import CheckpointError
from ..protocol.specs import ModelSpec
from .build_transformer import metadata_of, model_config
from .detection import class_name, recognise
from .diffusers_folder import Folder, extra_parts, read_folder
from .header_limits import MAX_HEADER_BYTES, MAX_TENSORS
from .memory_map import unreadable
from .meta_model import meta_model
from .quantisation import gguf, kitchen_layers
from .quantisation.layer_formats import Layer, attention_configs, layers_of
from .safetensors_header import header_bytes, read_safetensors
from .weight_table import weight_table

log = logging.getLogger(__name__)
# ComfyUI saves some models with the prefix model.model.
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.model.", "net.", "model.", "")
IN_UNET = "up_blocks.0.resnets.0.conv1.weight"                 # of a U-Net under diffusers' names


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of the diffusion model in a file or folder: names, dtypes and shapes.

    Names are without the file's prefix. The tensors of a U-Net's folder have the publisher's names here, and those of a
    family's extra components ComfyUI's.
    """

    path: str
    prefix: str                            # of the diffusion model's tensors in the file
    files: tuple[str, ...]                 # with its tensors
    shapes: dict[str, tuple[int, ...]]
    # safetensors' own names, e.g. "BF16"; or GGUF's; or a ComfyUI format, such as "nvfp4"
    dtypes: dict[str, str]
    metadata: dict[str, str]
    folder_config: dict | None = None      # config.json of a transformer's folder; None for files and U-Nets
    folder: Folder | None = None           # a diffusers folder
    # (file, name there) -> name here; None for a tensor that is left out
    renamed: dict[tuple[str, str], str | None] = field(default_factory=dict)
    other_tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)            # of an all-in-one checkpoint
    layers: dict[str, Layer] = field(default_factory=dict)     # weights of ComfyUI's quantised layers
    stored: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # GGUF: (first byte, stored shape)
    recognised: Family | None = None       # the family, if another process has detected it

    def name_of(self, key, file):
        """The name here of a tensor named `key` in a file; None if it is not the diffusion model's."""
        name = self.renamed.get((file, key), key.removeprefix(self.prefix))
        return name if key.startswith(self.prefix) and name in self.shapes else None

    @property
    def name(self):
        """Base name of the file or folder, for messages."""
        return os.path.basename(self.path)

    @cached_property
    def family(self):
        """The Family of this model. Raises CheckpointError if it is not supported, with the supported ones."""
        return self.recognised or recognise(self)

    @cached_property
    def config(self):
        """Arguments of the family's diffusers class. They are validated by `meta_model`."""
        return model_config(self)

    @cached_property
    def _meta_models(self):
        return {}

    def meta_model(self, quantisation=""):
        """The diffusers model on the meta device, with weights as stored: see meta_model.py. Cached for each
        quantisation; callers must not change it."""
        if quantisation not in self._meta_models:
            self._meta_models[quantisation] = meta_model(self, quantisation)
        return self._meta_models[quantisation]

    @cached_property
    def _weight_tables(self):
        return {}

    def weight_table(self, spec):
        """The WeightTable of this model. Cached for each set of dtypes, tensor degree and quantisation."""
        key = spec.storage_dtype, spec.compute_dtype, spec.tensor_degree, spec.quantisation
        if key not in self._weight_tables:
            self._weight_tables[key] = weight_table(self.meta_model(spec.quantisation), self.family, spec, self)
        return self._weight_tables[key]

    @cached_property
    def model_metadata(self):
        """The file's metadata about the model; for a folder, its config.json in the same format."""
        return metadata_of(self)

    def spec(self, storage_dtype, compute_dtype, stages=None, tensor_degree=1, quantisation="", fast=False,
             weights_memory=0):
        """The ModelSpec of this model. Its name changes with the files, dtypes and degrees. Raises CheckpointError if a
        file is missing."""
        form = storage_dtype, compute_dtype, stages, tensor_degree, quantisation, fast, weights_memory
        return ModelSpec(f"{self.name}-{self._state}{_digest(form)}", self.family.name, self.path, *form)

    @property
    def _state(self):
        try:
            return state_of(self.files)
        except FileNotFoundError as error:
            raise CheckpointError(f"Put the model's file back, or choose another, and queue the prompt again: "
                                  f"{error.filename} is no longer there.") from error

    def check_is(self, spec):
        """Raise CheckpointError if the files have changed since the ModelSpec was made."""
        if not (spec.state or spec.name.rpartition("-")[2]).startswith(self._state):
            raise CheckpointError(f"Queue the prompt again, which reloads the file: {self.name} has changed on disk "
                                  "since Load xDiT Model read it, and its weights are needed again.")

    def under_diffusers_names(self, tensors):
        """{name in diffusers' model: tensor} from {name here: tensor}. Some may be on the meta device."""
        if self.folder_config is None:
            return self.family.detection.convert(tensors, self.config)
        tensors = self.family.detection.with_split_linears(tensors)
        further = {name: tensor for name, tensor in tensors.items()
                   if name.startswith(self.family.detection.text_prefixes)}
        rest = {name: tensor for name, tensor in tensors.items() if name not in further}
        return rest | self.family.detection.convert(further, self.config) if further else rest

    @property
    def is_packed(self):
        """Whether some tensors are stored quantised."""
        return bool(self.layers or self.stored)

    @property
    def quantised(self):
        """Names of the weights that are stored quantised."""
        return self.layers.keys() | {name for name in self.stored if self.dtypes[name] in gguf.QUANTISED}


def open_checkpoint(path):
    """Read the header of a safetensors or GGUF file, or of the transformer in a diffusers folder.

    Raises CheckpointError if the file or folder is invalid, incomplete or cannot be opened.
    """
    try:
        if os.path.isdir(path):
            return _read_folder(path)
        return _read_gguf(str(path)) if str(path).lower().endswith(".gguf") else _read_safetensors(path)
    except OSError as error:
        raise unreadable(path, error) from error


def _read_safetensors(path):
    tensors, metadata, read = read_safetensors(path)
    prefix = _prefix(tensors)
    ours = {key[len(prefix):]: value for key, value in tensors.items() if key.startswith(prefix)}
    shapes, dtypes = {key: shape for key, (_, shape) in ours.items()}, {key: dtype for key, (dtype, _) in ours.items()}
    layers, marks = layers_of(shapes, dtypes, metadata, lambda name: read(prefix + name), os.path.basename(path),
                              prefix)
    if configs := attention_configs(shapes):
        log.info("%s selects an attention backend for %d modules, which is ignored: xDiT uses the attention "
                 "backend of xDiT Parallel Config.", os.path.basename(path), len(configs))
    kitchen_layers.check(layers.values(), os.path.basename(path))
    shapes |= {name: layer.shape for name, layer in layers.items()}
    dtypes |= {name: layer.type for name, layer in layers.items()}
    names = publishers_names(shapes) if IN_UNET in shapes and not marks else {key: key for key in shapes}
    return Checkpoint(str(path), prefix, (str(path),),
                      {names[key]: shape for key, shape in shapes.items() if key not in marks},
                  {names[key]: dtype for key, dtype in dtypes.items() if key not in marks}, metadata,
                  renamed={(str(path), prefix + key): name for key, name in names.items() if name != key},
                  other_tensors={key: shape for key, (_, shape) in tensors.items() if not key.startswith(prefix)},
                  layers={names[key]: layer for key, layer in layers.items()})


def state_of(files):
    """8 digits that change when any of these files changes on disk. Raises FileNotFoundError if one is missing."""
    return _digest([(file, os.stat(file).st_mtime_ns, os.stat(file).st_size) for file in files])


def open_spec(spec):
    """The Checkpoint of a ModelSpec. Raises CheckpointError if its files have changed since."""
    checkpoint = replace(open_checkpoint(spec.path), recognised=FAMILIES[spec.family])
    checkpoint.check_is(spec)
    return checkpoint


def _digest(values):
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


def _prefix(tensors):
    return next(p for p in PREFIXES if not p or any(key.startswith(p) for key in tensors))


def _read_gguf(path):
    tensors, stored, metadata = gguf.read_gguf(path)
    prefix = _prefix(tensors)
    ours = {key[len(prefix):]: value for key, value in tensors.items() if key.startswith(prefix)}
    return Checkpoint(path, prefix, (path,), {key: shape for key, (_, shape) in ours.items()},
                      {key: dtype for key, (dtype, _) in ours.items()},
                      {key: metadata[key] for key in ("config",) if key in metadata},
                  other_tensors={key: shape for key, (_, shape) in tensors.items() if not key.startswith(prefix)},
                  stored={key: stored[prefix + key] for key in ours})


def _read_folder(path):
    names, folder = extra_parts(), read_folder(path)
    is_unet, renamed, tensors = class_name(folder.config) in CLASSES, {}, {}
    if (num_bytes := sum(map(header_bytes, folder.files))) > MAX_HEADER_BYTES:
        raise CheckpointError(f"Choose another folder: the files of {os.path.basename(path)} have headers of "
                              f"{num_bytes:,} bytes, and at most {MAX_HEADER_BYTES:,} are read.")
    for file in map(str, folder.files):
        read = read_safetensors(file)[0]
        name_of = names.get(os.path.basename(os.path.dirname(file)))
        if name_of is not None:
            renamed |= {(file, key): name_of(key) for key in read}
        tensors |= {(file, key): value for key, value in read.items()}
        if len(tensors) > MAX_TENSORS:
            raise CheckpointError(f"Choose another folder: the files of {os.path.basename(path)} have more than "
                                  f"{MAX_TENSORS:,} tensors.")
    if is_unet:
        publishers = publishers_names([key for _, key in tensors])
        renamed |= {(file, key): publishers[key] for file, key in tensors}
    tensors = {renamed.get(key, key[1]): value for key, value in tensors.items()}
    tensors.pop(None, None)
    return Checkpoint(str(path), "", tuple(map(str, folder.files)), {key: shape for key, (_, shape) in tensors.items()},
                  {key: dtype for key, (dtype, _) in tensors.items()}, {}, None if is_unet else folder.config, folder,
                      renamed)


