"""A run of a MODEL: ComfyUI's calls of its diffusion model come in, and go to the workers whole,
by branches or by patches."""
