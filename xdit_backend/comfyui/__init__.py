"""Access to ComfyUI's model classes: the only package of the backend that imports ComfyUI, and only on demand."""
