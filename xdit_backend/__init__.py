"""Backend of xDiT for ComfyUI, without ComfyUI: launcher, client, protocol, workers, parallel methods, models."""
