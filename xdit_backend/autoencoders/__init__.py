"""The supported families of VAEs, one per module. nodes/bridge/vae/vae_detection.py detects which family ComfyUI's VAE
belongs to."""

from .cogvideox import COGVIDEOX
from .cosmos import COSMOS
from .dc import DC
from .hunyuan_image import HUNYUAN_IMAGE
from .hunyuan_video import HUNYUAN_VIDEO
from .hunyuan_video15 import HUNYUAN_VIDEO15
from .kl import KL
from .ltx import LTX
from .minimax_h3 import MINIMAX_H3
from .mochi import MOCHI
from .svd import SVD
from .taehv import TAEHV
from .taesd import FLUX2_TAESD, TAESD
from .wan import WAN

# Detection uses this order: HunyuanVideo 1.5 also has HunyuanVideo's tensor names, and Flux.2's TAESD the other's.
FAMILIES = {"kl": KL, "wan": WAN, "ltx": LTX, "hunyuan_video15": HUNYUAN_VIDEO15, "hunyuan_video": HUNYUAN_VIDEO,
            "hunyuan_image": HUNYUAN_IMAGE, "mochi": MOCHI, "svd": SVD, "cogvideox": COGVIDEOX, "cosmos": COSMOS,
            "tiny_flux2": FLUX2_TAESD, "tiny": TAESD, "taehv": TAEHV,
            "minimax_h3": MINIMAX_H3, "dc": DC}


def family_of(vae):
    """The family of an autoencoder, by its class; None if there is none."""
    names = {cls.__name__ for cls in type(vae).__mro__}
    return next((family for family in FAMILIES.values() if family.class_name in names), None)


def supported(last="and"):
    """Names of the models whose VAEs are supported, for messages."""
    names = [name for family in FAMILIES.values() for name in family.models]
    return f"{', '.join(names[:-1])} {last} {names[-1]}"
