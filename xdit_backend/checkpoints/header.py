"""What a model's files say of themselves, read without their tensors. Used by the host to recognise a model offline, and by the loader."""

import hashlib
import json
import math
import os
import struct
from dataclasses import dataclass, field

from ..models import FAMILIES, supported
from ..models.plan import Family
from ..models.unet import publishers_names
from ..protocol.errors import CheckpointError
from ..protocol.messages import ModelSpec
from . import gguf
from .folder import Folder, read_folder
from .nearest import NOT_THERE, nearest
from .scaled import scales_of

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
              "BOOL": 1}                   # of safetensors' types
# models of ComfyUI's: a part of a tensor's name that none of ours has -> which it is
NOT_RUN = {".audio_patch_proj.": "MiniMax H3", ".genre_embedder.": "ACE-Step", ".embed_image_indicator.": "Ideogram 4",
           ".clf.1.": "Stable Cascade", ".rotary_pos_emb.inv_freq": "Stable Audio", ".img_mod.modulate_table": "JoyImage"}
NOT_IN_DIFFUSERS = {".double_stream_layers.": "Boogu-Image", ".ref_image_refiner.": "OmniGen 2", ".t_embedder1.": "HiDream-O1",
                    ".latent_in.": "Hunyuan3D", ".moe.shared_experts.": "Hunyuan3D", ".context_repo_layers.": "TripoSplat",
                    ".mlp.all.proj_in_gate.": "SeedVR2", ".pixel_embedder.": "PixelDiT", ".attn.img_qkv.": "Lens"}
# parts of tensors' names -> what such files are. Some have their model's own names beside these
BESIDE_A_MODEL = ((("control_model.", "controlnet_", "zero_convs."), "a ControlNet: load it with Load ControlNet Model"),)
# looked through in this order, for files that are no model of a family
OTHERS = (
    ((".lora_", ".lora.", "_lora.", ".lokr_", ".hada_", ".diff_b"), "a LoRA: load it with a LoRA node"),
    *(((mark,), f"a {name} model, which xDiT does not run") for mark, name in NOT_RUN.items()),
    *(((mark,), f"a model of {name}, for which diffusers has no transformer") for mark, name in NOT_IN_DIFFUSERS.items()),
    ((".backbone.stem.", ".detector.backbone.", ".refinenet1."), "a model that finds things in pictures, and draws none"),
    (("down_blocks.0.attentions.", "down_blocks.1.attentions."),
     "part of a U-Net under diffusers' names, or a quantised one, which xDiT does not read"),
    (("input_blocks.",), "a U-Net of a kind that xDiT does not run"),
    (("transformer.text_model.", "text_model.encoder.", "encoder.block.0.layer.", "shared.weight", ".embed_tokens.",
      "token_embedding."),
     "a text encoder: load it with Load CLIP"),
    (("vision_model.encoder.",), "a CLIP vision model: load it with Load CLIP Vision"),
    (("blk.0.", "token_embd.", "enc.blk."), "a text encoder or a language model in GGUF"),
    (("decoder.conv_in.", "decoder.up.", "encoder.down.", "decoder.conv1.", "quant_conv.", "per_channel_statistics.",
      "taesd_decoder."),
     "a VAE: load it with Load VAE"))
ELSEWHERE = "For a model that ComfyUI itself knows use its own loader and KSampler, on one GPU."
OF_DIFFUSERS = ((("single_transformer_blocks.0.attn.", "transformer_blocks.0.attn", "blocks.0.attn1."),
                 "a model under diffusers' names: put it into models/diffusers, in a folder with its config.json"),)

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.model.", "net.", "model.", "")     # ComfyUI saves some under model.model.
UNET = "UNet2DConditionModel"
IN_UNET = "up_blocks.0.resnets.0.conv1.weight"                 # of one under diffusers' names
CLASSES = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}     # by their norm_type
MAX_HEADER_BYTES = 100 * 2 ** 20


