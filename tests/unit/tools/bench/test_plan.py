"""`python -m xdit_backend plan`: a table for a machine in a file, without a GPU, from the header of a model alone."""

import json
import re
import struct
from types import SimpleNamespace

import pytest

from tests.support.tolerances import within
from xdit_backend.__main__ import make_parser
from xdit_backend.models import FAMILIES
from xdit_backend.protocol.errors import CheckpointError, ConfigError
from xdit_backend.tools.bench import plan

CARD = {"name": "a card", "memory_bytes": 24e9, "matrix_flops_s": 60e12, "attention_flops_s": 50e12,
        "memory_bytes_s": 936e9}
LINKS = {"all_to_all": {"2": {"bytes_s": 9e9}}, "hop": {"2": {"bytes_s": 12e9, "latency_s": 2e-5}},
         "all_reduce": {"2": {"bytes_s": 9e9}}}


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """Flux.1's header, and a file that is as long as its weights but holds none."""
    from accelerate import init_empty_weights
    from diffusers import FluxTransformer2DModel
    folder = tmp_path_factory.mktemp("flux") / "transformer"
    with init_empty_weights():
        model = FluxTransformer2DModel(guidance_embeds=True)
    model.save_config(folder)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [end, end + 2 * tensor.numel()]}
        end += 2 * tensor.numel()
    text = json.dumps(header).encode()
    with open(folder / "diffusion_pytorch_model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder.parent


def planned(flux, tmp_path, capsys, *arguments, gpu=CARD, count=2, links=LINKS, **said):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"devices": [gpu | {"count": count}], "links": links} | said))
    plan.main(make_parser().parse_args(["plan", str(flux), "--machine", str(path), *arguments]))
    return capsys.readouterr().out


def test_a_plan_says_what_is_chosen_what_it_takes_and_what_limits_it(flux, tmp_path, capsys):
    text = planned(flux, tmp_path, capsys, "--steps", "28", gpu=CARD | {"memory_bytes": 48e9})

    assert ("4096 tokens, 256 of text, 28 steps, 2 branches, 1 image; 57 blocks of width 3072, 23.80 GB of weights\n"
            "on 2 x a card") in text
    rows = {match[1].strip(): [float(number) for number in match[2].split()] for match in
            re.finditer(r"^[* ] (\S.*?) {2,}([\d.]+ +[\d.]+)x", text, re.MULTILINE)}
    assert {"CFG 2", "Ulysses 2", "Ring 2", "PipeFusion 2, 4 patches", "one device"} <= set(rows)
    for seconds, faster in rows.values():
        within(abs(seconds * faster / rows["one device"][0] - 1), 0.01)
    assert (re.search(r"^\* CFG 2 ", text, re.MULTILINE) and "Plan: CFG 2, about " in text
            and "Why: compute-bound" in text)


@pytest.mark.parametrize("per_machine, exactly, expected", [
    (2, [], "PipeFusion 2 x (Ulysses|Ring) 2, [48] patches"), (2, ["--exact"], "data 2 x (Ulysses|Ring) 2"),
    (0, [], "Ring 2 x Ulysses 2|Ulysses 4|Ring 4")])
def test_a_plan_of_two_machines_keeps_tokens_within_one(flux, tmp_path, capsys, per_machine, exactly, expected):
    """Of the same measurements, which show a fast network."""
    links = {name: sizes | {"4": {"bytes_s": 5e9}} for name, sizes in LINKS.items()}
    text = planned(flux, tmp_path, capsys, "--branches", "1", *exactly, gpu=CARD | {"memory_bytes": 48e9}, count=4,
                   links=links, a_machine=per_machine)

    assert ("on 4 x a card, 2 a machine\n" in text) == (per_machine == 2)
    assert re.search(rf"Plan: ({expected}), about ", text), text
    assert ("Each machine is a stage" in text) == expected.startswith("PipeFusion")


