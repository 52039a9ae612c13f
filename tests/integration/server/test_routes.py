"""Routes of the page: the check of files before a conversion, requests of other sites, and hostile requests."""

import asyncio
import importlib
import json
import re
import struct
import time
from types import SimpleNamespace

import pytest
import torch
from aiohttp import test_utils, web
from aiohttp.test_utils import TestClient, TestServer
from safetensors.torch import load_file, save_file

from tests.support.comfyui_server import ROOT
from tests.support.model_zoo import lacks_module
from tests.unit.checkpoints.published_sound import MINIMAX_MUSIC3
from xdit_backend.models import FAMILIES


def write_header(path, shapes):
    """A safetensors file whose tensors are a hole in the file."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        num_bytes = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    raw = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + offset)


def loads(models=(), vaes=()):
    """A prompt with a loader for each file, each in use."""
    prompt = {f"model {name}": {"class_type": "UNETLoader", "inputs": {"unet_name": name, "weight_dtype": "default"}}
              for name in models} | {f"vae {name}": {"class_type": "VAELoader", "inputs": {"vae_name": name}}
                                     for name in vaes}
    users = {f"user of {loader}": {"class_type": "VAEDecode" if "vae" in loader else "KSampler",
                                   "inputs": {loader.split()[0]: [loader, 0]}} for loader in prompt}
    return prompt | users


def check(comfyui, *files):
    module = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.server.graph_check")
    return module.check_graph(loads(*files), comfyui.nodes.NODE_CLASS_MAPPINGS)


def test_files_that_the_workers_cannot_have_are_named_with_the_reason(comfyui):
    from comfy.ldm.cascade.stage_a import StageA
    shapes = {name: tuple(tensor.shape) for name, tensor in StageA().state_dict().items()}
    write_header(comfyui.base / "vae" / "stage_a.safetensors", shapes)
    names = [comfyui.file(kind, folder="vae") for kind in ("vae-sd", "vae-wan", "vae-ltx", "vae-taesd")]
    (comfyui.base / "diffusion_models" / "text.safetensors").write_bytes(b"no model")

    found = check(comfyui, ["text.safetensors", comfyui.file("sd3"), "absent.safetensors"],
                  ["stage_a.safetensors", *names, "absent_vae.safetensors", "pixel_space"])

    assert (set(found["models"]) == {"text.safetensors"}
            and "not a safetensors file" in found["models"]["text.safetensors"])
    assert set(found["vaes"]) == {"stage_a.safetensors", "pixel_space"}
    assert "StageA" in found["vaes"]["stage_a.safetensors"]
    assert "no layers to run" in found["vaes"]["pixel_space"]
    assert found["absent"] == ["absent.safetensors", "absent_vae.safetensors"]


def test_models_of_newer_comfyuis_are_named_before_a_conversion(comfyui):
    """MiniMax Music 3 and Wan Animate 2 need the ComfyUI that has their class, which of Wan Animate 2 only the
    metadata says; and a quantised format is named in a layer's metadata."""
    folder, said = comfyui.base / "diffusion_models", {"transformer": {"model_type": "animate2"}}
    write_header(folder / "music.safetensors", MINIMAX_MUSIC3)
    wan = load_file(folder / comfyui.file("wan-i2v"))
    save_file(wan, folder / "animate2.safetensors", metadata={"config": json.dumps(said)})
    layer = "blocks.0.ffn.0"
    save_file(wan | {f"{layer}.comfy_quant": torch.tensor(list(b'{"format": "int3_of_2027"}'), dtype=torch.uint8)},
              folder / "int3.safetensors")

    found = check(comfyui, [*(f"{name}.safetensors" for name in ("music", "animate2", "int3")),
                            comfyui.file("wan-i2v")])["models"]

    lacking = {file for file, name in (("music", "MiniMax Music 3"), ("animate2", "Wan Animate 2"))
               if lacks_module(FAMILIES[name])}
    assert set(found) == {"int3.safetensors", *(f"{file}.safetensors" for file in lacking)}
    assert all(f"ComfyUI does not recognise {file}" in found[f"{file}.safetensors"] for file in lacking)
    assert f"in the format int3_of_2027 ({layer}), which xDiT does not read" in found["int3.safetensors"]


