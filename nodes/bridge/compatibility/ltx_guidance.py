"""Guidance of ComfyUI's nodes for LTX-2, each by one more call per step: without attention between video and audio
(LTXVModalityGuidance), or with the values in place of self-attention in some blocks (LTXVSpatioTemporalGuidance).

Keys of transformer_options tell ComfyUI's class of such a call. Other models of ComfyUI ignore them.
"""

import os

import torch

from ....xdit_backend.models.ltx2_audio import ISOLATED
from ....xdit_backend.protocol.errors import UnsupportedError

CROSS, BLOCKS = ("a2v_cross_attn", "v2a_cross_attn"), "stg_self_attn_blocks"
FILE, FUNCTION = "nodes_lt.py", ".execute.<locals>.post_cfg_function"
NODES = {"LTXVModalityGuidance": CROSS[0], "LTXVSpatioTemporalGuidance": BLOCKS}


def ignored_guidance(family, functions):
    """Names of these nodes among post-CFG functions of a MODEL whose extra calls ComfyUI's model of the family
    ignores."""
    found = {function.__qualname__ for function in functions
             if hasattr(function, "__code__") and os.path.basename(function.__code__.co_filename) == FILE}
    options = family.inputs.components.options
    return [node for node, key in NODES.items() if key not in options and node + FUNCTION in found]


def isolation_of(family, transformer_options):
    """Conditioning of a call without attention between video and audio, {ISOLATED: tensor}; {} for others. Raises
    UnsupportedError for a call without one direction only."""
    has = {transformer_options.get(key, True) is not False for key in CROSS if key in family.inputs.components.options}
    if len(has) > 1:
        raise UnsupportedError(f"Set both of {' and '.join(CROSS)} in the node that sets one of them, or use Load "
                               f"Diffusion Model: xDiT runs {family.name} with attention between video and audio in "
                               "both directions, or in neither.")
    return {ISOLATED: torch.zeros(1)} if has == {False} else {}


def value_blocks(family, transformer_options):
    """Numbers of the blocks whose self-attention gives the values in this call."""
    return transformer_options.get(BLOCKS, ()) if BLOCKS in family.inputs.components.options else ()