@dataclass(frozen=True)
class Header:
    """Names, dtypes and shapes of the diffusion model in a file or folder; names without the prefix they have there.

    files: the safetensors files. config: of a diffusers folder, arguments of its class; else None. folder: of a diffusers folder, all that
    is read of it. A U-Net's tensors are under the publisher's names here, and config is None; those of a family's further
    parts are under ComfyUI's. renamed: {(file, name there): name here, or None of what is left out}. beside: names of what else is in an
    all-in-one checkpoint. scales: {a scaled weight: (the tensor that is its scale, how many numbers that has)}. stored: of a GGUF file,
    {name: (first byte, shape as stored)}.
    """

    path: str
    prefix: str
    files: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]                 # safetensors' own names, e.g. "BF16"; or GGUF's
    metadata: dict[str, str]
    config: dict | None = None
    folder: Folder | None = None
    renamed: dict[tuple[str, str], str | None] = field(default_factory=dict)
    beside: dict[str, tuple[int, ...]] = field(default_factory=dict)
    scales: dict[str, tuple[str, int]] = field(default_factory=dict)
    stored: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def name_of(self, key, file):
        """The name here of a tensor that a file calls `key`; None where it is beside the diffusion model."""
        name = self.renamed.get((file, key), key.removeprefix(self.prefix))
        return name if key.startswith(self.prefix) and name in self.shapes else None

    def under_diffusers_names(self, tensors, family, config):
        """{name in diffusers' model: tensor} of {name here: tensor}. Some may be on the meta device."""
        if self.config is None:
            return family.convert(tensors, config)
        further = {name: tensor for name, tensor in tensors.items() if name.startswith(family.prepares)}
        rest = {name: tensor for name, tensor in tensors.items() if name not in further}
        return rest | family.convert(further, config) if further else rest

    @property
    def is_packed(self):
        """Is it a file whose tensors are not all what they say, or a GGUF file?"""
        return bool(self.scales or self.stored)

    @property
    def quantised(self):
        """Names of weights that are not as plain numbers in the file."""
        return self.scales.keys() | {name for name in self.stored if self.dtypes[name] in gguf.QUANTISED}


def read_header(path):
    """Read the header of a safetensors or GGUF file, or of the transformer in a diffusers folder.

    Raises CheckpointError for what is not a whole file or a complete folder.
    """
    if os.path.isdir(path):
        return _read_folder(path)
    if str(path).lower().endswith(".gguf"):
        return _read_gguf(str(path))
    tensors, metadata, read = _read_file(path)
    prefix = _prefix(tensors)
    ours = {key[len(prefix):]: value for key, value in tensors.items() if key.startswith(prefix)}
    shapes, dtypes = {key: shape for key, (_, shape) in ours.items()}, {key: dtype for key, (dtype, _) in ours.items()}
    scales, marks = scales_of(shapes, dtypes, metadata, lambda name: read(prefix + name), os.path.basename(path), prefix)
    names = publishers_names(shapes) if IN_UNET in shapes and not marks else {key: key for key in shapes}
    return Header(str(path), prefix, (str(path),), {names[key]: shape for key, shape in shapes.items() if key not in marks},
                  {names[key]: dtype for key, dtype in dtypes.items() if key not in marks}, metadata,
                  renamed={(str(path), prefix + key): name for key, name in names.items() if name != key},
                  beside={key: shape for key, (_, shape) in tensors.items() if not key.startswith(prefix)},
                  scales={key: (scale, math.prod(shapes[scale])) for key, scale in scales.items()})


def model_spec(header, family, storage_dtype, compute_dtype, stages=None, tensor_degree=1, quantisation=""):
    """The spec of a model on disk. The same files, dtypes and degrees have the same name, changed ones another."""
    digest = state_of(header.files) + _digest((storage_dtype, compute_dtype, stages, tensor_degree, quantisation))
    return ModelSpec(f"{os.path.basename(header.path)}-{digest}", family.name, header.path, storage_dtype, compute_dtype, stages,
                     tensor_degree, quantisation)


def state_of(files):
    """What changes with these files on disk, as 8 digits."""
    return _digest([(file, os.stat(file).st_mtime_ns, os.stat(file).st_size) for file in files])


