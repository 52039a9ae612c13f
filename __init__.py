"""xDiT for ComfyUI: one diffusion transformer on all the GPUs a person has. ComfyUI calls comfy_entrypoint."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from comfy_api.latest import ComfyExtension

    from .nodes import NODES

    class XDiTExtension(ComfyExtension):
        async def get_node_list(self):
            return NODES

    return XDiTExtension()
