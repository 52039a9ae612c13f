"""CogVideoX 1.5: CogVideoX with tokens of two frames, and positions with a distance of 1 between rows and columns."""

import dataclasses

from .cogvideox import COGVIDEOX, is_cogvideox, rotary
from .common.family import SmallConfig
from .common.inputs import Unpacked, config_of, size

LATENT, PAIRS = Unpacked((2, 2, 2)), {"patch_size_t": 2}

COGVIDEOX15 = dataclasses.replace(
    COGVIDEOX, name="CogVideoX 1.5", title="CogVideoX 1.5",
    detection=dataclasses.replace(
        COGVIDEOX.detection,
        recognise=lambda shapes: is_cogvideox(shapes, 2),
        config=config_of(**COGVIDEOX.detection.config.rules | PAIRS | {
            "in_channels": size("patch_embed.proj.weight", 1, 8), "out_channels": size("proj_out.weight", 0, 8)})),
    inputs=dataclasses.replace(
        COGVIDEOX.inputs,
        latent=LATENT,
        arguments=COGVIDEOX.inputs.arguments | {"hidden_states": LATENT,
                                                "image_rotary_emb": rotary(LATENT.patch, 1.0)}),
    testing=SmallConfig(COGVIDEOX.testing.config | PAIRS, COGVIDEOX.testing.native,
                        COGVIDEOX.testing.arguments | PAIRS,
                        more={"ofs_embed_dim": 64}))
