"""Load CLIP and VAE gives what Load Checkpoint gives of an all-in-one checkpoint, and loads no diffusion model."""

import pytest
import torch
from safetensors.torch import save_file

from tests.tolerances import close


@pytest.fixture(scope="module")
def checkpoint(comfyui):
    """SD 1.5's: a tiny diffusion model, a text encoder of full width and no weights but one layer's, a thin VAE."""
    import comfy.sd1_clip

    from tests.tiny_checkpoints import autoencoder, fill, state_dict
    generator = torch.Generator().manual_seed(5)
    clip = comfy.sd1_clip.SDClipModel(device="cpu", dtype=torch.float32)
    vae = autoencoder("vae-sd", encoder=True)
    for module in (clip, vae):
        fill(module, generator)
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in state_dict("sd15").items()}
    tensors |= {f"cond_stage_model.{name}": tensor for name, tensor in clip.state_dict().items() if name.startswith("transformer.")}
    tensors |= {f"first_stage_model.{name}": tensor for name, tensor in vae.state_dict().items()}
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()},
              str(comfyui.base / "checkpoints" / "all-in-one-sd15.safetensors"))
    return "all-in-one-sd15.safetensors"


@pytest.mark.slow
def test_clip_and_vae_are_those_of_load_checkpoint(comfyui, checkpoint, monkeypatch):
    import comfy.model_base
    _, native_clip, native_vae = comfyui.nodes.CheckpointLoaderSimple().load_checkpoint(checkpoint)
    made, init = [], comfy.model_base.BaseModel.__init__

    def noted(self, *args, **kwargs):
        made.append(self)
        init(self, *args, **kwargs)
    monkeypatch.setattr(comfy.model_base.BaseModel, "__init__", noted)

    clip, vae = comfyui.nodes.NODE_CLASS_MAPPINGS["XDiTLoadClipVae"].execute(checkpoint).args

    assert made == []
    with torch.inference_mode():
        prompts = [one.encode_from_tokens_scheduled(one.tokenize("a lighthouse on a cliff")) for one in (clip, native_clip)]
        pictures = [one.decode(torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))) for one in (vae, native_vae)]
    close(prompts[0][0][0], prompts[1][0][0], 1e-6)
    close(*pictures, 1e-6)


def test_a_checkpoint_without_them_is_refused_in_words(comfyui):
    from tests.tiny_checkpoints import state_dict
    save_file({f"model.diffusion_model.{name}": tensor for name, tensor in state_dict("sd15").items()},
              str(comfyui.base / "checkpoints" / "bare.safetensors"))

    with pytest.raises(comfyui.errors.CheckpointError, match="bare.safetensors holds no text encoder and no VAE"):
        comfyui.nodes.NODE_CLASS_MAPPINGS["XDiTLoadClipVae"].execute("bare.safetensors")