def header_of(spec):
    """The header of a spec's model. Raises CheckpointError where the files are others than those that the spec was made for."""
    header = read_header(spec.path)
    if not (spec.state or spec.name.rpartition("-")[2]).startswith(state_of(header.files)):
        raise CheckpointError(f"{os.path.basename(spec.path)} has changed on disk since Load xDiT Model read it, and its weights are "
                              f"needed again. Queue the prompt again: it loads the file anew.")
    return header


def _digest(values):
    return hashlib.sha256(repr(values).encode()).hexdigest()[:8]


def _prefix(tensors):
    return next(p for p in PREFIXES if not p or any(key.startswith(p) for key in tensors))


def _read_gguf(path):
    tensors, stored, metadata = gguf.read_gguf(path)
    prefix = _prefix(tensors)
    ours = {key[len(prefix):]: value for key, value in tensors.items() if key.startswith(prefix)}
    return Header(path, prefix, (path,), {key: shape for key, (_, shape) in ours.items()}, {key: dtype for key, (dtype, _) in ours.items()},
                  {key: metadata[key] for key in ("config",) if key in metadata},
                  beside={key: shape for key, (_, shape) in tensors.items() if not key.startswith(prefix)},
                  stored={key: stored[prefix + key] for key in ours})


def folder_of(path):
    """The Folder at a path, with the parts that a family reads beside its model. Raises CheckpointError where it is none."""
    return read_folder(path, tuple(_further()))


def _further():
    """{a part of a folder that belongs to a family's model: a function of a tensor's name there -> its name here, or None}"""
    return {part: name_of for family in FAMILIES.values() for part, name_of in family.further.items()}


def _read_folder(path):
    names, folder = _further(), folder_of(path)
    is_unet, renamed, tensors = _class_name(folder.config) == UNET, {}, {}
    for file in map(str, folder.files):
        read = _read_file(file)[0]
        name_of = names.get(os.path.basename(os.path.dirname(file)))
        if name_of is not None:
            renamed |= {(file, key): name_of(key) for key in read}
        tensors |= {(file, key): value for key, value in read.items()}
    if is_unet:
        publishers = publishers_names([key for _, key in tensors])
        renamed |= {(file, key): publishers[key] for file, key in tensors}
    tensors = {renamed.get(place, place[1]): value for place, value in tensors.items()}
    tensors.pop(None, None)
    return Header(str(path), "", tuple(map(str, folder.files)), {key: shape for key, (_, shape) in tensors.items()},
                  {key: dtype for key, (dtype, _) in tensors.items()}, {}, None if is_unet else folder.config, folder, renamed)


