"""Load CLIP and VAE: the text encoders and the VAE of an all-in-one checkpoint, without its diffusion model."""

import comfy.sd
import folder_paths
from comfy_api.latest import io

from ..xdit_backend.protocol.errors import CheckpointError
from .bridge.compatibility.input_checks import check_links


class XDiTLoadClipVae(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTLoadClipVae",
            display_name="Load CLIP and VAE",
            category="xDiT",
            description="Loads the text encoders and the VAE of an all-in-one checkpoint. Load xDiT Model loads its "
                        "diffusion model.",
            search_aliases=["checkpoint", "sdxl", "sd1.5", "load checkpoint"],
            inputs=[
                io.Combo.Input("ckpt_name", options=folder_paths.get_filename_list("checkpoints"),
                               tooltip="The checkpoint to load, the same as in Load xDiT Model."),
            ],
            outputs=[io.Clip.Output(), io.Vae.Output()],
        )

    @classmethod
    def execute(cls, ckpt_name) -> io.NodeOutput:
        check_links(ckpt_name=ckpt_name)
        path = folder_paths.get_full_path_or_raise("checkpoints", ckpt_name)
        _, clip, vae, _ = comfy.sd.load_checkpoint_guess_config(
            path, output_model=False, embedding_directory=folder_paths.get_folder_paths("embeddings"))
        if clip is None and getattr(vae, "first_stage_model", None) is None:
            raise CheckpointError("Load the text encoder and the VAE from separate files, with Load CLIP and Load VAE: "
                                  f"{ckpt_name} contains neither.")
        return io.NodeOutput(clip, vae)
