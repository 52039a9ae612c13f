"""Paths of diffusion models in ComfyUI's folders: their names for the widget, and their locations."""

import os

import folder_paths

FOLDERS = ("diffusion_models", "checkpoints")
SUFFIXES = (".safetensors", ".sft")        # the same format


def model_names():
    """Names of all models without duplicates: safetensors files, GGUF files, and folders of models/diffusers."""
    names = [name for folder in FOLDERS for name in folder_paths.get_filename_list(folder)
             if name.endswith(SUFFIXES)]
    return list(dict.fromkeys(names + _gguf_files() + _diffusers_folders()))


def path_of(model_name):
    """Return the path of a model by its name. Raises FileNotFoundError if it no longer exists."""
    for folder in (*FOLDERS, *_gguf_folders()):
        path = folder_paths.get_full_path(folder, model_name)
        if path is not None:
            return path
    for root in folder_paths.get_folder_paths("diffusers"):
        if os.path.isdir(os.path.join(root, model_name)):
            return os.path.join(root, model_name)
    raise FileNotFoundError(f"Press R to refresh the list: model_name {model_name} is in none of the folders "
                            f"models/{', models/'.join(FOLDERS)} and models/diffusers.")


def _gguf_folders():
    """Names of ComfyUI's folders that may contain GGUF files; unet_gguf if another pack has registered it."""
    return [name for name in ("diffusion_models", "unet_gguf") if name in folder_paths.folder_names_and_paths]


def _gguf_files():
    """GGUF files of diffusion models, which ComfyUI does not list itself."""
    roots = dict.fromkeys(root for name in _gguf_folders() for root in folder_paths.get_folder_paths(name))
    return sorted({name for root in roots if os.path.isdir(root)
                   for name in folder_paths.recursive_search(root, [".git"])[0]
                   if name.lower().endswith(".gguf")})


def _diffusers_folders():
    """Folders of models/diffusers with a transformer or a U-Net, named as by ComfyUI's DiffusersLoader; and second
    transformers in them, which are for low noise."""
    found = []
    for root in folder_paths.get_folder_paths("diffusers"):
        for folder, folders, _ in os.walk(root, followlinks=True):
            if not {"transformer", "unet"}.isdisjoint(folders):
                paths = [folder, *(os.path.join(folder, name) for name in folders if name == "transformer_2")]
                found += [os.path.relpath(path, root) for path in paths]
                folders.clear()
    return sorted(found)
