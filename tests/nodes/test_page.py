"""What the page is told of files before it converts a workflow: read from headers, as the nodes would say it."""

import importlib
import json
import struct

import torch


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


def test_files_that_the_workers_cannot_have_are_named_with_the_reason(comfyui):
    from comfy.ldm.hunyuan_video.vae_refiner import Decoder, Encoder
    settings = {"block_out_channels": [128, 256, 512, 1024, 1024], "in_channels": 3, "out_channels": 3, "num_res_blocks": 2,
                "z_channels": 32, "ffactor_spatial": 16, "ffactor_temporal": 4,
                "downsample_match_channel": True, "upsample_match_channel": True}
    with torch.device("meta"):                                 # HunyuanVideo 1.5's
        halves = {"encoder": Encoder(**settings), "decoder": Decoder(**settings)}
    shapes = {f"{half}.{name}": tuple(tensor.shape) for half, module in halves.items() for name, tensor in module.state_dict().items()}
    write_header(comfyui.base / "vae" / "hunyuan15.safetensors", shapes)
    names = [comfyui.file(kind, folder="vae") for kind in ("vae-sd", "vae-wan", "vae-ltx", "vae-taesd")]
    (comfyui.base / "diffusion_models" / "text.safetensors").write_bytes(b"no model")
    page = importlib.import_module(f"{comfyui.pack.__name__}.nodes.bridge.page")

    found = page.refusals(["text.safetensors", comfyui.file("sd3"), "absent.safetensors"], ["hunyuan15.safetensors", *names, "absent"])

    assert set(found["models"]) == {"text.safetensors"} and "not a safetensors file" in found["models"]["text.safetensors"]
    assert set(found["vaes"]) == {"hunyuan15.safetensors"} and "AutoencodingEngine" in found["vaes"]["hunyuan15.safetensors"]
