"""Sampling: ComfyUI's calls of its diffusion model are run by the workers, per batch, per CFG branch or per patch."""
