"""Decode and encode: ComfyUI's VAE and a latent or a picture come in, the workers' result goes out."""
