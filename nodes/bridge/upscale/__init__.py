"""Upscale models on the workers."""
