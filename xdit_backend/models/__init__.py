"""Registry of the supported model families: a dict with one entry per file."""

from .ace_step import ACE_STEP
from .ace_step15 import ACE_STEP15
from .anima import ANIMA
from .anyflow import ANYFLOW
from .auraflow import AURAFLOW
from .boogu import BOOGU
from .chroma import CHROMA
from .chroma_radiance import CHROMA_RADIANCE
from .cogvideox import COGVIDEOX
from .cogvideox15 import COGVIDEOX15
from .cogvideox_i2v import COGVIDEOX_I2V
from .cosmos import COSMOS
from .cosmos1 import COSMOS1
from .dit import DIT
from .ernie import ERNIE
from .flux import FLUX
from .flux2 import FLUX2
from .hidream import HIDREAM
from .hidream_o1 import HIDREAM_O1
from .hunyuan3d import HUNYUAN3D
from .hunyuan3d21 import HUNYUAN3D21
from .hunyuan_dit import HUNYUAN_DIT
from .hunyuan_image import HUNYUAN_IMAGE
from .hunyuan_image_distilled import HUNYUAN_IMAGE_DISTILLED
from .hunyuan_image_refiner import HUNYUAN_IMAGE_REFINER
from .hunyuan_video import HUNYUAN_VIDEO
from .hunyuan_video15 import HUNYUAN_VIDEO15
from .hunyuan_video15_distilled import HUNYUAN_VIDEO15_DISTILLED
from .ideogram4 import IDEOGRAM4
from .joyimage import JOYIMAGE
from .kandinsky5 import KANDINSKY5
from .kandinsky5_image import KANDINSKY5_IMAGE
from .krea2 import KREA2
from .latte import LATTE
from .lens import LENS
from .longcat import LONGCAT
from .ltx import LTX
from .ltx2 import LTX2
from .lumina2 import LUMINA2
from .mage_flow import MAGE_FLOW
from .minimax_h3 import MINIMAX_H3
from .minimax_music3 import MINIMAX_MUSIC3
from .mochi import MOCHI
from .newbie import NEWBIE
from .omnigen2 import OMNIGEN2
from .ovis import OVIS
from .pid import PID
from .pixart import PIXART
from .pixart_alpha import PIXART_ALPHA
from .pixeldit import PIXELDIT
from .qwen_image import QWEN_IMAGE
from .sana import SANA
from .sana_video import SANA_VIDEO
from .sd2 import SD2
from .sd3 import SD3
from .sd15 import SD15
from .sd_x4 import SD_X4
from .sdxl import SDXL
from .seedvr2 import SEEDVR2
from .stable_audio import STABLE_AUDIO
from .stable_audio3 import STABLE_AUDIO3
from .stable_cascade_b import STABLE_CASCADE_B
from .stable_cascade_c import STABLE_CASCADE_C
from .svd import SVD
from .triposplat import TRIPOSPLAT
from .wan import WAN
from .wan_animate import WAN_ANIMATE
from .wan_animate2 import WAN_ANIMATE2
from .wan_camera import WAN_CAMERA
from .wan_dancer import WAN_DANCER
from .wan_fun import WAN_FUN
from .wan_humo import WAN_HUMO
from .wan_s2v import WAN_S2V
from .wan_scail import WAN_SCAIL
from .wan_scail2 import WAN_SCAIL2
from .wan_vace import WAN_VACE
from .z_image import Z_IMAGE
from .z_image_omni import Z_IMAGE_OMNI
from .z_image_pixel import Z_IMAGE_PIXEL

FAMILIES = {family.name: family for family in (
    SD3, FLUX, FLUX2, CHROMA, CHROMA_RADIANCE, LONGCAT, OVIS, WAN_ANIMATE2, WAN, WAN_VACE, PIXART, PIXART_ALPHA,
    QWEN_IMAGE, Z_IMAGE_OMNI, Z_IMAGE, LUMINA2, ERNIE, KREA2,
    HIDREAM, HUNYUAN_IMAGE, AURAFLOW, HUNYUAN_DIT, HUNYUAN_VIDEO, HUNYUAN_VIDEO15, LTX, LTX2, COSMOS, ANIMA, KANDINSKY5,
    KANDINSKY5_IMAGE, MOCHI, MINIMAX_H3, MINIMAX_MUSIC3, COGVIDEOX, COGVIDEOX15, DIT, SANA, LATTE, SD15, SD2, SD_X4,
    SDXL, SVD, STABLE_CASCADE_C, STABLE_CASCADE_B,
    COSMOS1, OMNIGEN2, BOOGU, LENS, IDEOGRAM4, JOYIMAGE, MAGE_FLOW, WAN_CAMERA, WAN_HUMO, WAN_ANIMATE, WAN_SCAIL,
    WAN_SCAIL2, WAN_S2V, WAN_DANCER, STABLE_AUDIO, STABLE_AUDIO3, ACE_STEP, ACE_STEP15, HUNYUAN3D, HUNYUAN3D21,
    Z_IMAGE_PIXEL, PIXELDIT, PID, HUNYUAN_IMAGE_REFINER, NEWBIE, TRIPOSPLAT, HIDREAM_O1,
    HUNYUAN_VIDEO15_DISTILLED, HUNYUAN_IMAGE_DISTILLED, ANYFLOW, WAN_FUN, SEEDVR2,
    COGVIDEOX_I2V, SANA_VIDEO)}


def supported(last="and"):
    """List the titles of the supported models, for messages to users."""
    titles = [family.title for family in FAMILIES.values()]
    return f"{', '.join(titles[:-1])} {last} {titles[-1]}"
