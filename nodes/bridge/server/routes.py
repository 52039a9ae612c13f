"""HTTP routes of the page: files that would be rejected, before it converts a workflow, and the panel's state and
actions.

Each route accepts requests of ComfyUI's own page only (same_origin.py), in addition to ComfyUI's own checks.
"""

import asyncio
import dataclasses
import logging
import os

import torch
from aiohttp import web

import comfy.sd
import folder_paths

from ....xdit_backend.autoencoders import supported
from ....xdit_backend.config import ParallelConfig
from ....xdit_backend.protocol.bounded_json import parse_json
from ....xdit_backend.protocol.errors import CheckpointError, XDiTError
from ..model.checkpoint_cache import CHECKPOINTS
from ..model.detection import Detection
from ..vae.vae_detection import kind_of, name_of
from ..workers.worker_groups import fitting_here
from . import panel
from .same_origin import add_checked

log = logging.getLogger(__name__)

MAX_FILES, MAX_NAME = 200, 100
MAX_BODY_BYTES, MAX_BODY_VALUES = 2 ** 18, 2 ** 12
MAX_SETTING = 4096                         # characters of a setting: device names of a hundred machines
WATCHED_S = 1.0                            # interval of updates to an open panel
PIXELS = "pixel_space"                     # an entry of ComfyUI's Load VAE that is not a file
VAE_PREFIXES = ("first_stage_model.", "vae.")


def add_routes(server):
    """Add this pack's routes. An invalid body is answered with status 400.

    POST /xdit/refusals {"models": [file], "vaes": [file]} -> {"models": {file: reason}, "vaes": {file: reason}}; files
    that do not exist, or are not rejected, are in neither. GET /xdit/state, /xdit/timeline, /xdit/trace -> results of
    panel.py's functions of these names. POST /xdit/watch {"client": its id of ComfyUI's socket, "open": bool}: while
    open, changes of the state are sent to that socket as "xdit.state". POST /xdit/fit {"settings": {field of
    ParallelConfig: value}} -> {"settings": those that differ in the closest config that can run here}. POST /xdit/do
    {"action": one of panel.ACTIONS} -> {}; status 409 while a prompt runs, or if the action fails.
    """
    own = web.RouteTableDef()
    _add_questions(own)
    _add_panel(own, server)
    add_checked(server.routes, own)


def _add_questions(routes):
    """Add the routes for rejected files and for settings that can run here."""
    @routes.post("/xdit/refusals")
    async def answer_refusals(request):
        body = await _body(request)
        if not _names_files(body):
            return _refuse(f'Send {{"models": [names of files], "vaes": [names of files]}}, at most {MAX_FILES} each.')
        return web.json_response(await asyncio.to_thread(refusals, body["models"], body["vaes"]))

    @routes.post("/xdit/fit")
    async def answer_fit(request):
        body = await _body(request)
        if not isinstance(body, dict) or body.keys() != {"settings"} or not _are_settings(body["settings"]):
            return _refuse('Send {"settings": {name of a setting of xDiT Parallel Config: its value}}.')
        try:
            found = await asyncio.to_thread(fitting_here, ParallelConfig(**body["settings"]))
        except XDiTError as error:
            return _refuse(str(error), 409)
        return web.json_response({"settings": {name: value for name in body["settings"]
                                               if (value := getattr(found, name)) != body["settings"][name]}})


def _add_panel(routes, server):
    """Add the routes of the panel's state and actions."""
    watch = PanelUpdates(server)

    @routes.get("/xdit/state")
    async def answer_state(request):
        return web.json_response(await asyncio.to_thread(panel.state))

    @routes.get("/xdit/timeline")
    async def answer_timeline(request):
        return web.json_response(await asyncio.to_thread(panel.timeline))

    @routes.get("/xdit/trace")
    async def answer_trace(request):
        return web.json_response(await asyncio.to_thread(panel.trace),
                                 headers={"Content-Disposition": 'attachment; filename="xdit-trace.json"'})

    @routes.post("/xdit/watch")
    async def answer_watch(request):
        body = await _body(request)
        is_valid = isinstance(body, dict) and body.keys() == {"client", "open"} and isinstance(body["open"], bool)
        if not is_valid or not isinstance(body["client"], str) or not 0 < len(body["client"]) <= MAX_NAME:
            return _refuse('Send {"client": id of the socket, "open": true or false}.')
        if body["open"] and body["client"] not in server.sockets:
            return _refuse("No socket has this id.")
        watch.set(body["client"], body["open"])
        return web.json_response({})

    @routes.post("/xdit/do")
    async def answer_do(request):
        body = await _body(request)
        if not isinstance(body, dict) or body.keys() != {"action"} or body["action"] not in list(panel.ACTIONS):
            return _refuse(f'Send {{"action": one of {", ".join(panel.ACTIONS)}}}.')
        if server.prompt_queue.currently_running:
            return _refuse("Cancel the running prompt, or wait until it has finished.", 409)
        try:
            await asyncio.to_thread(panel.ACTIONS[body["action"]])
        except XDiTError as error:
            return _refuse(str(error), 409)
        return web.json_response({})


