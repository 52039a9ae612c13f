"""Files of a diffusers folder: its diffusion model's weights, and the configs of it and of other components."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..models import FAMILIES
from ..protocol.bounded_json import parse_json
from ..protocol.errors import CheckpointError
from .header_limits import MAX_CONFIG_BYTES, MAX_CONFIG_VALUES

COMPONENTS = ("transformer", "unet")
# configs of other components that describe the diffusion model
OTHER_CONFIGS = {"model_index": "model_index.json", "scheduler": "scheduler/scheduler_config.json",
                 "vae": "vae/config.json"}
SHARD = re.compile(r"-(\d+)-of-(\d+)")
INSTEAD = "Download the folder again, or choose another."


@dataclass(frozen=True)
class Folder:
    """The contents of a diffusers folder that are read."""

    config: dict                           # of the diffusion model
    files: tuple[Path, ...]                # with weights
    other_configs: dict[str, dict]         # those of OTHER_CONFIGS that exist
    extra_parts: dict[str, dict]           # other component whose weights are read -> its config
    config_files: tuple[Path, ...]         # all JSON files that were read


def files_of(path):
    """The files of a model: itself, or those of a diffusers folder. Raises CheckpointError if a folder is not one."""
    if not os.path.isdir(path):
        return [str(path)]
    folder = read_folder(path)
    return [*map(str, folder.config_files), *map(str, folder.files)]


def extra_parts():
    """{component of a folder that belongs to a family's model, in addition to PARTS: function from the name of a tensor
    there to its name in the checkpoint, or None}."""
    return {part: name_of for family in FAMILIES.values()
            for part, name_of in family.detection.folder.extra_parts.items()}


def read_folder(folder):
    """Read a diffusers folder, or its subfolder with the diffusion model, with its extra components.

    Raises CheckpointError if it is not such a folder, or incomplete.
    """
    folder = Path(folder)
    own = next((folder / part for part in COMPONENTS if (folder / part).is_dir()), folder)
    config = own / "config.json"
    if not config.is_file():
        raise CheckpointError(f"{folder.name} is not a diffusers folder with a transformer or a U-Net: {own} lacks "
                              f"config.json.{_describe_components(folder)}")
    files = _weights(own, folder.name)
    root = folder.parent if own == folder and (folder.parent / OTHER_CONFIGS["model_index"]).is_file() else folder
    other_configs = {name: root / path for name, path in OTHER_CONFIGS.items() if (root / path).is_file()}
    components = {part: root / part / "config.json" for part in extra_parts()
                  if (root / part / "config.json").is_file()}
    for part in components:
        files += _weights(root / part, folder.name)
    return Folder(read_json(config), files, {name: read_json(path) for name, path in other_configs.items()},
                  {part: read_json(path) for part, path in components.items()},
                  (config, *other_configs.values(), *components.values()))


def read_json(path):
    """The settings in a JSON file of a folder. Raises CheckpointError if it cannot be read or is not an object."""
    path = Path(path)
    try:
        with open(path, "rb") as file:
            settings = parse_json(file.read(MAX_CONFIG_BYTES + 1), MAX_CONFIG_BYTES, MAX_CONFIG_VALUES)
    except (ValueError, OSError) as error:                     # invalid text raises ValueError too
        raise CheckpointError(f"{INSTEAD} {path} is not a JSON file that can be read ({error}).") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{INSTEAD} {path} contains a {type(settings).__name__}, and must contain an object of "
                              "settings.")
    return settings


def _weights(own, name):
    """The files of one set of weights: of the one without a variant (fp16, ...), otherwise of the only one. A set may
    have several shards."""
    sets = {}
    for file in sorted(own.glob("*.safetensors")):
        shard = SHARD.search(file.stem)
        sets.setdefault((SHARD.sub("", file.stem), int(shard[2]) if shard else 1), []).append(file)
    plain = {key: files for key, files in sets.items() if "." not in key[0]} or sets
    if not plain:
        pickled = " Its .bin files are not read, since they can run code." if list(own.glob("*.bin")) else ""
        raise CheckpointError(f"{name} is not a diffusers folder with a transformer or a U-Net that can be read: "
                              f"{own} lacks .safetensors files.{pickled} {INSTEAD}")
    if len(plain) > 1:
        several = " and as ".join(files[0].name for files in plain.values())
        raise CheckpointError(f"Leave the files of one model in {own}: {name} contains it more than once, as {several}"
                              ", and the choice is ambiguous.")
    (_, count), files = next(iter(plain.items()))
    if len(files) < count:
        raise CheckpointError(f"{INSTEAD} {name} is incomplete: {own} has {len(files)} of {count} shards, including "
                              f"{files[0].name}.")
    return tuple(files)


def _describe_components(folder):
    """A sentence about the components of a folder without a diffusion model."""
    others = sorted(path.parent.name for path in folder.glob("*/config.json"))
    loaders = [loader for part, loader in (("text_encoder", "Load CLIP"), ("vae", "Load VAE"))
               if any(each.startswith(part) for each in others)]
    return (f" It has {', '.join(others)}."
            if others else "") + (f" {' and '.join(loaders)} take files of such parts." if loaders else "")
