"""The part of xDiT that knows nothing of ComfyUI: launcher, client, protocol, workers, parallel methods, models."""
