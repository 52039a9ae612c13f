"""start.py's demo: what it prints of a run through a real ComfyUI, and what it calls a fault."""

import argparse
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.programs import demo
from tests.support.comfyui_server import HostError, comfyui_folder


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The demo in a folder of its own, timed on little."""
    for name, value in {"BASE": tmp_path / "demo", "TIMED_SIZE": 64, "TIMED_STEPS": 2}.items():
        monkeypatch.setattr(demo, name, value)
    return argparse.Namespace(prompt="red apple on a yellow background", keep=False, port=0)


class Host:
    """A ComfyUI that answers at once: each prompt's output is a file,
    and each latent differs from the one before by `step`."""

    url, log, step, num_saved = "http://here", "log", 0.0, 0

    def __init__(self, *arguments, **options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        pass

    def run(self, graph):
        kind = "latents" if graph["save"]["class_type"] == "SaveLatent" else "images"
        name, folder = f"{Host.num_saved}.latent", demo.BASE / "output"
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"latent_tensor": torch.ones(1, 4, 2, 2) + self.step * Host.num_saved}, folder / name)
        Host.num_saved += 1
        return {"save": {kind: [{"type": "output", "subfolder": "", "filename": name}]}}, 1.0


@pytest.mark.parametrize("step, is_fault", [(0.0, False), (2e-4, False), (3e-3, True)])
def test_two_results_that_differ_are_a_fault(small, monkeypatch, capfd, step, is_fault):
    monkeypatch.setattr(demo, "Host", type("Host", (Host,), {"step": step}))
    monkeypatch.setattr(demo, "make_checkpoint", lambda *_: None)
    monkeypatch.setattr(demo, "count_gpus", lambda: 0)

    with pytest.raises(HostError, match="differ by more than 1e-03") if is_fault else pytest.MonkeyPatch.context():
        demo.run("comfyui", small)

    assert "1.00 times as fast" in capfd.readouterr().out


def test_without_comfyui_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(demo, "comfyui_folder", lambda: None)
    monkeypatch.setattr(sys, "argv", ["demo"])

    with pytest.raises(SystemExit, match="run start.py, or name its folder in XDIT_COMFYUI"):
        demo.main()


@pytest.mark.slow
def test_it_draws_the_prompt_and_times_one_worker_and_two(small, monkeypatch, capfd):
    """In a real ComfyUI; the larger model that it times is a tiny one here."""
    folder = comfyui_folder()
    if folder is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`, or name one in XDIT_COMFYUI")
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": without_size}))

    demo.run(folder, small)

    out = capfd.readouterr().out
    image = re.search(r"^Picture +(\S+\.png)$", out, re.MULTILINE)[1]
    assert image.startswith(str(demo.BASE)) and '"red apple on a yellow background", drawn by two workers in' in out
    assert red_on_yellow(image)
    assert re.search(r"^Two workers +[\d.]+ s for 2 steps \(\S+,\S+\): [\d.]+ times as fast$", out, re.MULTILINE)
    assert float(re.search(r"latents: (\S+) of", out)[1]) < demo.TOLERANCE and out.endswith("ComfyUI has ended.\n")


def without_size(command, **options):
    at = command.index("--size") if "--size" in command else len(command)
    return subprocess.run(command[:at], **options)


def red_on_yellow(path):
    """Is the middle of this picture red, and are its corners yellow?"""
    import numpy
    from PIL import Image
    red, green, blue = numpy.moveaxis(numpy.asarray(Image.open(path).convert("RGB")).astype(int), -1, 0)
    middle, corner = (slice(48, 80),) * 2, (slice(0, 12),) * 2
    return (red[middle].mean() > 1.5 * green[middle].mean() and green[corner].mean() > 1.5 * blue[corner].mean()
            and red[corner].mean() > 1.5 * blue[corner].mean())
