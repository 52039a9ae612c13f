"""Installation of the hooks that run the parallel methods in a loaded model."""

from .replicated_unet import ReplicatedHooks
from .transformer import Hooks
from .unet import UNetHooks

HOOKS = {"transformer": Hooks, "unet": UNetHooks, "replicated": ReplicatedHooks}


def install_hooks(model, plan, **options):
    """Install the hooks of a plan on a model, and return them. options: splits, offloaded and on_compile of
    ModelHooks."""
    return HOOKS[plan.hooks](model, plan, **options)