class PanelUpdates:
    """Sends changes of the panel's state to pages with an open panel; idle without one."""

    def __init__(self, server):
        self._server, self._sent, self._task = server, {}, None            # _sent: socket's id -> last sent state

    def set(self, client, is_open):
        if not is_open:
            self._sent.pop(client, None)
            return
        self._sent[client] = None
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self):
        while self._sent:
            try:
                state = await asyncio.to_thread(panel.state)
            except Exception:                                  # an error in the panel must not affect a prompt
                log.exception("could not read the panel's state")
                state = None
            for client in list(self._sent):
                if client not in self._server.sockets:         # the page is gone
                    self._sent.pop(client, None)
                elif state is not None and self._sent.get(client) != state:
                    self._sent[client] = state
                    await self._server.send_json("xdit.state", state, client)
            await asyncio.sleep(WATCHED_S)


def refusals(models, vaes):
    """Return {"models": {name: reason}, "vaes": {name: reason}} for the files that Load xDiT Model and the distributed
    VAE nodes would reject."""
    in_memory = {name: f"{name} has no layers to run on the workers: its latents are the image's pixels."
                 for name in vaes if name == PIXELS}
    return {"models": _refused(models, ("diffusion_models", "checkpoints", "unet_gguf"), refused_model),
            "vaes": _refused(vaes, ("vae", "checkpoints"), refused_vae) | in_memory}


def refused_model(path):
    """Reason for which Load xDiT Model would reject this file, or None. No weights are read."""
    try:
        Detection(CHECKPOINTS.open(path), None)
    except XDiTError as error:
        return str(error)


def refused_vae(path):
    """Reason for which Distributed VAE Decode would reject the VAE of this file, or None. ComfyUI's VAE is created from
    the shapes alone."""
    if not path.endswith((".safetensors", ".sft")):
        return None
    try:
        header = CHECKPOINTS.open(path)
    except CheckpointError as error:
        return str(error)
    shapes = ({key.removeprefix(prefix): shape for prefix in VAE_PREFIXES
               for key, shape in (header.shapes | header.other_tensors).items()
              if key.startswith(prefix)} or header.shapes)
    try:
        with torch.device("meta"):
            vae = comfy.sd.VAE(sd={key: torch.empty(shape) for key, shape in shapes.items()}, metadata=header.metadata)
    # raised for shapes of no VAE; ComfyUI's loader reports the details
    except (RuntimeError, KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
    model = vae.first_stage_model
    if model is None or kind_of(model) is not None:
        return None
    return f"The VAE in {os.path.basename(path)} ({name_of(model)}) is not one of {supported()}."


def _refused(names, folders, reason_of):
    found = {}
    for name in names:
        path = next(filter(None, (folder_paths.get_full_path(folder, name) for folder in folders)), None)
        reason = path and reason_of(path)
        if reason:
            found[name] = reason
    return found


def _are_settings(settings):
    kinds = {field.name: type(field.default) for field in dataclasses.fields(ParallelConfig)}
    return isinstance(settings, dict) and all(
        name in kinds and (type(value) is kinds[name] or (kinds[name] is float and type(value) is int))
        and (abs(value) < 2 ** 63 if type(value) is int else len(str(value)) <= MAX_SETTING)
        for name, value in settings.items())


async def _body(request):
    """Return the JSON of a request, or None if it is invalid or larger than what the page sends."""
    raw = bytearray()
    async for part in request.content.iter_chunked(2 ** 16):
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            return None
    try:
        return parse_json(bytes(raw), MAX_BODY_BYTES, MAX_BODY_VALUES)
    except ValueError:
        return None


def _refuse(text, status=400):
    return web.json_response({"error": text}, status=status)


def _names_files(body):
    return isinstance(body, dict) and body.keys() == {"models", "vaes"} and all(
        isinstance(names, list) and len(names) <= MAX_FILES and all(isinstance(name, str) for name in names)
        for names in body.values())
