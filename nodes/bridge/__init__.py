"""Adapter to ComfyUI's internals: models, sampling, supported model patches, VAEs, worker groups and HTTP routes."""
