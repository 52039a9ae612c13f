"""The training script's parts: a stopped run equals one that was not, and the files hold what was trained."""

import random

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.demo_model import autoencoder, emoji, export, loop, small, transformer


@pytest.fixture
def entry():
    return emoji.Entry("\U0001F408", "cat", ("pet", "animal"), 1.0)


def train_line(folder, steps, stop_after=None, seed=0):
    """A line fitted to noisy points; stopped by an exception after some steps when asked."""
    torch.manual_seed(0)
    line = torch.nn.Linear(2, 1)

    def loss_of(step, generator):
        if step == stop_after:
            raise KeyboardInterrupt
        points = torch.randn(8, 2, generator=generator)
        return (line(points) - points.sum(1, keepdim=True)).square().mean()
    setting = loop.Setting(folder, seed=seed)
    recipe = loop.Recipe(steps, 1e-2, 0.9, by_muon=lambda name, parameter: name == "weight")
    return loop.run("line", setting, {"line": line}, recipe, loss_of, lambda step, weights: None)["line"]


def test_a_stopped_training_goes_on_as_if_it_had_not_been_stopped(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    monkeypatch.setattr(loop, "SAVE_EVERY_S", -1)              # after every step
    whole = train_line(tmp_path / "whole", 20)

    with pytest.raises(KeyboardInterrupt):
        train_line(tmp_path / "stopped", 20, stop_after=11)
    resumed = train_line(tmp_path / "stopped", 20)

    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_training_is_what_its_seed_says(tmp_path):
    folders = [tmp_path / name for name in ("first", "again", "other")]
    for folder in folders:
        folder.mkdir()

    first, again, other = (train_line(folder, 5, seed=seed) for folder, seed in zip(folders, (3, 3, 4)))

    assert torch.equal(first["weight"], again["weight"]) and not torch.equal(first["weight"], other["weight"])


def test_a_training_that_forgets_its_optimizer_differs(tmp_path, monkeypatch):
    """The mutant of the test above."""
    (tmp_path / "whole").mkdir()
    monkeypatch.setattr(loop, "SAVE_EVERY_S", -1)
    whole = train_line(tmp_path / "whole", 20)
    with pytest.raises(KeyboardInterrupt):
        train_line(tmp_path, 20, stop_after=11)
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", lambda self, state: None)

    resumed = train_line(tmp_path, 20)

    assert not all(torch.equal(whole[name], resumed[name]) for name in whole)


def random_transformer():
    torch.manual_seed(0)
    model, _ = transformer.new()
    return {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


def test_the_transformers_file_is_read_back_by_diffusers_converter():
    state = random_transformer()

    tensors = export.transformer_tensors(state)
    read = convert_sd3_transformer_checkpoint_to_diffusers(dict(tensors))

    assert set(read) == set(state)
    for name, tensor in state.items():
        stored = tensor.to(torch.float8_e4m3fn if transformer.is_block_matrix(name, tensor) else torch.float16)
        assert torch.equal(read[name].float(), stored.float()), name


def test_training_sees_the_weights_the_file_will_hold():
    model, _ = transformer.new()
    model.load_state_dict(random_transformer())
    file = convert_sd3_transformer_checkpoint_to_diffusers(export.transformer_tensors(model.state_dict()))

    weights = transformer.rounded(model)

    name = "transformer_blocks.2.ff.net.0.proj.weight"
    assert torch.equal(weights[name], file[name].float())
    assert not torch.equal(weights[name], model.get_parameter(name))
    weights[name].sum().backward()
    assert torch.equal(model.get_parameter(name).grad, torch.ones_like(weights[name]))


def test_the_autoencoders_file_is_a_tiny_autoencoders():
    tensors = export.autoencoder_tensors(autoencoder.new().state_dict())

    assert tensors["taesd_decoder.1.weight"].shape == (64, 16, 3, 3)
    assert tensors["taesd_encoder.14.weight"].shape == (16, 64, 3, 3)


def test_a_glyph_covers_its_background_where_it_is_opaque():
    glyph = torch.zeros(1, 4, 4, 4, dtype=torch.uint8)
    glyph[:, 0], glyph[:, 3, :2] = 255, 255                    # red, opaque in its upper half

    image = emoji.compose(glyph, torch.tensor([[0, 0, 255]]))

    assert image[0, :, 0, 0].tolist() == [1, -1, -1] and image[0, :, 3, 3].tolist() == [-1, -1, 1]


def test_captions_name_the_thing_or_what_it_is_like(entry):
    captions = {emoji.caption(entry, "orange", random.Random(seed)) for seed in range(50)}

    assert "cat on an orange background" in captions and len(captions) > 3
    assert all(caption.endswith(" on an orange background") for caption in captions)
    assert all("cat" in caption or "pet" in caption or "animal" in caption for caption in captions)


def test_missing_packages_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="fonts-noto-color-emoji"):
        emoji.read_entries(tmp_path)


def test_a_small_unet_is_read_back_as_it_was_trained(tmp_path, monkeypatch):
    """Two steps of training; the file is a U-Net of SD 1.5's kind, and its model the one that was written."""
    monkeypatch.setattr(transformer, "BATCH", 4)
    torch.manual_seed(0)
    entries = [emoji.Entry("\U0001F408", name, ("animal",), 1.0) for name in ("cat", "dog")]
    rows, shown = torch.tensor([[0, 1] * 6, [2, 3] * 6]), []
    model = small.new_unet()

    dataset = transformer.Dataset(torch.randn(4, 16, 16, 16), rows, entries, torch.ones(2))
    state = small.train(loop.Setting(tmp_path), model, dataset, 2, 1e-3, lambda step, weights: shown.append(step))
    export.write(tmp_path / "unet.safetensors", export.unet_tensors(state, small.NUM_LAYERS, torch.float32))
    header = open_checkpoint(str(tmp_path / "unet.safetensors"))
    read = load_transformer(header.spec("float32", "float32"), torch.device("cpu")).model

    assert shown == [2] and header.family.name == "SD 1.5"
    assert all(torch.equal(tensor, state[name]) for name, tensor in read.state_dict().items())
    latent, sigma, context = torch.randn(2, 16, 16, 16), torch.tensor([1.0, 0.3]), torch.randn(2, 24, 128)
    model.load_state_dict(state)
    with torch.no_grad():
        assert torch.equal(small.predicted(read, latent, sigma, context, None),
                           small.predicted(model, latent, sigma, context, None))


@pytest.mark.parametrize("kind, family", [("flux", "Flux.1"), ("lumina", "Lumina 2")])
def test_other_small_transformers_are_read_back_and_predict_velocities(tmp_path, kind, family):
    """In the sign and with the times that `bench quality` draws with."""
    torch.manual_seed(0)
    model = small.NEW[kind]().eval()
    header = open_checkpoint(str(small.write(kind, model.state_dict(), tmp_path)))
    read = load_transformer(header.spec("float32", "float32"), torch.device("cpu")).model
    latent, sigma = torch.randn(2, 16, 16, 16), torch.tensor([1.0, 0.3])
    context, pooled = torch.randn(2, 24, 128), torch.randn(2, 128)

    assert header.family.name == family
    with torch.no_grad():
        predicted = small.predicted(model, latent, sigma, context, pooled)
        given = {name: value for name, value in (("context", context), ("y", pooled))
                 if name in header.family.inputs.conditioning}
        inputs = header.family.forward_arguments(latent, sigma * header.family.inputs.time_scale, given, header.config)
        assert torch.equal(header.family.prediction(read(**inputs, return_dict=False)[0], latent), predicted)
    assert predicted.shape == latent.shape and predicted.std() > 1e-3