def test_types_that_the_page_takes_over_are_known_to_both_loaders(comfyui):
    """web/packs.js: all types of Load Diffusion Model that Load xDiT Model knows too, and no other."""
    script = (ROOT / "web" / "packs.js").read_text(encoding="utf-8")
    taken = json.loads(re.search(r"DTYPES = (\[.*?\]);", script)[1])

    native, = comfyui.nodes.UNETLoader.INPUT_TYPES()["required"]["weight_dtype"][:1]
    assert taken == [one for one in native if one in comfyui.detection.WEIGHT_DTYPES]


def test_a_file_is_opened_once_by_the_page_and_the_loader_until_it_changes(comfyui, monkeypatch):
    checkpoints = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.model.checkpoint_cache")
    path, opened = comfyui.base / "diffusion_models" / "opened.safetensors", []
    path.write_bytes((comfyui.base / "diffusion_models" / comfyui.file("sd3")).read_bytes())
    monkeypatch.setattr(checkpoints, "open_checkpoint", lambda path, open=checkpoints.open_checkpoint: (
        opened.append(path), open(path))[1])

    for _ in range(2):
        assert check(comfyui, [path.name])["models"] == {}
        comfyui.load_model.execute(path.name, "fp32", comfyui.config("cpu"))
    assert opened == [str(path)]

    path.write_bytes(b"no model")
    assert "not a safetensors file" in check(comfyui, [path.name])["models"][path.name]
    assert opened == [str(path)] * 2


def test_few_checkpoints_stay_open(comfyui, tmp_path):
    checkpoints = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.model.checkpoint_cache")
    cached, first = checkpoints.Checkpoints(), tmp_path / "0.safetensors"
    for number in range(checkpoints.MAX_OPEN + 1):
        write_header(tmp_path / f"{number}.safetensors", {"weight": (2, 2)})
    opened = cached.open(first)

    assert cached.open(first) is opened
    for number in range(1, checkpoints.MAX_OPEN + 1):
        cached.open(tmp_path / f"{number}.safetensors")
    assert cached.open(first) is not opened


# --- where requests come from ---

FILE = "xdit-report-a-2026-11-29.json"
HOST = "10.0.0.5:8188"                     # of a LAN, where ComfyUI itself does not compare it with the origin
JSON = {"Host": HOST, "Content-Type": "application/json"}
OWN = [{}, {"Origin": f"http://{HOST}"}, {"Origin": f"https://{HOST.upper()}"}, {"Sec-Fetch-Site": "none"},
       {"Sec-Fetch-Site": "same-origin"}, {"Origin": "https://proxy.example", "Sec-Fetch-Site": "same-origin"}]
FOREIGN = [{"Origin": "http://elsewhere.example"}, {"Origin": "null"}, {"Origin": "http://10.0.0.5:9000"},
           {"Origin": "http://10.0.0.5"}, {"Origin": ""}, {"Sec-Fetch-Site": "cross-site"},
           {"Sec-Fetch-Site": "same-site"}, {"Origin": f"http://{HOST}", "Sec-Fetch-Site": "cross-site"}]


@pytest.fixture
def statuses(comfyui):
    """(headers of a request) -> {(method, path): status} of every route of the pack, without ComfyUI's own checks."""
    page = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.server.routes")
    server = SimpleNamespace(routes=web.RouteTableDef(), sockets={}, send_json=None,
                             prompt_queue=SimpleNamespace(currently_running=True))
    page.add_routes(server, comfyui.nodes.NODE_CLASS_MAPPINGS)

    async def ask(headers, body):
        app = web.Application()
        app.add_routes(server.routes)
        found = {}
        async with test_utils.TestClient(test_utils.TestServer(app)) as client:
            for route in server.routes:
                data = body if route.method == "POST" else None
                path = route.path.replace("{name}", FILE)
                async with client.request(route.method, path, data=data, headers=headers) as answer:
                    found[route.method, route.path] = answer.status
        return found
    return lambda headers, body=b"{}": asyncio.run(ask(headers, body))


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_the_own_page_and_programs_are_answered(statuses, headers):
    found = statuses(JSON | headers)

    assert {path: status for (method, path), status in found.items() if method == "GET" and status != 200} == {
        "/xdit/report/{name}": 404}                            # no report has been made
    assert {status for (method, _), status in found.items() if method == "POST"} == {400}  # "{}" asks for nothing
    assert len(found) == 9


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_other_sites_are_rejected_by_every_route(statuses, headers):
    assert set(statuses(JSON | headers).values()) == {403}


