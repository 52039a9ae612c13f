"""What a person sees while it runs, and what becomes of the workers when something ends: through ComfyUI's server."""

import io
import json
import time
import urllib.error
import urllib.request
import uuid

import aiohttp
import psutil
import pytest
from PIL import Image, ImageChops
from safetensors.torch import save_file

from tests.conftest import left_behind, still_there
from tests.support.comfyui_server import ROOT, Host, HostError, comfyui_folder, make_base, run_async
from tests.support.lora_zoo import adapters
from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import import_comfyui, save
from tests.support.worker_processes import workers_below


class HostGoneError(Exception):
    """ComfyUI has ended while its page listened."""


PREVIEW_IMAGE, TEXT = 1, 3                 # types of ComfyUI's binary messages


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = comfyui_folder()
    if folder is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`, or name one in XDIT_COMFYUI")
    base = tmp_path_factory.mktemp("ComfyUI Jürgen 图片")
    make_base(base, extra_packs=[ROOT / "tests" / "support" / "host_nodes"])
    import_comfyui(folder)
    save("sd3", base / "models" / "diffusion_models" / "sd3.safetensors")
    save("vae-sd3", base / "models" / "vae" / "vae.safetensors")
    (base / "models" / "loras").mkdir()
    layers = [f"transformer.transformer_blocks.{block}.attn.to_{part}" for block in range(4) for part in "qkv"]
    save_file(adapters("lora", dict.fromkeys(layers, (256, 256))),
              base / "models" / "loras" / "tiny.safetensors")
    return base


@pytest.fixture(scope="module")
def server(base):
    with Host(comfyui_folder(), base) as host:
        yield host


def workflow(parallel=True, devices="cpu,cpu", steps=3, seed=1, size=256, lora=False, **degrees):
    conditioning = {"class_type": "XDiTTestConditioning"}
    graph = {
        "positive": {**conditioning, "inputs": {"seed": 1, "tokens": 20, "family": "sd3"}},
        "negative": {**conditioning, "inputs": {"seed": 2, "tokens": 20, "family": "sd3"}},
        "latent": {"class_type": "EmptySD3LatentImage", "inputs": {"width": size, "height": size, "batch_size": 1}},
        "vae": {"class_type": "VAELoader", "inputs": {"vae_name": "vae.safetensors"}},
        "model": {"class_type": "UNETLoader", "inputs": {"unet_name": "sd3.safetensors", "weight_dtype": "default"}},
        "sampler": {"class_type": "KSampler", "inputs": {
            "model": ["model", 0], "seed": seed, "steps": steps, "cfg": 4.0, "sampler_name": "euler",
            "scheduler": "simple",
            "positive": ["positive", 0], "negative": ["negative", 0], "latent_image": ["latent", 0], "denoise": 1.0}},
        "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sampler", 0], "vae": ["vae", 0]}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "test"}},
    }
    if lora:
        graph["lora"] = {"class_type": "LoraLoaderModelOnly", "inputs": {
            "model": ["model", 0], "lora_name": "tiny.safetensors", "strength_model": 0.8}}
        graph["sampler"]["inputs"]["model"] = ["lora", 0]
    if parallel:
        graph["config"] = {"class_type": "XDiTParallelConfig", "inputs": {
            "devices": devices, "mode": "manual" if degrees else "auto", "num_patches": 0, "warmup_steps": 1,
            **{f"{name}_degree": degrees.get(name, 1)
               for name in ("cfg", "data", "pipefusion", "displaced", "ring", "ulysses", "tensor")}}}
        graph["model"] = {"class_type": "XDiTLoadModel", "inputs": {
            "model_name": "sd3.safetensors", "weight_dtype": "default", "parallel": ["config", 0]}}
        graph["sampler"]["class_type"], graph["decode"]["class_type"] = "XDiTParallelSampler", "XDiTVAEDecode"
    return graph


def image(base, outputs):
    entry = outputs["save"]["images"][0]
    return Image.open(base / "output" / entry["subfolder"] / entry["filename"]).convert("RGB")


def watch(host, prompt, on_message, preview_method="latent2rgb", timeout_s=1200):
    """Queue a prompt, call on_message(type, content) for what ComfyUI tells its page, until the prompt is over."""
    async def run():
        client = uuid.uuid4().hex
        async with aiohttp.ClientSession() as session, session.ws_connect(
            f"{host.url}/ws?clientId={client}", max_msg_size=0) as page:
            # A page says so when it can show the newer kinds of messages.
            await page.send_str(json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": False}}))
            await session.post(f"{host.url}/prompt", json={"prompt": prompt, "client_id": client,
                                                           "extra_data": {"preview_method": preview_method}})
            deadline_s = time.monotonic() + timeout_s
            while time.monotonic() < deadline_s:
                message = await page.receive(timeout=timeout_s)
                if message.type == aiohttp.WSMsgType.BINARY:
                    on_message(int.from_bytes(message.data[:4], "big"), message.data[4:])
                elif message.type == aiohttp.WSMsgType.TEXT:
                    event = json.loads(message.data)
                    on_message(event["type"], event["data"])
                    if event["type"] in ("execution_success", "execution_error", "execution_interrupted"):
                        return event["type"], event["data"]
                else:
                    raise HostGoneError
        raise TimeoutError
    return run_async(run())


def workers(host):
    """Pids of the host's workers."""
    return sorted(process.pid for process in workers_below(host.process.pid))


@pytest.mark.parametrize("lora", by_default([True], [True, False]), ids=["LoRA", "plain"])
def test_image_equals_the_native_nodes(server, base, lora):
    native, _ = server.run(workflow(parallel=False, lora=lora))
    ours, _ = server.run(workflow(lora=lora))

    difference = ImageChops.difference(image(base, native), image(base, ours))
    assert max(high for _, high in difference.getextrema()) <= 1
    assert image(base, ours).size == (256, 256)
    assert min(high - low for low, high in image(base, ours).getextrema()) > 50        # not a flat picture


@pytest.mark.slow
def test_progress_previews_and_phases_reach_the_page(server):
    server.run(workflow(seed=2))
    for pid in workers(server):                                # a new group, to see its phases
        psutil.Process(pid).kill()
    steps, previews, phases = [], [], []

    def on_message(kind, content):
        if kind == "progress" and content["node"] == "sampler":
            steps.append(content["value"])
        elif kind == PREVIEW_IMAGE:
            previews.append(content)
        elif kind == TEXT:
            phases.append(content[4 + int.from_bytes(content[:4], "big"):].decode())

    with pytest.raises(HostError, match="died"):               # the run that finds the workers gone says so
        server.run(workflow(seed=3))
    outcome, _ = watch(server, workflow(seed=4, steps=4, cfg=2), on_message)

    assert outcome == "execution_success"
    assert steps == [1, 2, 3, 4]
    assert len(previews) >= 3
    assert any(text.startswith("starting workers") for text in phases)
    assert any(text.startswith("loading weights") for text in phases)
    assert "running on cpu, cpu: CFG 2" in phases


@pytest.mark.slow
@pytest.mark.parametrize("method, text", [("pipefusion", "PipeFusion 2, 4 patches"), ("displaced", "DistriFusion 2")])
def test_stale_methods_tell_and_show_each_step_once(server, base, method, text):
    """Of PipeFusion, progress and previews are put together from the patches, in order."""
    server.run(workflow(seed=2, **{method: 2}))
    steps, previews, phases = [], [], []

    def on_message(kind, content):
        if kind == "progress" and content["node"] == "sampler":
            steps.append(content["value"])
        elif kind == PREVIEW_IMAGE:
            previews.append(Image.open(io.BytesIO(content[content.find(b"\xff\xd8"):])).size)
        elif kind == TEXT:
            phases.append(content[4 + int.from_bytes(content[:4], "big"):].decode())

    outcome, _ = watch(server, workflow(seed=3, steps=6, **{method: 2}), on_message)

    assert outcome == "execution_success"
    assert steps == sorted(steps) and set(range(1, 7)) <= set(steps)
    assert len(set(previews)) == 1 and previews[0][0] == previews[0][1]
    assert f"running on cpu, cpu: {text}" in phases


@pytest.mark.parametrize("degrees", by_default([{"pipefusion": 2}], [{}, {"pipefusion": 2}, {"displaced": 2}]), ids=str)
def test_cancel_ends_within_a_step_and_leaves_the_group_ready(server, degrees):
    server.run(workflow(seed=5, **degrees))
    before, steps = workers(server), []

    def on_message(kind, content):
        if kind == "progress":
            steps.append(content["value"])
            if steps[-1] == 2:
                server._request("/interrupt", {})

    outcome, _ = watch(server, workflow(seed=6, steps=500, size=512, **degrees), on_message)
    server.run(workflow(seed=7, **degrees))

    assert outcome == "execution_interrupted"
    assert steps[-1] < 50                                      # the server hears of it some steps later
    assert workers(server) == before


def test_killed_worker_fails_the_prompt_by_name_and_the_next_one_runs(server):
    server.run(workflow(seed=8))
    victim = workers(server)[1]

    def on_message(kind, content):
        if kind == "progress" and content["value"] == 2 and psutil.pid_exists(victim):
            psutil.Process(victim).kill()

    outcome, content = watch(server, workflow(seed=9, steps=500, size=512), on_message)

    assert outcome == "execution_error"
    assert "died" in content["exception_message"] and "Worker rank" in content["exception_message"]
    assert content["node_id"] == "sampler"
    server.run(workflow(seed=10))
    assert len(workers(server)) == 2


def test_unload_models_parks_the_weights_and_free_memory_drops_what_workers_hold(server, base):
    """ComfyUI's two buttons. Its queue misses one that comes while it does what another asked for,
    so they are pressed again."""
    def pressed(wanted, **button):
        deadline_s = time.monotonic() + 120
        while not wanted(group := server.get("/xdit/state")["groups"][0]) and time.monotonic() < deadline_s:
            server._request("/free", button)
            time.sleep(0.5)
        return group
    before, _ = server.run(workflow(seed=20))
    pids = workers(server)
    first = server.get("/xdit/state")["groups"][0]
    assert first["models"] and not any(map(sum, (model["parked"] for model in first["models"]))) and first["vaes"]

    unloaded = pressed(lambda group: all(model["parked"] == model["weights"] for model in group["models"])
                       and not group["vaes"], unload_models=True)
    assert (unloaded["models"] and all(model["parked"] == model["weights"] for model in unloaded["models"])
            and not unloaded["vaes"])
    assert not pressed(lambda group: not group["models"], unload_models=True, free_memory=True)["models"]

    after, _ = server.run(workflow(seed=20))
    assert image(base, before).tobytes() == image(base, after).tobytes() and workers(server) == pids


def test_impossible_degrees_are_refused_once_when_queued(server):
    """ComfyUI's answer to the page: one error, on the node that has the mistake, though two nodes read it."""
    graph = workflow(ring=3)
    graph["decode"]["inputs"]["parallel"] = ["config", 0]
    request = urllib.request.Request(f"{server.url}/prompt", json.dumps({"prompt": graph}).encode())

    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(request)

    assert answer.value.code == 400
    reports = json.loads(answer.value.read())["node_errors"]
    errors = [(node, error["details"]) for node, report in reports.items() for error in report["errors"]]
    assert [node for node, _ in errors] == ["config"]
    assert errors[0][1].endswith(": the degrees (ring_degree=3) multiply to 3, and there are 2 devices.")


def test_everything_listens_on_loopback_only(server):
    server.run(workflow(seed=11))
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]

    listening = {connection.laddr.ip for process in processes for connection in process.net_connections("inet")
                 if connection.status == psutil.CONN_LISTEN}

    assert len(processes) >= 4
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize("path, body",
                         [("/xdit/state", None), ("/xdit/trace", None), ("/xdit/do", b'{"action": "stop"}'),
                          ("/xdit/fit", b'{"settings": {}}'), ("/xdit/check", b'{"prompt": {}}')])
@pytest.mark.parametrize("headers", [{"Origin": "http://elsewhere.example"}, {"Sec-Fetch-Site": "cross-site"}], ids=str)
def test_another_site_s_page_is_refused(server, path, body, headers):
    """By ComfyUI's own check, under which our routes stand."""
    json_body = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(server.url + path, body, json_body)).close()
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(urllib.request.Request(server.url + path, body, json_body | headers))
    answer.value.close()
    assert answer.value.code == 403


@pytest.mark.slow
def test_workers_end_with_a_host_that_is_killed_as_it_samples(base):
    before = set(left_behind())
    with Host(comfyui_folder(), base) as host:
        host.run(workflow(seed=12))
        assert set(left_behind()) > before
        sampled = []

        def on_message(kind, content):
            if kind == "progress" and content["value"] >= 2 and not sampled:
                sampled.append(content["value"])
                host.process.kill()
        with pytest.raises(HostGoneError):
            watch(host, workflow(seed=13, steps=500), on_message)

        host.process.wait()
        assert sampled and not still_there(before)


@pytest.mark.slow
def test_workers_end_with_a_host_that_ends(base):
    before = set(left_behind())
    with Host(comfyui_folder(), base) as host:
        host.run(workflow(seed=14))

    assert not still_there(before)
