"""What ComfyUI's memory manager makes of our MODELs: driven with a pretended GPU,
whose workers are real ones on the CPU."""

import importlib
import sys

import pytest
import torch

CUDA = torch.device("cuda:0")
GB = 2 ** 30


class Pretended:
    """ComfyUI as on a machine with CUDA devices, of which it is told how much memory is free;
    and what the workers are sent."""

    def __init__(self, comfyui, monkeypatch, workers):
        self.comfyui, self.management, self.monkeypatch, self._workers = (
            comfyui, comfyui.management, monkeypatch, workers)
        comfyui.native("sd3")                                  # which other tests get too: on its own device
        self.free_bytes, self.sent, self.emptied, self.pins = 20 * GB, [], 0, []
        groups = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.worker_groups")
        self.groups = type(comfyui.groups)()
        # what is pretended is not measured
        monkeypatch.setattr(self.groups, "machine", lambda *given, **options: None)
        for name, module in [*sys.modules.items()]:
            if name.startswith(f"{comfyui.pack.__name__}.nodes.") and hasattr(module, "GROUPS"):
                monkeypatch.setattr(module, "GROUPS", self.groups)
        self.room = 20 * GB
        for name in ("sampling.remote_model", "workers.worker_groups"):
            monkeypatch.setattr(importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.{name}"),
                                "parking_bytes",
                                lambda: self.room)
        self._module = groups
        monkeypatch.setattr(self.management, "current_loaded_models", [])
        monkeypatch.setattr(self.management, "vram_state", self.management.VRAMState.NORMAL_VRAM)
        monkeypatch.setattr(self.management, "get_torch_device", lambda: CUDA)
        monkeypatch.setattr(self.management, "get_all_torch_devices", lambda exclude_current=False: [CUDA])
        monkeypatch.setattr(self.management, "get_free_memory", self._free)
        monkeypatch.setattr(self.management, "soft_empty_cache", self._empty)
        monkeypatch.setattr(self.management, "ensure_pin_budget", lambda size, **_: self.pins.append(size))

    def _free(self, device=None, torch_free_too=False):
        return (self.free_bytes, 0) if torch_free_too else self.free_bytes

    def _empty(self, force=False):
        self.emptied += 1
        self.sent.append("soft_empty_cache")

    def client(self, *devices):
        """The Client of a group with these devices' names, on as many CPU workers."""
        client = self._workers(len(devices))
        self.monkeypatch.setattr(client.workers, "devices", devices)
        self.groups._clients[devices] = client
        post = client.group.post

        def counted(make_command, *args, **kwargs):
            def named(request):
                command = make_command(request)
                self.sent.append(type(command).__name__)
                return command
            return post(named, *args, **kwargs)
        self.monkeypatch.setattr(client.group, "post", counted)
        return client

    def model(self, *devices, kind="sd3", weight_dtype="fp32", options=None, **degrees):
        """Our MODEL on these devices."""
        self.monkeypatch.setattr(self.comfyui.proxy, "devices_of", lambda config: devices)
        self.monkeypatch.setattr(self.comfyui.proxy, "memory_of", lambda device: 24 * GB)
        config = self.comfyui.config(",".join("cpu" for _ in devices), **degrees)
        return self.comfyui.ours(kind, config, weight_dtype, **(options or {}))

    def predict(self, model):
        """A prediction of the workers, as ComfyUI's sampler asks for it."""
        generator = torch.Generator().manual_seed(5)
        latent = torch.randn(1, 16, 8, 8, generator=generator)
        (text, pooled), = self.comfyui.conditioning("sd3", 1)
        with torch.inference_mode():
            result = model.model.diffusion_model(latent, torch.full((1,), 500.0), context=text,
                                                 y=pooled["pooled_output"])
        model.cleanup()
        return result


@pytest.fixture(scope="module")
def workers(comfyui):
    """workers(count): the Client of so many on the CPU, which holds nothing.
    Of these tests' own: they count what it is sent."""
    make, clients = importlib.import_module(f"{comfyui.pack.__name__}.xdit_backend.host.client").Client, {}

    def of(count):
        client = clients.setdefault(count, make(("cpu",) * count))
        for name in (*client.models.names, *client.autoencoders.names):
            client.drop(name)
        assert client.group.alive
        return client
    yield of
    for client in clients.values():
        client.close()


@pytest.fixture
def fake(comfyui, monkeypatch, workers):
    fake = Pretended(comfyui, monkeypatch, workers)
    yield fake
    # these go on, and what the test leaves them is not theirs any more
    fake.groups._clients.clear()


# held in float32, so that no weight is in the file as it is on the device
FP16 = {"dtype": torch.float16}


def held(client):
    """Bytes of weights on each rank's device."""
    return [int(numbers["weight_bytes"]) for _, numbers in sorted(client.report_memory().items())]


