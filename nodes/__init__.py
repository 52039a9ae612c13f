"""ComfyUI nodes, one module per node."""

from .class_label import XDiTClassLabel
from .demo_prompt import XDiTDemoPrompt
from .load_clip_vae import XDiTLoadClipVae
from .load_model import XDiTLoadModel
from .parallel_config import XDiTParallelConfig
from .parallel_sampler import XDiTParallelSampler
from .upscale_image import XDiTUpscaleImage
from .vae_decode import XDiTVAEDecode
from .vae_encode import XDiTVAEEncode

NODES = [XDiTLoadModel, XDiTParallelConfig, XDiTParallelSampler, XDiTVAEDecode, XDiTVAEEncode, XDiTUpscaleImage,
         XDiTLoadClipVae, XDiTClassLabel, XDiTDemoPrompt]
