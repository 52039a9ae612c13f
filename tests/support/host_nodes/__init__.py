"""Nodes for the tests and the demo only: random conditioning in place of text encoders that would be gigabytes."""

import torch

TEXT_CHANNELS = {"sd3": 96, "flux": 64, "wan": 4096, "pixart": 96}
POOLED_CHANNELS = {"sd3": 64, "flux": 32}


class XDiTTestConditioning:
    """CONDITIONING of a family's width, random from a seed."""

    CATEGORY, FUNCTION, RETURN_TYPES = "xDiT/tests", "make", ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0, "min": 0, "max": 2 ** 31}),
                             "tokens": ("INT", {"default": 20, "min": 1, "max": 4096}),
                             "family": (list(TEXT_CHANNELS),)}}

    def make(self, seed, tokens, family):
        generator = torch.Generator().manual_seed(seed)
        options = {}
        text = torch.randn(1, tokens, TEXT_CHANNELS[family], generator=generator)
        if family in POOLED_CHANNELS:
            options["pooled_output"] = torch.randn(1, POOLED_CHANNELS[family], generator=generator)
        return ([[text, options]],)


NODE_CLASS_MAPPINGS = {"XDiTTestConditioning": XDiTTestConditioning}
NODE_DISPLAY_NAME_MAPPINGS = {"XDiTTestConditioning": "Random Conditioning (tests)"}
