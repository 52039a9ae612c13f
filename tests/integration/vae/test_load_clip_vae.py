"""Load CLIP and VAE gives what Load Checkpoint gives of an all-in-one checkpoint, and loads no diffusion model."""

import importlib
import io

import pytest
import torch
from safetensors.torch import save_file

from tests.support.tiny_checkpoints import autoencoder, fill, state_dict
from tests.support.tolerances import close, relative_error

# What makes a text encoder thin, by the names under which ComfyUI's own classes take such settings
CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3,
        "projection_dim": 32}
THIN = {"clip_l_model_config": CLIP, "clip_g_model_config": {**CLIP, "hidden_size": 48, "projection_dim": 48},
        "hydit_clip_model_config": {**CLIP, "vocab_size": 47020}, "mt5xl_model_config": {
            "vocab_size": 64, "d_model": 24, "d_ff": 32, "d_kv": 12, "num_heads": 2, "num_layers": 2}}
# kind: ComfyUI's class of its models, what the names of the model begin with, of its VAE, the classes of its text
# encoders
KINDS = {"sd15": ("SD15", "model.diffusion_model.", "first_stage_model.", "comfy.sd1_clip:SD1ClipModel"),
         "sdxl": ("SDXL", "model.diffusion_model.", "first_stage_model.", "comfy.sdxl_clip:SDXLClipModel"),
         "hunyuandit": ("HunyuanDiT", "model.", "vae.", "comfy.text_encoders.hydit:HyditModel")}


@pytest.fixture
def thin_encoders(comfyui, monkeypatch):
    import comfy.sd1_clip
    init = comfy.sd1_clip.SDClipModel.__init__
    monkeypatch.setattr(comfy.sd1_clip.SDClipModel, "__init__", lambda self, *args, model_options={}, **named: init(
        self, *args, model_options={**model_options, **THIN}, **named))


def save_all_in_one(kind, path):
    """A checkpoint as it is published, tiny: text encoders, their tokeniser's pieces where the file has them,
    model and VAE."""
    import comfy.supported_models
    cls, of_model, of_vae, place = KINDS[kind]
    module, _, name = place.partition(":")
    clip, vae = getattr(importlib.import_module(module), name)(dtype=torch.float32), autoencoder("vae-sd", encoder=True)
    generator = torch.Generator().manual_seed(5)
    for part in (clip, vae):
        fill(part, generator)
    texts = dict(clip.state_dict())
    if kind == "hunyuandit":
        texts["mt5xl.spiece_model"] = torch.frombuffer(bytearray(pieces()), dtype=torch.uint8)
    config = getattr(comfy.supported_models, cls)
    tensors = config.process_clip_state_dict_for_saving(config, texts)
    tensors |= {of_model + name: tensor for name, tensor in state_dict(kind).items()}
    tensors |= {of_vae + name: tensor for name, tensor in vae.state_dict().items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, str(path))


def pieces():
    """A tokeniser of letters, as SentencePiece writes it."""
    import sentencepiece
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(["a lighthouse on a cliff", "by the sea"]),
                                             model_writer=written,
                                             model_type="char", vocab_size=40, hard_vocab_limit=False, minloglevel=2)
    return written.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_clip_and_vae_are_those_of_load_checkpoint(comfyui, thin_encoders, monkeypatch, kind):
    import comfy.model_base
    name, node = f"all-in-one-{kind}.safetensors", comfyui.nodes.NODE_CLASS_MAPPINGS["XDiTLoadClipVae"]
    save_all_in_one(kind, comfyui.base / "checkpoints" / name)
    _, native_clip, native_vae = comfyui.nodes.CheckpointLoaderSimple().load_checkpoint(name)
    made, init = [], comfy.model_base.BaseModel.__init__

    def noted(self, *args, **kwargs):
        made.append(self)
        init(self, *args, **kwargs)
    monkeypatch.setattr(comfy.model_base.BaseModel, "__init__", noted)

    clip, vae = node.execute(name).args

    assert made == []
    with torch.inference_mode():
        (ours, native, other), images = [
            one.encode_from_tokens_scheduled(one.tokenize(text))[0] for one, text in (
                (clip, "a lighthouse on a cliff"), (native_clip, "a lighthouse on a cliff"),
                (native_clip, "the sea"))], [
            one.decode(torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1)))
            for one in (vae, native_vae)]
    for one, reference in ((ours[0], native[0]),
                           *((ours[1][key], native[1][key]) for key in native[1] if torch.is_tensor(native[1][key]))):
        close(one.float(), reference.float(), 1e-6)
    assert ours[1].keys() == native[1].keys() >= {"pooled_output"}
    assert (ours[0].shape != other[0].shape
            or relative_error(ours[0], other[0]) > 1e-3), "the encoders' weights say nothing"
    close(*images, 1e-6)


def test_a_checkpoint_without_them_is_refused_in_words(comfyui):
    save_file({f"model.diffusion_model.{name}": tensor for name, tensor in state_dict("sd15").items()},
              str(comfyui.base / "checkpoints" / "bare.safetensors"))

    with pytest.raises(comfyui.errors.CheckpointError, match="^Load .*: bare.safetensors contains neither"):
        comfyui.nodes.NODE_CLASS_MAPPINGS["XDiTLoadClipVae"].execute("bare.safetensors")
