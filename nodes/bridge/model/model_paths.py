"""The files and folders of diffusion models in ComfyUI's folders: their names for a widget, and where they are.
Used by Load xDiT Model."""

import os

import folder_paths

FOLDERS = ("diffusion_models", "checkpoints")
SUFFIXES = (".safetensors", ".sft")        # the second is the same under another name


def model_names():
    """Names of all, each once: of safetensors files, GGUF files, and folders of models/diffusers."""
    names = [name for folder in FOLDERS for name in folder_paths.get_filename_list(folder)
             if name.endswith(SUFFIXES)]
    return list(dict.fromkeys(names + _gguf_files() + _diffusers_folders()))


def path_of(model_name):
    """Where a name of model_names is. Raises FileNotFoundError where it is no more."""
    for folder in (*FOLDERS, *_gguf_folders()):
        path = folder_paths.get_full_path(folder, model_name)
        if path is not None:
            return path
    for root in folder_paths.get_folder_paths("diffusers"):
        if os.path.isdir(os.path.join(root, model_name)):
            return os.path.join(root, model_name)
    raise FileNotFoundError(f"model_name: {model_name} is in none of the folders models/{', models/'.join(FOLDERS)} "
                            f"and models/diffusers. Press R to refresh the list.")


def _gguf_folders():
    """Names of ComfyUI's folders that may hold GGUF files; of unet_gguf, where another pack has registered it."""
    return [name for name in ("diffusion_models", "unet_gguf") if name in folder_paths.folder_names_and_paths]


def _gguf_files():
    """GGUF files of diffusion models, which ComfyUI does not list of itself."""
    roots = dict.fromkeys(root for name in _gguf_folders() for root in folder_paths.get_folder_paths(name))
    return sorted({name for root in roots if os.path.isdir(root)
                   for name in folder_paths.recursive_search(root, [".git"])[0]
                   if name.lower().endswith(".gguf")})


def _diffusers_folders():
    """Folders of models/diffusers that have a transformer or a U-Net, as ComfyUI's DiffusersLoader names them; and a
    second transformer in one, which is for low noise."""
    found = []
    for root in folder_paths.get_folder_paths("diffusers"):
        for folder, folders, _ in os.walk(root, followlinks=True):
            if not {"transformer", "unet"}.isdisjoint(folders):
                parts = [folder, *(os.path.join(folder, part) for part in folders if part == "transformer_2")]
                found += [os.path.relpath(part, root) for part in parts]
                folders.clear()
    return sorted(found)
