"""What the page asks before it converts a workflow: which of its files the workers cannot have, read from headers. Used by __init__.py."""

import asyncio
import os

import torch
from aiohttp import web

import comfy.sd
import folder_paths

from ...xdit_backend.autoencoders import supported
from ...xdit_backend.checkpoints.header import read_header, recognise
from ...xdit_backend.protocol.errors import CheckpointError
from .vae_kinds import kind_of

MAX_FILES = 200
VAE_PREFIXES = ("first_stage_model.", "vae.")


def add_routes(routes):
    """POST /xdit/refusals {"models": [file], "vaes": [file]} -> {"models": {file: why not}, "vaes": {file: why not}}.

    Files that are not here, or of which nothing can be said, are in neither. 400 for a body of another form.
    """
    @routes.post("/xdit/refusals")
    async def answer(request):
        try:
            asked = await request.json()
        except ValueError:
            asked = None
        if not _is_asked(asked):
            return web.json_response({"error": f'Send {{"models": [names of files], "vaes": [names of files]}}, at most {MAX_FILES} each.'},
                                     status=400)
        return web.json_response(await asyncio.to_thread(refusals, asked["models"], asked["vaes"]))


def refusals(models, vaes):
    """{"models": {name: words}, "vaes": {name: words}} of the files that Load xDiT Model and the distributed VAE nodes would refuse."""
    return {"models": _refused(models, ("diffusion_models", "checkpoints", "unet_gguf"), refused_model),
            "vaes": _refused(vaes, ("vae", "checkpoints"), refused_vae)}


def refused_model(path):
    """Why Load xDiT Model would refuse this file, or None."""
    try:
        recognise(read_header(path))
    except CheckpointError as error:
        return str(error)


def refused_vae(path):
    """Why Distributed VAE Decode would refuse the VAE of this file, or None. ComfyUI's own VAE is made of the shapes alone."""
    if not path.endswith(".safetensors"):
        return None
    try:
        header = read_header(path)
    except CheckpointError as error:
        return str(error)
    shapes = {key.removeprefix(prefix): shape for prefix in VAE_PREFIXES for key, shape in (header.shapes | header.beside).items()
              if key.startswith(prefix)} or header.shapes
    try:
        with torch.device("meta"):
            vae = comfy.sd.VAE(sd={key: torch.empty(shape) for key, shape in shapes.items()}, metadata=header.metadata)
    except RuntimeError:                                       # of load_state_dict: ComfyUI's loader will say more
        return None
    model = vae.first_stage_model
    if model is None or kind_of(model) is not None:
        return None
    return f"The VAE in {os.path.basename(path)} ({type(model).__name__}) is none of {supported()}."


def _refused(names, folders, reason_of):
    found = {}
    for name in names:
        path = next(filter(None, (folder_paths.get_full_path(folder, name) for folder in folders)), None)
        reason = path and reason_of(path)
        if reason:
            found[name] = reason
    return found


def _is_asked(asked):
    return isinstance(asked, dict) and asked.keys() == {"models", "vaes"} and all(
        isinstance(names, list) and len(names) <= MAX_FILES and all(isinstance(name, str) for name in names) for names in asked.values())
