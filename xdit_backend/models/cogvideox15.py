"""CogVideoX 1.5: CogVideoX with tokens of two frames, and positions with a distance of 1 between rows and columns."""

import dataclasses

from .cogvideox import COGVIDEOX, is_cogvideox, rotary
from .common.family import SmallConfig
from .common.inputs import Unpacked, config_of, size

LATENT, PAIRS = Unpacked((2, 2, 2)), {"patch_size_t": 2}

COGVIDEOX15 = dataclasses.replace(
    COGVIDEOX, name="CogVideoX 1.5", title="CogVideoX 1.5", recognise=lambda shapes: is_cogvideox(shapes, 2),
    latent=LATENT, config=config_of(**COGVIDEOX.config.rules | PAIRS | {
        "in_channels": size("patch_embed.proj.weight", 1, 8), "out_channels": size("proj_out.weight", 0, 8)}),
    arguments=COGVIDEOX.arguments | {"hidden_states": LATENT, "image_rotary_emb": rotary(LATENT.patch, 1.0)},
    test_config=SmallConfig(COGVIDEOX.test_config.config | PAIRS, COGVIDEOX.test_config.native,
                            COGVIDEOX.test_config.arguments | PAIRS,
                            more={"ofs_embed_dim": 64}))