@pytest.mark.parametrize("content_type", ["text/plain", "text/plain; a=application/json", "multipart/form-data",
                                          "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_a_body_that_any_page_could_send_is_rejected_by_every_route(statuses, content_type):
    found = statuses({"Host": HOST, "Content-Type": content_type})

    assert {status for (method, _), status in found.items() if method == "POST"} == {415}


def test_json_with_a_charset_is_json(statuses):
    found = statuses({"Host": HOST, "Content-Type": "application/json; charset=utf-8"})

    assert {status for (method, _), status in found.items() if method == "POST"} == {400}


# bodies that hold the event loop for seconds, or raise in it, where their size and form are not checked
HOSTILE = [b"[" * 100_000, b'{"settings": {"num_patches": ' + b"9" * 4000 + b"}}", b"\xff",
           b'"\\ud800"', b" " * 2 ** 20,
           b'{"settings": {"num_patches": 1, "num_patches": 2}}', b'{"settings": {"num_patches": ' + b"9" * 30 + b"}}",
           json.dumps({"settings": {"devices": "cpu," * 200_000}}).encode(),
           json.dumps({"settings": {"devices": "cpu," * 2000}}).encode(),
           json.dumps({"settings": {f"name{number}": 1 for number in range(200_000)}}).encode(),
           json.dumps({"prompt": {f"{number}": {} for number in range(200_000)}}).encode(),
           json.dumps({"prompt": {f"{number}": {"class_type": "a", "inputs": {}} for number in range(5000)}}).encode(),
           json.dumps({"prompt": {"1": {"class_type": ["a"], "inputs": {}}}}).encode()]


@pytest.mark.parametrize("path", ["/xdit/fit", "/xdit/check", "/xdit/watch", "/xdit/do", "/xdit/report"])
def test_a_hostile_request_is_refused_at_once(comfyui, path):
    async def ask():
        async with TestClient(TestServer(_app(comfyui))) as client:
            for body in HOSTILE:
                started_s = time.process_time()
                answer = await client.post(path, data=body, headers={"Content-Type": "application/json"})
                took_s = time.process_time() - started_s
                assert answer.status == 400 and (await answer.json())["error"], body[:60]
                assert took_s < 0.5, f"{body[:60]} took {took_s:.1f} s"
    asyncio.run(ask())


STAGES = {"mode": "manual", "devices": "cpu,cpu", "pipefusion_degree": 2}


@pytest.mark.parametrize("settings", [STAGES | {"stage_blocks": "²"}, STAGES | {"stage_blocks": "9" * 4000},
                                      {"weights_memory": "1e999"},
                                      {"weights_memory": "nan"}, {"forecast_keys_values": 10 ** 18},
                                      {"cfg_degree": 2 ** 62}, {"devices": "cuda:" + "9" * 4000}], ids=str)
def test_settings_of_any_value_fit_or_are_refused_in_words(comfyui, settings):
    async def ask():
        async with TestClient(TestServer(_app(comfyui))) as client:
            answer = await client.post("/xdit/fit", json={"settings": settings})
            assert answer.status == 200 and set((await answer.json())["settings"]) <= set(settings) or (
                answer.status == 409 and (await answer.json())["error"])
    asyncio.run(ask())


def test_a_vae_of_shapes_that_none_has_is_left_to_comfyui(comfyui):
    """Whose classes raise of any kind there."""
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(
        comfyui.base / "vae" / comfyui.file("vae-sd", folder="vae")).items()}
    for number, name in enumerate(list(shapes)[::7]):
        write_header(comfyui.base / "vae" / "odd.safetensors",
                     {**shapes, name: [(), (0,), (1,) * 5, (2 ** 20, 1)][number % 4]})
        found = check(comfyui, [], ["odd.safetensors"])["vaes"]
        assert found == {} or "odd.safetensors" in found["odd.safetensors"]


def _app(comfyui):
    """ComfyUI's web application with nothing but the pack's routes."""
    page = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.server.routes")
    routes = web.RouteTableDef()
    page.add_routes(SimpleNamespace(routes=routes, sockets={}, prompt_queue=SimpleNamespace(currently_running={})),
                    comfyui.nodes.NODE_CLASS_MAPPINGS)
    app = web.Application(client_max_size=2 ** 26)
    app.add_routes(routes)
    return app
