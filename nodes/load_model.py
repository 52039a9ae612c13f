"""Load xDiT Model: where Load Diffusion Model was."""

import os

import folder_paths
from comfy_api.latest import io

from ..xdit_backend.config import ParallelConfig
from ..xdit_backend.models import supported
from .bridge.model.checkpoints import fingerprint
from .bridge.model.shell import WEIGHT_DTYPES, load_shell
from .bridge.supported.inputs import check_links
from .parallel_config import Parallel

FOLDERS = ("diffusion_models", "checkpoints")
SUFFIXES = (".safetensors", ".sft")        # the second is the same under another name


class XDiTLoadModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        names = [name for folder in FOLDERS for name in folder_paths.get_filename_list(folder)
                 if name.endswith(SUFFIXES)]
        names += gguf_files() + diffusers_folders()
        return io.Schema(
            node_id="XDiTLoadModel",
            display_name="Load xDiT Model",
            category="xDiT",
            description="Loads a diffusion model on all devices: a file that Load Diffusion Model takes, of the "
                        "families that the help page lists, or the diffusion model of an all-in-one checkpoint.",
            search_aliases=["load diffusion model", "unet loader", "multi gpu"],
            inputs=[
                io.Combo.Input("model_name", options=list(dict.fromkeys(names)), tooltip=f"A .safetensors file of "
                               f"{supported(last='or')}, in models/diffusion_models or models/checkpoints; a .gguf "
                               f"file in models/diffusion_models; or a folder of models/diffusers."),
                io.Combo.Input("weight_dtype", options=list(WEIGHT_DTYPES), default="default",
                               tooltip="How the weights are held. default: as ComfyUI's own loader would; what is "
                               "quantised in a file stays so. fp8_e4m3fn and fp8_e5m2 halve the memory and change the "
                               "picture a little; fp8_e4m3fn_fast also multiplies in that type, on cards that can. "
                               "int8 halves it, with a scale for each row, and nf4 takes a bit more than a quarter: "
                               "layers are quantised when they are loaded (nf4: with the package bitsandbytes)."),
                Parallel.Input("parallel", optional=True,
                               tooltip="From xDiT Parallel Config. Not connected: all GPUs, split "
                               "chosen for each run."),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model_name, weight_dtype, parallel=None) -> io.NodeOutput:
        check_links(model_name=model_name, weight_dtype=weight_dtype, parallel=parallel)
        return io.NodeOutput(load_shell(_path_of(model_name), weight_dtype, parallel or ParallelConfig()))

    @classmethod
    def fingerprint_inputs(cls, model_name, **others):
        """ComfyUI runs the node again where this changes: when other files have taken the place of the model's."""
        return fingerprint(_path_of(model_name))


def _path_of(model_name):
    for folder in (*FOLDERS, *gguf_folders()):
        path = folder_paths.get_full_path(folder, model_name)
        if path is not None:
            return path
    for root in folder_paths.get_folder_paths("diffusers"):
        if os.path.isdir(os.path.join(root, model_name)):
            return os.path.join(root, model_name)
    raise FileNotFoundError(f"model_name: {model_name} is in none of the folders models/{', models/'.join(FOLDERS)} "
                            f"and models/diffusers. Press R to refresh the list.")


def gguf_folders():
    """Names of ComfyUI's folders that may hold GGUF files; of unet_gguf, where another pack has registered it."""
    return [name for name in ("diffusion_models", "unet_gguf") if name in folder_paths.folder_names_and_paths]


def gguf_files():
    """GGUF files of diffusion models, which ComfyUI does not list of itself."""
    roots = dict.fromkeys(root for name in gguf_folders() for root in folder_paths.get_folder_paths(name))
    return sorted({name for root in roots if os.path.isdir(root)
                   for name in folder_paths.recursive_search(root, [".git"])[0]
                   if name.lower().endswith(".gguf")})


def diffusers_folders():
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
