"""xDiT for ComfyUI: run one diffusion model on several GPUs. ComfyUI calls comfy_entrypoint."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    import folder_paths
    from comfy_api.latest import ComfyExtension

    from .nodes import NODES
    from .xdit_backend.demo_model.text import WEIGHTS

    # list the bundled demo model in the loader nodes
    for kind in ("diffusion_models", "vae"):
        folder_paths.add_model_folder_path(kind, str(WEIGHTS / kind))

    class XDiTExtension(ComfyExtension):
        async def on_load(self):
            from nodes import NODE_CLASS_MAPPINGS
            from server import PromptServer

            from .nodes.bridge.server.routes import add_routes
            from .nodes.bridge.workers.worker_groups import warn_of_missing_packages
            warn_of_missing_packages()
            # there is no instance when ComfyUI only inspects the nodes
            if getattr(PromptServer, "instance", None) is not None:
                add_routes(PromptServer.instance, NODE_CLASS_MAPPINGS)

        async def get_node_list(self):
            return NODES

    return XDiTExtension()