@pytest.mark.slow
def test_weights_move_as_far_as_comfyui_asks_and_come_back_the_same(fake):
    """One story on one group, since groups take long to start:
    load, room short, room for others, unload, no room to park."""
    client = fake.client("cuda:0", "cuda:1")
    model = fake.model("cuda:0", "cuda:1", options=FP16, ulysses=2)
    management, patcher_of, loads = fake.management, lambda: [
        loaded.model for loaded in management.current_loaded_models], []
    # a node's: what is there is not loaded again
    model.add_callback("on_load_after", lambda *arguments: loads.append(arguments[1]))

    management.load_models_gpu([model])
    assert fake.sent == ["soft_empty_cache", "LoadModel"]
    whole, (own, other) = held(client)[0], held(client)
    assert whole > 1e6 and own == other
    assert abs(model.model_size() - own) < 0.01 * own and model.loaded_size() == model.model_size()
    before = fake.predict(model)

    # A step with hardly any memory free: the model is in use, nothing of it goes.
    fake.free_bytes, fake.sent[:] = 2 ** 20, []
    management.load_models_gpu([model], memory_required=8 * GB, minimum_memory_required=6 * GB)
    assert fake.sent == ["soft_empty_cache"] and held(client) == [own, other] and loads == [CUDA]
    assert fake.pins == []                                # it needs no page-locked memory of ComfyUI's

    # Another model needs room on cuda:0, a third of ours: cuda:1 keeps everything.
    needed = own // 3
    fake.free_bytes = GB - needed
    management.free_memory(GB, CUDA)
    now = held(client)
    assert now[1] == other and own // 2 < now[0] <= own - needed
    assert patcher_of() == [model] and abs(model.loaded_size() - now[0]) < 0.01 * own
    assert client.group.segments.names() == []                 # it goes with the workers, whatever becomes of them
    fake.free_bytes, fake.sent[:] = 20 * GB, []
    management.load_models_gpu([model])
    assert fake.sent == ["soft_empty_cache", "RestoreModel"] and held(client) == [own, other]
    assert torch.equal(fake.predict(model), before)

    # What runs have left there goes before weights do.
    with fake.monkeypatch.context() as patch:
        patch.setattr(client, "give_back", lambda: {"cuda:0": needed})
        fake.free_bytes = GB - needed
        management.free_memory(GB, CUDA)
    assert held(client) == [own, other] and patcher_of() == [model]
    fake.free_bytes = 20 * GB

    # "Unload models": nothing is on any device, and it comes back without the file.
    management.unload_all_models()
    assert held(client) == [0, 0] and model.loaded_size() == 0 and patcher_of() == []
    fake.sent.clear()
    assert torch.equal(fake.predict(model), before)       # also where nothing asked for it to be loaded
    assert "RestoreModel" in fake.sent and "LoadModel" not in fake.sent
    management.load_models_gpu([model])

    # What has once been written need not be written again, so that it may be parked whatever is free; a new model may
    # not.
    fake.room = 0
    management.unload_all_models()
    assert held(client) == [0, 0] and client.holds(model.model.remote.spec.name)
    fresh = fake.model("cuda:0", "cuda:1", options=FP16 | {"prefix": "model.diffusion_model."}, ulysses=2)
    management.load_models_gpu([fresh])
    assert held(client) == [own, other]
    management.unload_all_models()
    assert held(client) == [0, 0] and not client.holds(fresh.model.remote.spec.name)
    assert torch.equal(fake.predict(fresh), before)


@pytest.mark.slow
def test_comfyui_is_told_of_the_stage_on_its_own_device(fake):
    """PipeFusion: half of the model is there, and another device is no concern of ComfyUI's when it has no worker."""
    model = fake.model("cuda:0", "cuda:1", pipefusion=2)
    whole = fake.model("cuda:0", "cuda:1", ulysses=2).model_size()
    assert whole / 2 <= model.model_size() < 0.65 * whole

    client = fake.client("cuda:0", "cuda:1")
    fake.management.load_models_gpu([model])
    own, other = held(client)

    assert abs(model.model_size() - own) < 0.01 * own and own + other < 1.2 * whole
    assert model.load_device == CUDA
    assert fake.model("cuda:1", "cuda:2", ulysses=2).load_device == torch.device("cuda:1")
    assert fake.model("cuda:0", "cuda:0", ulysses=2).model_size() == 2 * whole


