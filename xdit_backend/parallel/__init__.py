"""The parallel methods, one file each, and the seams that apply them to a diffusers model."""
