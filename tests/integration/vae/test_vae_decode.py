"""Distributed VAE Decode equals VAE Decode, for every VAE it takes; others are refused by name."""

import gc
import importlib
import re
import time
import weakref

import pytest
import torch

from tests.support.tiers import by_default
from tests.support.tiny_checkpoints import fill
from tests.support.tolerances import close

CHANNELS = {"vae-sd": 4, "vae-flux2": 128, "vae-wan22": 48, "vae-ltx": 128, "vae-ltx095": 128,
            "vae-hunyuanimage": 64, "vae-hunyuan15": 32, "vae-ltx2": 128, "vae-mochi": 12, "vae-minimax": 24,
            "vae-svd": 4}


def latents(kind, *shape):
    return torch.randn(shape[0], CHANNELS.get(kind, 16), *shape[1:], generator=torch.Generator().manual_seed(1))


IMAGES = [(1, 16, 16), (2, 13, 21), (1, 2, 5)]
VIDEOS = [(1, 1, 6, 5), (2, 3, 5, 7), (1, 2, 1, 3)]
# its reflection needs two rows; the last is split by frames
LTX = [(1, 1, 4, 3), (1, 3, 3, 5), (1, 2, 2, 2), (1, 6, 2, 3)]
CASES = [(kind, shape) for kinds, shapes in (
    (("vae-sd", "vae-sd3"), IMAGES), (("vae-flux2",), [(2, 7, 6)]), (("vae-hunyuanimage",), [(2, 3, 5)]),
    (("vae-taesd",), [(2, 13, 21)]), (("vae-wan", "vae-wan22"), VIDEOS),
    # of 0.9.5, ComfyUI decodes no batches
    (("vae-ltx", "vae-ltx095"), LTX), (("vae-ltx",), [(2, 2, 3, 3)]), (("vae-ltx2",), [(1, 3, 3, 5)]),
    (("vae-hunyuan",), [(1, 1, 6, 5), (2, 3, 5, 7), (1, 5, 1, 3)]), (("vae-hunyuan15",), [(1, 3, 2, 3), (2, 1, 3, 2)]),
    (("vae-mochi",), [(1, 3, 2, 3), (2, 1, 3, 1)]), (("vae-cogvideox",), [(1, 1, 4, 5), (2, 3, 5, 3), (1, 4, 1, 3)]),
    (("vae-svd",), [(3, 5, 4), (1, 3, 2)]), (("vae-cosmos",), [(1, 1, 4, 5), (2, 3, 3, 1), (1, 18, 1, 2)]))
    for kind in kinds for shape in shapes]
# Three shapes of the VAEs that most people have; of the others' two, of which now one, now another is left out.
CASES = [case for number, case in enumerate(CASES)
         if case[0] in ("vae-sd", "vae-wan", "vae-ltx") or number % 3 or sum(case[0] == kind for kind, _ in CASES) < 3]


@pytest.mark.parametrize("kind, shape, devices", [
    *((*case, "cpu,cpu") for case in CASES), *(pytest.param(*case, "cpu,cpu,cpu", marks=pytest.mark.slow) for case in (
        ("vae-sd", (1, 2, 5)), ("vae-wan", (2, 3, 5, 7)), ("vae-ltx", (1, 6, 2, 3))))], ids=str)
def test_images_equal_native_vae_decode(comfyui, vae_of, kind, devices, shape):
    samples, vae = {"samples": latents(kind, *shape)}, vae_of(kind)
    with torch.inference_mode():
        torch.manual_seed(3)                                   # of the noise that LTX's decoder takes off
        want = comfyui.nodes.VAEDecode().decode(vae, samples)[0]
        torch.manual_seed(3)
        image = comfyui.vae_decode.execute(samples, vae, comfyui.config(devices)).args[0]

    assert image.shape == want.shape and image.dtype == want.dtype
    close(image, want, 2e-5)
    assert want.std() > 0.01


