"""Wrappers of the diffusion model that nodes have put into a MODEL, which ComfyUI's own models call. Used by
remote_model.py."""

from comfy.patcher_extension import WrapperExecutor, WrappersMP, get_all_wrappers


def wrappers_inside(net, family, transformer_options):
    """Those of a call, where the forward of ComfyUI's class calls them; of a family that ComfyUI has not, all."""
    forwards = [vars(class_)["forward"] for class_ in type(net).__mro__ if "forward" in vars(class_)]
    calls_wrappers = (family.sampled
                      or any(WrapperExecutor.__name__ in forward.__code__.co_names for forward in forwards))
    return get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options) if calls_wrappers else []
