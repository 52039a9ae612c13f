"""HTTP routes of the page: the check of a graph before it is converted, and the panel's state and actions.

Each route accepts requests of ComfyUI's own page only (same_origin.py), in addition to ComfyUI's own checks.
"""

import asyncio
import dataclasses
import logging

from aiohttp import web

from ....xdit_backend.config import ParallelConfig
from ....xdit_backend.protocol.bounded_json import parse_json
from ....xdit_backend.protocol.errors import XDiTError
from ..workers.worker_groups import GROUPS, fitting_here
from . import panel
from .graph_check import check_graph
from .same_origin import add_checked

log = logging.getLogger(__name__)

MAX_NAME = 100
MAX_BODY_BYTES, MAX_BODY_VALUES = 2 ** 18, 2 ** 12
MAX_NODES, MAX_PROMPT_BYTES, MAX_PROMPT_VALUES = 4096, 2 ** 22, 2 ** 17
MAX_SETTING = 4096                         # characters of a setting: device names of a hundred machines
PROMPT_RUNS = "Cancel the running prompt, or wait until it has finished."
CONTENT_TYPES = {".json": "application/json", ".md": "text/plain; charset=utf-8", ".png": "image/png"}
PROMPTS_S = 0.25                           # interval of looks for a prompt that begins during a report
WATCHED_S = 1.0                            # interval of updates to an open panel


def add_routes(server, classes):
    """Add this pack's routes. classes: ComfyUI's NODE_CLASS_MAPPINGS. An invalid body is answered with status 400.

    POST /xdit/check {"prompt": a graph in ComfyUI's API format, "models": [further files], optional} -> result of
    graph_check.check_graph. GET /xdit/state,
    /xdit/timeline, /xdit/trace -> results of panel.py's functions of these names. POST /xdit/watch {"client": its id
    of ComfyUI's socket, "open": bool}: while open, changes of the state are sent to that socket as "xdit.state". POST
    /xdit/fit {"settings": {field of ParallelConfig: value}} -> {"settings": those that differ in the closest config
    that can run here}. POST /xdit/do {"action": one of panel.ACTIONS} -> {}; status 409 while a prompt runs, or if the
    action fails. POST /xdit/report {"action": "start" or "cancel"} -> {}; status 409 while a prompt runs. A prompt that
    begins ends the report. GET /xdit/report/NAME -> a file of the last report.
    """
    own = web.RouteTableDef()
    _add_questions(own, classes)
    _add_panel(own, server)
    _add_report(own, server)
    add_checked(server.routes, own)


def _add_questions(routes, classes):
    """Add the routes for the check of a graph and for settings that can run here."""
    @routes.post("/xdit/check")
    async def answer_check(request):
        body = await _body(request, MAX_PROMPT_BYTES, MAX_PROMPT_VALUES)
        if not _is_prompt(body):
            return _refuse(f'Send {{"prompt": a graph in ComfyUI\'s API format, "models": [names of further files]}}, '
                           f'of at most {MAX_NODES} nodes and files.')
        return web.json_response(await asyncio.to_thread(check_graph, body["prompt"], classes,
                                                           body.get("models", ())))

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
            return _refuse(PROMPT_RUNS, 409)
        try:
            await asyncio.to_thread(panel.ACTIONS[body["action"]])
        except XDiTError as error:
            return _refuse(str(error), 409)
        return web.json_response({})


def _add_report(routes, server):
    """Add the routes that start and cancel a report of the devices and return its files."""
    tasks = set()                          # asyncio itself has only weak references

    @routes.post("/xdit/report")
    async def answer_report(request):
        body = await _body(request)
        if not isinstance(body, dict) or body.keys() != {"action"} or body["action"] not in ("start", "cancel"):
            return _refuse('Send {"action": "start" or "cancel"}.')
        if body["action"] == "cancel":
            GROUPS.report.cancel()
            return web.json_response({})
        if server.prompt_queue.currently_running:
            return _refuse(PROMPT_RUNS, 409)
        try:
            await asyncio.to_thread(panel.start_report)
        except (XDiTError, OSError) as error:
            return _refuse(str(error), 409)
        server.prompt_queue.set_flag("unload_models", True)    # ComfyUI's own models leave the devices' memory too
        server.prompt_queue.set_flag("free_memory", True)
        tasks.add(watching := asyncio.create_task(_end_for_prompts(server.prompt_queue)))
        watching.add_done_callback(tasks.discard)
        return web.json_response({})

    @routes.get("/xdit/report/{name}")
    async def answer_file(request):
        path = GROUPS.report.path_of(request.match_info["name"])
        if path is None or not path.is_file():
            return _refuse("The last report has no file of this name.", 404)
        return web.FileResponse(path, headers={"Content-Type": CONTENT_TYPES[path.suffix],
                                               "X-Content-Type-Options": "nosniff"})


async def _end_for_prompts(prompt_queue):
    """End the report as soon as any prompt begins, which needs the devices."""
    while GROUPS.report.is_running:
        if prompt_queue.currently_running:
            GROUPS.report.cancel("prompt")
        await asyncio.sleep(PROMPTS_S)


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


def _are_settings(settings):
    kinds = {field.name: type(field.default) for field in dataclasses.fields(ParallelConfig)}
    return isinstance(settings, dict) and all(
        name in kinds and (type(value) is kinds[name] or (kinds[name] is float and type(value) is int))
        and (abs(value) < 2 ** 63 if type(value) is int else len(str(value)) <= MAX_SETTING)
        for name, value in settings.items())


async def _body(request, max_bytes=MAX_BODY_BYTES, max_values=MAX_BODY_VALUES):
    """Return the JSON of a request, or None if it is invalid or larger than what the page sends."""
    raw = bytearray()
    async for part in request.content.iter_chunked(2 ** 16):
        raw += part
        if len(raw) > max_bytes:
            return None
    try:
        return parse_json(bytes(raw), max_bytes, max_values)
    except ValueError:
        return None


def _refuse(text, status=400):
    return web.json_response({"error": text}, status=status)


def _is_prompt(body):
    if not isinstance(body, dict) or "prompt" not in body or body.keys() - {"prompt", "models"}:
        return False
    prompt, models = body["prompt"], body.get("models", [])
    if not isinstance(models, list) or len(models) > MAX_NODES or not all(isinstance(name, str) for name in models):
        return False
    return isinstance(prompt, dict) and len(prompt) <= MAX_NODES and all(
        isinstance(node, dict) and isinstance(node.get("class_type"), str) and isinstance(node.get("inputs"), dict)
        for node in prompt.values())