def test_noise_that_a_decoder_takes_off_is_drawn_in_the_type_that_comfyui_draws_it_in(comfyui):
    """Another type has other random numbers."""
    import comfy.sd
    import comfy.utils
    file = comfyui.base / "vae" / comfyui.file("vae-ltx095", "vae")
    tensors, metadata = comfy.utils.load_torch_file(str(file), return_metadata=True)
    vae, samples = comfy.sd.VAE(sd=tensors, dtype=torch.float16,
                                metadata=metadata), {"samples": latents("vae-ltx095", 1, 1, 3, 3)}

    torch.manual_seed(3)
    image = comfyui.vae_decode.execute(samples, vae, comfyui.config("cpu,cpu")).args[0]

    torch.manual_seed(3)
    with torch.inference_mode():
        close(image, comfyui.nodes.VAEDecode().decode(vae, samples)[0], 5e-3)


def test_wans_upscaling_vae_equals_native_vae_decode(comfyui):
    """Its decoder gives four pixels of three channels in the place of each."""
    import comfy.ldm.wan.vae
    import comfy.sd
    model = comfy.ldm.wan.vae.WanVAE(dim=16, z_dim=16, temperal_downsample=[False, True, True], conv_out_channels=12)
    fill(model, torch.Generator().manual_seed(1))
    vae, samples = comfy.sd.VAE(sd=model.state_dict()), {"samples": latents("vae-wan", 1, 1, 5, 4)}

    image = comfyui.vae_decode.execute(samples, vae, comfyui.config("cpu,cpu")).args[0]

    assert image.shape == (1, 40, 32, 12)
    with torch.inference_mode():
        close(image, comfyui.nodes.VAEDecode().decode(vae, samples)[0], 2e-5)


@pytest.mark.parametrize("name, channels, shape", [
    ("taehv:TAEHV", 16, (1, 16, 3, 5, 4)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("taehv:TAEHV", 32, (1, 32, 2, 3, 4)), ("taehv:TAEHV", 48, (2, 48, 2, 3, 1)),
        ("taehv:TAEHV", 24, (1, 24, 12, 3, 2)), ("taehv:TAEHV", 24, (1, 24, 1, 2, 3)),
        ("taehv:TAEHV", 128, (1, 128, 2, 2, 3)), ("taesd:TAESD", 128, (2, 128, 5, 4))))], ids=str)
def test_tiny_vaes_of_comfyuis_own_class_equal_native_nodes(comfyui, name, channels, shape):
    """Pixels that are shown as they are, and those from -1 to 1; both ways."""
    import comfy.sd
    module, _, class_name = name.partition(":")
    model = getattr(importlib.import_module(f"comfy.taesd.{module}"), class_name)(latent_channels=channels)
    if channels == 24 and not hasattr(model, "is_h3"):
        pytest.skip("this ComfyUI has no TAEHV of MiniMax H3's latents")
    fill(model, torch.Generator().manual_seed(1))
    vae = comfy.sd.VAE(sd=model.state_dict(), metadata={"tae_latent_channels": channels})
    samples, config = {"samples": torch.randn(shape, generator=torch.Generator().manual_seed(2))}, comfyui.config(
        "cpu,cpu")

    with torch.inference_mode():
        want = comfyui.nodes.VAEDecode().decode(vae, samples)[0]
        latent = comfyui.nodes.VAEEncode().encode(vae, want.clamp(0, 1))[0]["samples"]
        image = comfyui.vae_decode.execute(samples, vae, config).args[0]
        encoded = comfyui.vae_encode.execute(want.clamp(0, 1), vae, config).args[0]["samples"]

    assert image.shape == want.shape and encoded.shape == latent.shape
    close(image, want, 2e-5)
    close(encoded, latent, 2e-5)
    assert want.std() > 0.01


def test_a_finished_decode_says_what_it_took(comfyui, vae_of, monkeypatch):
    """The last that the node says, after what the workers have told of their progress."""
    bridge, texts = f"{comfyui.pack.__name__}.nodes.bridge", []
    for module in ("vae.distributed_vae", "workers.worker_groups"):
        monkeypatch.setattr(importlib.import_module(f"{bridge}.{module}"), "show_text", texts.append)

    comfyui.vae_decode.execute({"samples": latents("vae-taesd", 1, 8, 8)}, vae_of("vae-taesd"),
                               comfyui.config("cpu,cpu"))

    assert any(text.startswith("decoding ") for text in texts)
    assert re.fullmatch(r"decoded in \d+\.\d s on 2 devices", texts[-1])