def test_a_plan_spreads_what_does_not_fit(flux, tmp_path, capsys):
    text = planned(flux, tmp_path, capsys, "--branches", "1")

    assert "Plan: PipeFusion 2, 4 patches" in text and "one device has too little memory" in text
    assert re.search(r"^  Ulysses 2 .* does not fit$", text, re.MULTILINE)


@pytest.mark.parametrize("between, arguments, expected", [
    (3e9, ["--for-speed"], "PipeFusion 2, 4 patches"), (3e9, [], "Ulysses 2|Ring 2"),
    (60e9, ["--for-speed"], "Ulysses 2|Ring 2")], ids=str)
def test_a_plan_for_speed_takes_stages_where_links_are_slow(flux, tmp_path, capsys, between, arguments, expected):
    """Where nothing exact is nearly as fast."""
    links = {name: {"2": {"bytes_s": between, "latency_s": 2e-5}} for name in LINKS}
    text = planned(flux, tmp_path, capsys, "--branches", "1", *arguments, gpu=CARD | {"memory_bytes": 48e9},
                   links=links)

    assert re.search(rf"Plan: ({expected}), about ", text), text
    assert ("for speed" in text.lower()) == expected.startswith("PipeFusion"), text


def test_a_model_without_stages_has_no_plan_for_speed(tmp_path, capsys):
    from diffusers import SanaTransformer2DModel
    SanaTransformer2DModel(num_layers=1, caption_channels=8, num_attention_heads=2, attention_head_dim=8,
                           num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16
                           ).save_pretrained(tmp_path / "transformer")
    with pytest.raises(ConfigError, match="^Leave out --for-speed: xDiT does not run Sana by PipeFusion, because "):
        planned(tmp_path, tmp_path, capsys, "--for-speed")


def test_an_exact_plan_spreads_the_layers(flux, tmp_path, capsys):
    text = planned(flux, tmp_path, capsys, "--branches", "1", "--exact")

    assert (re.search(r"^\* tensor 2 .* compute|^\* tensor 2 .* link", text, re.MULTILINE)
            and "Plan: tensor 2, about " in text)
    assert "its layers are sharded, and the image equals one device's" in text


@pytest.mark.parametrize("weight_dtype, gigabytes", [("fp8_e4m3fn", "11.90"), ("int8", "11.92"), ("nf4", "6.70")])
def test_smaller_weights_and_larger_images(flux, tmp_path, capsys, weight_dtype, gigabytes):
    """A byte a number, and four a row of int8; 36 bytes for 64 numbers of nf4. Biases and norms in 16 bits."""
    text = planned(flux, tmp_path, capsys, "--weight-dtype", weight_dtype, "--size", "2048x1024", "--batch", "2")

    assert "8192 tokens" in text and f"{gigabytes} GB of weights" in text and "2 images" in text
    assert re.search(r"^  data 2 ", text, re.MULTILINE)


@pytest.mark.parametrize("arguments, message", [
    (["--size", "big"], "--size big: give width and height"), (["--size", "0x512"], "from 8 to"),
    (["--steps", "0"], "--steps 0: give a number"),
    (["--frames", "9"], "Flux.1 generates images"), (["--branches", "3"], "from 1 to 2")], ids=str)
def test_arguments_that_cannot_be_meant_are_refused(flux, tmp_path, capsys, arguments, message):
    with pytest.raises(ConfigError, match=message):
        planned(flux, tmp_path, capsys, *arguments)


def test_a_file_that_is_no_model_is_refused(tmp_path, capsys):
    (tmp_path / "it.safetensors").write_bytes(b"no model")
    with pytest.raises(CheckpointError):
        planned(tmp_path / "it.safetensors", tmp_path, capsys)
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        planned(tmp_path / "other.safetensors", tmp_path, capsys)


def test_a_audio_is_as_long_as_a_image_of_its_size_has_tokens():
    family = FAMILIES["Stable Audio Open"]

    shape = plan._latent_shape(family, family.testing.config, 1024, 512, SimpleNamespace(frames=1, batch=2))

    assert shape == (2, 8, 512)
