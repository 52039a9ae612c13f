"""The parallel methods, one file each, and the hooks that apply them to a diffusers model."""