@pytest.mark.parametrize("hop, mode, first_slower, working", [
    (1.0, "auto", 1, [True, False]), (1.0, "auto", 3, [False, True]), (1e15, "auto", 1, [True, True]),
    (1.0, "manual", 1, [True, True])])
def test_auto_leaves_a_image_to_the_fastest_device_where_links_are_slow(
    comfyui, vae_of, monkeypatch, hop, mode, first_slower, working):
    """The picture is the same; bytes a second between devices are those of a probe,
    which no decode as short as this asks for."""
    bridge, choice, cost = (importlib.import_module(f"{comfyui.pack.__name__}.{name}") for name in (
        "nodes.bridge.vae.distributed_vae", "xdit_backend.planner.layout_search", "xdit_backend.planner.cost_model"))
    device = cost.Device(1e9, 1e9, 1e15, collective_launch_s=0.0)
    machine = choice.Machine((device.slower(first_slower), device), cost.Links({("hop", 2): hop}, 0.0))
    texts, samples, vae = [], {"samples": latents("vae-taesd", 2, 8, 9)}, vae_of("vae-taesd")
    monkeypatch.setattr(bridge, "show_text", texts.append)
    measured = []
    monkeypatch.setattr(comfyui.groups, "machine", lambda devices, dtype, may_measure: measured.append(may_measure)
                        or machine)
    config = comfyui.config("cpu,cpu") if mode == "auto" else comfyui.config("cpu,cpu", cfg=2)

    image = comfyui.vae_decode.execute(samples, vae, config).args[0]
    told = comfyui.groups.client(("cpu", "cpu")).autoencoders.last_numbers

    close(image, comfyui.nodes.VAEDecode().decode(vae, samples)[0], 2e-5)
    assert texts[-1].endswith(" s on 2 devices" if all(working) else
                              " s on 1 of 2 devices, estimated to be as fast as all")
    assert [told[rank]["busy_s"] > 0 for rank in (0, 1)] == working
    assert measured == ([False] if mode == "auto" else [])


def test_devices_are_measured_before_a_long_decode(comfyui, vae_of, monkeypatch):
    """Once; where nothing is known of them, all share the picture."""
    planner, measured = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.planner.planner"), []
    monkeypatch.setattr(comfyui.groups, "machine", lambda devices, dtype, may_measure: measured.append(may_measure))
    monkeypatch.setattr(planner, "LONG_S", 1e-6)

    comfyui.vae_decode.execute({"samples": latents("vae-taesd", 1, 8, 8)}, vae_of("vae-taesd"),
                               comfyui.config("cpu,cpu"))

    assert measured == [True]


def test_weights_are_sent_once(comfyui, vae_of):
    samples = {"samples": latents("vae-sd3", 1, 8, 8)}
    config = comfyui.config("cpu,cpu")
    comfyui.vae_decode.execute(samples, vae_of("vae-sd3"), config)
    store = comfyui.groups.client(("cpu", "cpu")).group.segments
    first = store._count

    comfyui.vae_decode.execute(samples, vae_of("vae-sd3"), config)

    assert store._count - first == 2                           # the latent and the picture
    assert store.names() == []


def test_the_group_that_samples_decodes_too(comfyui, vae_of):
    """Without xDiT Parallel Config the decode uses the group that runs."""
    model = comfyui.ours("sd3", comfyui.config("cpu,cpu"))
    latent = comfyui.sample(model, "sd3")
    client = comfyui.groups.client(("cpu", "cpu"))
    pids = {numbers["pid"] for numbers in client.report_memory().values()}

    image = comfyui.vae_decode.execute({"samples": latent}, vae_of("vae-sd3")).args[0]

    assert image.shape == (1, 128, 144, 3)
    assert comfyui.groups.client(("cpu", "cpu")) is client
    assert {numbers["pid"] for numbers in client.report_memory().values()} == pids


@pytest.mark.parametrize("name, arguments", [
    ("comfy.ldm.cascade.stage_a.StageA", {})])
