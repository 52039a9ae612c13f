"""Quantised weights: GGUF, ComfyUI's formats, int8, nf4, layerwise casting."""
