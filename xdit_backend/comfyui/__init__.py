"""ComfyUI's own modules as transformers: the one room of the backend that imports ComfyUI, and only when a family asks
for a class of it."""