def test_other_vaes_are_refused_by_name(comfyui, vae_of, name, arguments):
    import copy
    import importlib
    module, _, class_name = name.rpartition(".")
    vae = copy.copy(vae_of("vae-sd3"))
    vae.first_stage_model = getattr(importlib.import_module(module), class_name)(**arguments)

    with pytest.raises(comfyui.errors.UnsupportedError,
                       match=f"^Use VAE Decode for this VAE .{class_name}.*VAEs of SD, SDXL, SD3, Flux"):
        comfyui.vae_decode.execute({"samples": latents("vae-sd3", 1, 8, 8)}, vae, comfyui.config("cpu,cpu"))


def test_latent_of_another_model_is_refused(comfyui, vae_of):
    with pytest.raises(comfyui.errors.UnsupportedError,
                       match="has 4 channels and 4 dims, and this VAE decodes 16 channels and 4 dims"):
        comfyui.vae_decode.execute({"samples": latents("vae-sd", 1, 8, 8)}, vae_of("vae-sd3"),
                                   comfyui.config("cpu,cpu"))


@pytest.mark.parametrize("shape, message", [((1, 1, 4), "1 x 4"), ((2, 3, 1), "3 x 1")], ids=str)
def test_a_latent_that_reflection_cannot_pad_is_refused(comfyui, vae_of, shape, message):
    """ComfyUI's own node ends in an error of torch's."""
    samples = {"samples": latents("vae-ltx095", 1, *shape)}
    with torch.inference_mode(), pytest.raises(RuntimeError, match="[Pp]adding"):
        comfyui.nodes.VAEDecode().decode(vae_of("vae-ltx095"), samples)

    message = f"^Use an image of at least 64 x 64 pixels: .* has {message} rows and columns, and this VAE decodes 2"
    with pytest.raises(comfyui.errors.UnsupportedError, match=message):
        comfyui.vae_decode.execute(samples, vae_of("vae-ltx095"), comfyui.config("cpu,cpu"))


@pytest.mark.slow
def test_the_memory_manager_takes_the_weights_back_and_they_are_sent_again(comfyui, vae_of):
    samples = {"samples": latents("vae-sd3", 1, 8, 8)}
    config = comfyui.config("cpu,cpu")
    first = comfyui.vae_decode.execute(samples, vae_of("vae-sd3"), config).args[0].clone()
    client = comfyui.groups.client(("cpu", "cpu"))
    held = client.report_memory()[0]["weight_bytes"]

    comfyui.management.unload_all_models()
    freed = held - client.report_memory()[0]["weight_bytes"]
    again = comfyui.vae_decode.execute(samples, vae_of("vae-sd3"), config).args[0]

    assert freed >= sum(tensor.nbytes for name, tensor in vae_of("vae-sd3").first_stage_model.state_dict().items()
                        if name.startswith("decoder."))
    assert torch.equal(first, again)


@pytest.mark.parametrize("kind", by_default(["vae-wan"], ["vae-wan", "vae-sd", "vae-minimax", "vae-hunyuan15"]))
def test_weights_come_from_host_memory_as_long_as_they_leave_too_little_room(comfyui, vae_of, kind, said, monkeypatch):
    shape = (1, 2, 7, 6) if kind != "vae-sd" else (1, 7, 6)
    samples, config = {"samples": latents(kind, *shape)}, comfyui.config("cpu,cpu")
    vae, client = vae_of(kind), comfyui.groups.client(("cpu", "cpu"))
    first = comfyui.vae_decode.execute(samples, vae, config).args[0].clone()
    resident_bytes = client.report_memory()[0]["vae_bytes"]

    with monkeypatch.context() as patched:
        patched.setattr(client.autoencoders, "free_bytes", lambda count, first=0: 1000)
        for _ in range(2):
            assert torch.equal(comfyui.vae_decode.execute(samples, vae, config).args[0], first)
            assert said[-1].endswith("on 2 devices, VAE weights streamed from system RAM")
        streamed_bytes = client.report_memory()[0]["vae_bytes"]
        longer = {"samples": latents(kind, *(each * 4 for each in shape[:-2]), *shape[-2:])}      # of several phases
        with comfyui.cancelled_amid("decoding"):
            comfyui.vae_decode.execute(longer, vae, config)
        assert torch.equal(comfyui.vae_decode.execute(samples, vae, config).args[0], first)

    # most of it is one layer, of two that have room
    assert streamed_bytes < resident_bytes or kind == "vae-minimax"
    assert torch.equal(comfyui.vae_decode.execute(samples, vae, config).args[0], first)
    assert said[-1].endswith("on 2 devices") and client.report_memory()[0]["vae_bytes"] == resident_bytes