@pytest.mark.slow
def test_comfyui_is_told_what_a_run_takes_on_its_device_and_asks_for_room_on_the_others(fake):
    """ComfyUI asks for its own estimate for a whole model, on load_device alone."""
    shape, management = [2, 16, 64, 64], fake.management
    whole = fake.comfyui.native("sd3").model.memory_required(shape)

    def told(*devices, **degrees):
        model = fake.model(*devices, **degrees)
        return model.model.memory_required(shape)

    # keys, values; forecasts; branches; tokens with those of a usual text, width, half of the blocks, bytes
    cached = 2 * 2 * 2 * (1024 + 512) * 256 * 2 * 4
    assert told("cuda:0", "cuda:1", ulysses=2) == told("cuda:0", "cuda:1", cfg=2) == whole / 2
    assert told("cuda:0", "cuda:0", ring=2) == whole           # both ranks are there
    assert told("cuda:0", "cuda:1", pipefusion=2) == whole / 2 + cached
    four = [f"cuda:{index}" for index in range(4)]
    assert told(*four, pipefusion=2, tensor=2) == whole / 2 + cached / 2         # of a rank's heads

    client = fake.client("cuda:0", "cuda:1")
    model = fake.model("cuda:0", "cuda:1", ulysses=2)
    theirs, requested, free = fake.comfyui.native("sd3").clone(), [], management.free_memory
    theirs.load_device = torch.device("cuda:1")

    def free_memory(needed, device, *args, **options):
        requested.append((needed, device))
        return free(needed, device, *args, **options)

    fake.monkeypatch.setattr(management, "free_memory", free_memory)
    management.load_models_gpu([model], memory_required=model.model.memory_required(shape))
    # nothing of ComfyUI's is on the other: it is not touched
    assert {device for _, device in requested} == {CUDA}
    management.unload_all_models()
    management.current_loaded_models.append(management.LoadedModel(theirs))
    management.current_loaded_models[-1].real_model = lambda: theirs.model           # as if it had been loaded there
    requested.clear()
    management.load_models_gpu([model], memory_required=model.model.memory_required(shape))

    own, needed = held(client)[1], {device: needed for needed, device in requested}[torch.device("cuda:1")]
    assert abs(needed - own - whole / 2 - management.minimum_inference_memory()) < 0.01 * own


@pytest.mark.slow
def test_a_group_parks_what_another_has_on_its_device(fake):
    """As much as it lacks; ComfyUI itself knows one device of a model only."""
    first, second = fake.client("cuda:0", "cuda:1"), fake.client("cuda:1")
    one = fake.model("cuda:0", "cuda:1", options=FP16, ulysses=2)
    fake.management.load_models_gpu([one])
    own = held(first)[0]
    two = fake.model("cuda:1")
    spare = int(fake.management.minimum_inference_memory()) + two.model_size()
    report = second.report_memory
    fake.monkeypatch.setattr(second, "report_memory", lambda: {0: report()[0] | {"free_bytes": spare - own // 3}})

    fake.management.load_models_gpu([two])

    now = held(first)
    assert now[0] == own and own // 2 < now[1] <= own - own // 3
    assert second.holds(two.model.remote.spec.name)


@pytest.fixture
def vae(vae_of):
    return vae_of("vae-sd3")                                   # loaded where ComfyUI really is


@pytest.mark.slow
def test_a_decode_asks_for_what_it_needs(vae, fake):
    """ComfyUI's estimate is several times as much, for which it would unload the diffusion model."""
    client = fake.client("cuda:0", "cuda:1")
    requested = []
    load = fake.management.load_models_gpu
    fake.monkeypatch.setattr(fake.management, "load_models_gpu",
                                  lambda models, memory_required=0, **options: requested.append(
                                      (models[0], memory_required)) or load(models))
    latent = torch.randn(1, 16, 16, 16, generator=torch.Generator().manual_seed(1))

    autoencoder = importlib.import_module(f"{fake.comfyui.pack.__name__}.nodes.bridge.vae.distributed_vae")
    autoencoder.decode(vae, latent, fake.comfyui.config("auto"))

    (_, nothing), (patcher, needed) = requested
    decoder_bytes = sum(tensor.nbytes for name, tensor in vae.first_stage_model.state_dict().items()
                        if name.startswith("decoder."))
    assert patcher.model_size() == patcher.loaded_size() >= decoder_bytes
    assert nothing == 0 and needed == client.autoencoders.estimate(patcher.model.remote.name, latent.shape, 1)
    assert 0 < needed < vae.memory_used_decode(latent.shape, vae.vae_dtype) / 2


def test_asking_for_a_devices_memory_makes_no_context_there(comfyui, monkeypatch):
    """mem_get_info and memory_stats would, and take up to half a gigabyte."""
    memory_of = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.worker_groups").memory_of
    for name in ("mem_get_info", "memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: pytest.fail(f"a context on {device}"))
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda device: type("Properties", (), {"total_memory": 24 * GB}))

    assert memory_of("cuda:1") == 24 * GB


def test_the_limit_of_a_container_holds_for_what_is_parked_and_for_cpu_workers(comfyui, monkeypatch):
    groups = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.workers.worker_groups")
    monkeypatch.setattr(groups, "available_memory", lambda: (7 * GB, 12 * GB))

    assert groups.memory_of("cpu") == 12 * GB and groups.parking_bytes() == 5 * GB