def _read_file(path):
    """({name: (dtype, shape)}, metadata, a function name -> bytes of a tensor) of a safetensors file."""
    name = os.path.basename(path)
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size):
            raise CheckpointError(f"{name} is not a safetensors file{_what_instead(start)}.")
        try:
            entries = json.loads(file.read(length))
            metadata = entries.pop("__metadata__", {})
            if not all(type(value) is str for value in metadata.values()):
                raise ValueError("its metadata are not all texts")
            tensors = {key: (entry["dtype"], tuple(entry["shape"])) for key, entry in entries.items()}
            end = _check_places({key: (*tensors[key], *entry["data_offsets"]) for key, entry in entries.items()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{name} has a header that cannot be read ({error}). Download the file again.") from error
    if 8 + length + end > size:
        raise CheckpointError(f"{name} is cut short: its header promises {8 + length + end:,} bytes and the file has {size:,}. "
                              f"Download it again.")

    def read(key):
        start, stop = entries[key]["data_offsets"]
        with open(path, "rb") as file:
            file.seek(8 + length + start)
            return file.read(stop - start)
    return tensors, metadata, read


def _what_instead(start):
    """What begins so, where a safetensors file was to be, and what to do about it."""
    if not start:
        return ": it is empty. Download it again"
    if start.lstrip().startswith(b"<"):
        return ": it is a web page, which some sites send in place of a file that needs a login. Log in there and download it again"
    return ". Choose a .safetensors file of a diffusion model"


def _check_places(entries):
    """Where the last tensor ends. entries: {name: (dtype, shape, start, stop)}. Raises ValueError where they do not follow one another."""
    end = 0
    for key, (dtype, shape, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if dtype not in ITEM_BYTES:
            raise ValueError(f"{key} is of the unknown type {dtype}")
        if not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
            raise ValueError(f"{key} has shape {list(shape)} and bytes {start} to {stop}")
        if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"{key} has {stop - start:,} bytes, and a {dtype} of shape {list(shape)} takes "
                             f"{math.prod(shape) * ITEM_BYTES[dtype]:,}")
        if start != end:
            raise ValueError(f"{key} starts at byte {start:,}, and what comes before it ends at {end:,}")
        end = stop
    return end


def recognise(header) -> Family:
    """Name the family of a file. Raises CheckpointError when it is none that can be run, saying which can."""
    name = os.path.basename(header.path)
    if header.config is not None:
        return _family_of_folder(name, header.folder)
    _refuse_others(name, header.shapes, BESIDE_A_MODEL)
    for family in FAMILIES.values():
        if _asked(family.recognise, header.shapes):
            # Where what it would look at is not there, outline() names it.
            reason = _asked(family.refuse, header.shapes, header.beside)
            if reason:
                raise CheckpointError(f"{name} is a {family.name} model, but {reason}.")
            return family
    if header.folder is not None:
        raise CheckpointError(f"{name} is the folder of a U-Net of a kind that xDiT does not run. It runs {supported()}.")
    _refuse_others(name, header.shapes, OTHERS)
    near = nearest(header.shapes)
    if near:
        raise CheckpointError(f"{name} is nearly a {near[0].name} model, but {near[1]}. Download it again, or choose another file. "
                              f"xDiT runs {supported()}.")
    _refuse_others(name, header.shapes, OF_DIFFUSERS)
    raise CheckpointError(f"{name} is not a diffusion model that xDiT runs. {ELSEWHERE} xDiT runs {supported()}, from "
                          f".safetensors and .gguf files in ComfyUI's or the publisher's format.")


def _asked(rule, *arguments):
    """What a family's rule says of a file; None where the file lacks what the rule looks at."""
    try:
        return rule(*arguments)
    except NOT_THERE:
        return None


def _refuse_others(name, shapes, others):
    for marks, what in others:
        if any(mark in f".{key}" for key in shapes for mark in marks):
            raise CheckpointError(f"{name} is {what}." if ": " in what else f"{name} is {what}. {ELSEWHERE} xDiT runs {supported()}.")


def _family_of_folder(name, folder):
    """The family of the class that config.json means; of several, the one whose fixed settings, and further parts, it has most of."""
    config, fixed = folder.config, lambda family: [rule for rule in family.config.rules.items() if not callable(rule[1])]
    of_class = [family for family in FAMILIES.values() if _class_name(config) == family.transformer]
    if not of_class:
        raise CheckpointError(f"{name} is {_what(_class_name(config))}. xDiT runs {supported()}.")
    return max(of_class, key=lambda family: sum(config.get(key, value) == value for key, value in fixed(family))
               + len(folder.further.keys() & family.further.keys()))


def _class_name(config):
    """The class that a folder's config.json means; older ones name what DiT's and PixArt's were split from. "" where it says none."""
    name = config.get("_class_name") or (config.get("architectures") or [""])[:1]      # the second is of text encoders
    name = name[0] if isinstance(name, list) and name else name
    return CLASSES.get(str(config.get("norm_type")), name) if name == "Transformer2DModel" else name if isinstance(name, str) else ""


def _what(class_name):
    """What a model of a class is that no family has."""
    if not class_name:
        return "a folder whose config.json does not say which model it is (_class_name), as diffusers' do"
    text = "which is a text encoder: load a file of it with Load CLIP"
    kinds = {"Autoencoder": "which is a VAE: load a file of it with Load VAE", "Text": text, "Encoder": text,
             "ControlNet": "which is a ControlNet: load a file of it with Load ControlNet Model"}
    return f"a {class_name}, {next((words for mark, words in kinds.items() if mark in class_name), 'which xDiT does not run')}"