def test_reports_progress_and_can_be_cancelled(comfyui, vae_of, said):
    """The workers leave a cancelled decode, and take the next; the node says no longer that it goes on."""
    samples, config = {"samples": latents("vae-sd3", 1, 24, 24)}, comfyui.config("cpu,cpu")
    first = comfyui.vae_decode.execute(samples, vae_of("vae-sd3"), config).args[0].clone()
    client = comfyui.groups.client(("cpu", "cpu"))

    with comfyui.cancelled_amid("decoding"):
        comfyui.vae_decode.execute(samples, vae_of("vae-sd3"), config)

    assert re.fullmatch(r"cancelled, decoding \d+ of \d+", said[-1]) and not comfyui.groups.runs.phase
    assert torch.equal(comfyui.vae_decode.execute(samples, vae_of("vae-sd3"), config).args[0], first)
    assert client.group.segments.names() == []


def test_weights_of_a_vae_that_is_gone_are_dropped(comfyui, vae_of):
    vae = comfyui.nodes.VAELoader().load_vae(comfyui.file("vae-flux", "vae"))[0]
    config = comfyui.config("cpu,cpu")
    comfyui.vae_decode.execute({"samples": latents("vae-flux", 1, 4, 4)}, vae, config)
    client = comfyui.groups.client(("cpu", "cpu"))
    before = set(client.autoencoders.names)

    del vae
    gc.collect()
    deadline_s = time.monotonic() + 120                        # a thread sees to it
    while before <= set(client.autoencoders.names) and time.monotonic() < deadline_s:
        time.sleep(0.05)

    assert before - set(client.autoencoders.names)


def test_what_comfyui_lists_of_a_vae_ends_with_it(comfyui):
    """No circle keeps it: a ControlNet has ComfyUI load all that it lists."""
    cache = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.vae.vae_patcher").CACHE
    gc.collect()
    gc.disable()
    try:
        vae = comfyui.nodes.VAELoader().load_vae(comfyui.file("vae-flux", "vae"))[0]
        comfyui.vae_decode.execute({"samples": latents("vae-flux", 1, 4, 4)}, vae, comfyui.config("cpu,cpu"))
        listed = [weakref.ref(half.patcher) for half in cache[vae.first_stage_model].values()]
        assert any(loaded.model is listed[0]() for loaded in comfyui.management.current_loaded_models)
        del vae

        assert [each() for each in listed] == [None]
    finally:
        gc.enable()


def test_sampled_latent_decodes_like_the_native_nodes(comfyui, vae_of):
    """The whole way: our sampler and our decode against ComfyUI's."""
    latent = comfyui.sample(comfyui.ours("sd3", comfyui.config("cpu,cpu")), "sd3")
    with torch.inference_mode():
        want = comfyui.nodes.VAEDecode().decode(vae_of("vae-sd3"), {"samples": comfyui.reference("sd3")})[0]
        image = comfyui.vae_decode.execute({"samples": latent}, vae_of("vae-sd3")).args[0]

    close(image, want, 1e-4)


def test_every_family_of_vaes_is_recognised(comfyui):
    """Each that can be loaded has its place in the bridge, and the nodes say so."""
    kinds = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.vae.vae_detection").KINDS
    families = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.autoencoders").FAMILIES

    assert {id(kind.family) for kind in kinds} == {id(family) for family in families.values() if family.models}
    for node in (comfyui.vae_decode, comfyui.vae_encode):
        tooltip = next(given.tooltip for given in node.define_schema().inputs if given.id == "vae")
        assert all(name in tooltip for family in families.values() for name in family.models)
