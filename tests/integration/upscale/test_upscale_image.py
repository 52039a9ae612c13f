"""Distributed Upscale Image equals ComfyUI's Upscale Image (using Model), for every size, batch and scale; upscale
models that workers cannot reproduce are rejected by name."""

import importlib
import re

import psutil
import pytest
import torch

from tests.support.fault_actions import can_run_out, run_out_of_memory
from tests.support.upscale_models import compact, esrgan

FILES = {"esrgan-4x": lambda: esrgan(4), "esrgan-2x": lambda: esrgan(2), "esrgan-1x": lambda: esrgan(1),
         "compact-2x": lambda: compact(2), "compact-3x": lambda: compact(3, num_convs=2),
         "compact-1x": lambda: compact(1), "gray-2x": lambda: compact(2, channels=1)}
# file, images, rows and columns: one tile; an odd size; a tile's size; one pixel more; two overlapping tiles whose
# second one is smaller than the overlap; tiles in both directions; frames with tiles
CASES = [("esrgan-4x", 1, 24, 30), ("esrgan-2x", 2, 13, 17), ("esrgan-1x", 1, 9, 40), ("compact-2x", 1, 512, 33),
         ("compact-2x", 1, 40, 513), ("compact-3x", 1, 30, 993), ("compact-2x", 1, 700, 530),
         ("compact-1x", 3, 20, 600), ("esrgan-4x", 5, 8, 12), ("compact-2x", 1, 1, 1)]


@pytest.fixture(scope="module")
def upscaler(comfyui):
    """upscaler(name): the UPSCALE_MODEL that ComfyUI loads from a file of FILES."""
    (comfyui.base / "upscale_models").mkdir(exist_ok=True)
    comfyui.folder_paths.add_model_folder_path("upscale_models", str(comfyui.base / "upscale_models"), is_default=True)

    def load(name):
        path = comfyui.base / "upscale_models" / f"{name}.pth"
        if not path.exists():
            torch.save(FILES[name](), path)
        return native("UpscaleModelLoader").execute(f"{name}.pth").args[0]
    return load


@pytest.fixture
def texts(comfyui, monkeypatch):
    """Texts shown on the node."""
    texts = []
    monkeypatch.setattr(bridge(comfyui, "distributed_upscale"), "show_text", texts.append)
    return texts


def native(name):
    return getattr(importlib.import_module("comfy_extras.nodes_upscale_model"), name)


def bridge(comfyui, module):
    return importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.upscale.{module}")


def image(num_images, rows, columns, channels=3):
    return torch.rand(num_images, rows, columns, channels, generator=torch.Generator().manual_seed(rows + columns))


def upscale(comfyui, *arguments):
    return comfyui.nodes.NODE_CLASS_MAPPINGS["XDiTUpscaleImage"].execute(*arguments).args[0]


def wanted(model, pixels):
    return native("ImageUpscaleWithModel").execute(model, pixels).args[0]


@pytest.mark.parametrize("name, num_images, rows, columns", CASES)
def test_images_equal_comfyuis(comfyui, upscaler, name, num_images, rows, columns):
    pixels, model = image(num_images, rows, columns), upscaler(name)
    want = wanted(model, pixels)
    result = upscale(comfyui, model, pixels, comfyui.config("cpu,cpu"))

    assert result.shape == want.shape and result.dtype == want.dtype and want.std() > 0.01
    torch.testing.assert_close(result, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu,cpu"])
def test_any_number_of_workers_upscales_every_tile(comfyui, upscaler, monkeypatch, texts, devices):
    """And ComfyUI's process none."""
    pixels, model = image(2, 530, 1100), upscaler("compact-2x")
    want = wanted(model, pixels)
    monkeypatch.setattr(type(model), "__call__", lambda self, tile: pytest.fail("upscaled in ComfyUI's process"))
    result = upscale(comfyui, model, pixels, comfyui.config(devices))

    torch.testing.assert_close(result, want, atol=1e-5, rtol=0)
    count = len(devices.split(","))
    assert re.fullmatch(rf"upscaled in [\d.]+ s on {count} device{'s' * (count > 1)}", texts[-1])


def test_other_values_and_dtypes_of_pixels_equal_comfyuis(comfyui, upscaler):
    """Outside of [0, 1], not numbers, in half precision, and no image at all."""
    model, odd = upscaler("compact-2x"), image(1, 20, 540) * 3 - 1
    odd[0, 3, 4], odd[0, 5, 500] = float("nan"), float("inf")
    for pixels in (odd, image(1, 20, 540).half(), image(1, 20, 30)[:0]):
        want, result = wanted(model, pixels), upscale(comfyui, model, pixels, comfyui.config("cpu,cpu"))

        assert result.shape == want.shape and result.dtype == want.dtype
        torch.testing.assert_close(result, want, atol=1e-5, rtol=0, equal_nan=True)


def test_gray_images_equal_comfyuis(comfyui, upscaler):
    """One channel becomes three, as in ComfyUI."""
    pixels, model = image(1, 20, 540, channels=1), upscaler("gray-2x")

    torch.testing.assert_close(upscale(comfyui, model, pixels, comfyui.config("cpu,cpu")), wanted(model, pixels),
                               atol=1e-5, rtol=0)


def test_tiles_are_split_by_the_speeds_of_the_devices(comfyui, upscaler, monkeypatch):
    """A device three times as fast gets three times as many frames."""
    client, seen = comfyui.groups.client(("cpu", "cpu")), []
    post = client.group.post

    def posted(make_command, *arguments, **options):
        seen.extend(getattr(make_command(0), "tiles", ()))
        return post(make_command, *arguments, **options)
    monkeypatch.setattr(client.group, "post", posted)
    monkeypatch.setattr(client.workers, "speeds", (3, 1))
    pixels, model = image(8, 10, 12), upscaler("compact-2x")
    result = upscale(comfyui, model, pixels, comfyui.config("cpu,cpu"))

    assert [tile.rank for tile in seen].count(0) == 6 and len(seen) == 8
    torch.testing.assert_close(result, wanted(model, pixels), atol=1e-5, rtol=0)


def test_progress_is_comfyuis(comfyui, upscaler, monkeypatch):
    import comfy.utils
    steps, phases, workers = [], [], comfyui.groups.client(("cpu", "cpu")).workers
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", lambda done, total, *_, **__: steps.append((done, total)))
    monkeypatch.setattr(workers, "on_phase", phases.append)
    upscale(comfyui, upscaler("compact-2x"), image(3, 20, 600), comfyui.config("cpu,cpu"))

    assert steps[-1] == (6, 6)
    said = [(phase.done, phase.total) for phase in phases if phase.text == "upscaling"]
    assert sorted(said) == [(done, 6) for done in range(1, 7)]


# --- cancelling, and failures of workers ---

def test_a_cancelled_upscaling_ends_soon_and_the_next_one_is_right(comfyui, upscaler):
    pixels, model = image(30, 64, 64), upscaler("esrgan-4x")
    with comfyui.cancelled_amid("upscaling"):
        upscale(comfyui, model, pixels, comfyui.config("cpu,cpu"))
    client = comfyui.groups.client(("cpu", "cpu"))
    client.report_memory()                                     # after everything that the workers still do

    assert client.running and not client.group.segments.names()
    result = upscale(comfyui, model, pixels[:2], comfyui.config("cpu,cpu"))
    torch.testing.assert_close(result, wanted(model, pixels[:2]), atol=1e-5, rtol=0)


def test_cancelling_amid_comfyuis_blending_ends_the_workers_tiles(comfyui, upscaler, monkeypatch):
    """ComfyUI's progress bar raises."""
    import comfy.utils

    def hook(done, total, *_, **__):
        if done == 1:
            raise comfyui.management.InterruptProcessingException
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    with pytest.raises(comfyui.management.InterruptProcessingException):
        upscale(comfyui, upscaler("compact-2x"), image(40, 16, 16), comfyui.config("cpu,cpu"))
    client = comfyui.groups.client(("cpu", "cpu"))
    client.report_memory()

    assert client.running and not client.group.segments.names()


def test_a_killed_worker_is_named_and_the_next_run_has_new_ones(comfyui, upscaler, monkeypatch):
    pixels, model = image(6, 40, 40), upscaler("esrgan-4x")
    config, client = comfyui.config("cpu,cpu"), comfyui.groups.client(("cpu", "cpu"))
    want, workers = wanted(model, pixels), client.workers
    upscale(comfyui, model, pixels[:1], config)
    victim = psutil.Process(int(client.report_memory()[1]["pid"]))

    def killing(phase):
        if phase.text == "upscaling" and victim.is_running():
            victim.kill()
    monkeypatch.setattr(workers, "on_phase", killing)
    with pytest.raises(comfyui.errors.WorkerDiedError, match=r"^Worker rank 1 \(cpu\) died \(exit code -9, "
                                                             r"killed\) while upscaling"):
        upscale(comfyui, model, pixels, config)
    monkeypatch.undo()

    torch.testing.assert_close(upscale(comfyui, model, pixels, config), want, atol=1e-5, rtol=0)


@pytest.fixture
def starved(comfyui, tmp_path):
    """starved(rank): this rank runs out of memory in its next tile."""
    comfyui.groups.stop()
    undo = can_run_out(tmp_path)
    yield lambda rank: run_out_of_memory(tmp_path, rank, "upscale")
    undo()
    comfyui.groups.stop()


def test_out_of_memory_leads_to_comfyuis_smaller_tiles(comfyui, upscaler, starved, texts, monkeypatch):
    pixels, model = image(1, 530, 540), upscaler("compact-2x")
    with monkeypatch.context() as patch:                       # ComfyUI alone runs out of memory once
        call, calls = type(model).__call__, []

        def once(self, tile):
            calls.append(tile.shape)
            if len(calls) == 1:
                raise torch.OutOfMemoryError
            return call(self, tile)
        patch.setattr(type(model), "__call__", once)
        want = wanted(model, pixels)
    assert max(calls[1:]) == (1, 3, 256, 256)
    pending = starved(1)
    result = upscale(comfyui, model, pixels, comfyui.config("cpu,cpu"))

    assert not pending.exists() and texts[-1].endswith("on 2 devices, tiles of 256 pixels")
    torch.testing.assert_close(result, want, atol=1e-5, rtol=0)


def test_too_little_memory_for_the_smallest_tile_is_an_error(comfyui, upscaler, starved, monkeypatch):
    """Each size of tiles is tried once."""
    module = bridge(comfyui, "distributed_upscale")
    begin, sizes = module.TiledUpscaler._begin, []

    def begun(tiled):
        sizes.append(tiled.tile)
        starved(0)
        begin(tiled)
    monkeypatch.setattr(module.TiledUpscaler, "_begin", begun)
    with pytest.raises(comfyui.errors.WorkerOutOfMemoryError, match=r"^Use a smaller upscale model\. Worker rank 0 "
                       r"\(cpu\) failed with OutOfMemoryError while upscaling"):
        upscale(comfyui, upscaler("compact-2x"), image(1, 140, 150), comfyui.config("cpu,cpu"))

    assert sizes == [512, 256, 128]


# --- upscale models and images that are rejected ---

def refused(comfyui, model, pixels=None):
    with pytest.raises(comfyui.errors.UnsupportedError) as raised:
        upscale(comfyui, model, image(1, 20, 20) if pixels is None else pixels, comfyui.config("cpu,cpu"))
    return str(raised.value)


def test_images_of_other_channels_are_rejected(comfyui, upscaler):
    assert refused(comfyui, upscaler("compact-2x"), image(1, 20, 20, channels=4)) == (
        "Connect an image of 3 channels: the image has the shape (1, 20, 20, 4), and this upscale model takes 3 "
        "channels.")


def test_other_objects_are_rejected(comfyui):
    assert refused(comfyui, torch.nn.Identity()).startswith(
        "Use Upscale Image (using Model) for this upscale model, or connect Load Upscale Model: this is a Identity")


def patched(model, kind):
    """Patch a model as a node could."""
    if kind == "patches":
        name = next(iter(model.model.state_dict()))
        model.patcher.add_patches({name: (torch.zeros(1),)})
    elif kind == "object_patches":
        model.patcher.add_object_patch("body", torch.nn.Identity())
    elif kind == "hooks":
        model.model.body[0].register_forward_hook(lambda module, args, output: output * 2)
    elif kind == "layers":
        model.model.body[0].padding_mode = "reflect"
    elif kind == "functions":
        model.model.forward = lambda tile: tile
    elif kind == "dtype":
        model.model.half()
    return model


@pytest.mark.parametrize("kind", ["patches", "object_patches", "hooks", "layers", "functions", "dtype"])
def test_patched_models_are_rejected_by_name(comfyui, upscaler, kind):
    said = refused(comfyui, patched(upscaler("compact-2x"), kind))

    assert said.startswith("Use Upscale Image (using Model) for this upscale model, or connect Load Upscale Model "
                           "directly: ")
    assert f"a node patches it ({kind})" in said if "patches" in kind else f"its {kind} differ" in said


def test_changed_weights_are_upscaled_with(comfyui, upscaler):
    """The workers get the tensors of the MODEL, not the file's."""
    pixels, model = image(1, 20, 20), upscaler("compact-2x")
    before = wanted(model, pixels)
    with torch.no_grad():
        model.model.body[0].weight.mul_(1.5)
    result, want = upscale(comfyui, model, pixels, comfyui.config("cpu,cpu")), wanted(model, pixels)

    assert (want - before).abs().max() > 1e-3
    torch.testing.assert_close(result, want, atol=1e-5, rtol=0)


# --- mutants ---

def a_tile_lost(comfyui, patch):
    tiles_of = bridge(comfyui, "distributed_upscale").tiles_of
    patch.setattr(bridge(comfyui, "distributed_upscale"), "tiles_of", lambda *args: tiles_of(*args)[:-1])


def tiles_in_another_order(comfyui, patch):
    tiles_of = bridge(comfyui, "distributed_upscale").tiles_of
    patch.setattr(bridge(comfyui, "distributed_upscale"), "tiles_of",
                  lambda *args: sorted(tiles_of(*args), key=lambda tile: (tile.image, tile.left, tile.top)))


def another_overlap(comfyui, patch):
    tiles_of = bridge(comfyui, "distributed_upscale").tiles_of
    patch.setattr(bridge(comfyui, "distributed_upscale"), "tiles_of", lambda *args: tiles_of(*args, overlap=16))


def a_tile_too_many(comfyui, patch):
    tiles_of = bridge(comfyui, "distributed_upscale").tiles_of
    patch.setattr(bridge(comfyui, "distributed_upscale"), "tiles_of",
                  lambda *args: tiles_of(*args) + tiles_of(*args)[-1:])


@pytest.mark.parametrize("mutant", [a_tile_lost, tiles_in_another_order, another_overlap, a_tile_too_many],
                         ids=lambda mutant: mutant.__name__)
def test_a_wrong_plan_is_an_error(comfyui, upscaler, monkeypatch, mutant):
    """As it would be with a ComfyUI whose node has other tiles."""
    with monkeypatch.context() as patch:
        mutant(comfyui, patch)
        said = refused(comfyui, upscaler("compact-2x"), image(1, 530, 600))

    assert said.startswith("Update xDiT, or use Upscale Image (using Model): this ComfyUI splits the image into other "
                           "tiles")


@pytest.mark.parametrize("mutant", ["a tile lost", "two tiles exchanged", "an overlap not blended"])
def test_wrong_tiles_change_the_image(comfyui, upscaler, monkeypatch, mutant):
    """What the comparison with ComfyUI would notice."""
    pixels, model = image(1, 40, 600), upscaler("compact-2x")
    upscalers = type(comfyui.groups.client(("cpu", "cpu")).upscalers)
    native_tiles = upscalers.upscale

    def wrong(self, *arguments):
        tiles = [tile.clone() for tile in native_tiles(self, *arguments)]
        if mutant == "a tile lost":
            tiles[1].zero_()
        elif mutant == "two tiles exchanged":
            part, other = tiles[0][..., :tiles[1].shape[-1]], tiles[1].clone()
            tiles[1].copy_(part)
            part.copy_(other)
        else:
            tiles[1][..., :64] = 0
        yield from tiles
    monkeypatch.setattr(upscalers, "upscale", wrong)
    result = upscale(comfyui, model, pixels, comfyui.config("cpu,cpu"))

    assert (result - wanted(model, pixels)).abs().max() > 1 / 255
