"""The MODEL of Load xDiT Model: a file or folder comes in, ComfyUI's own MODEL without weights goes out,
and what nodes put on it."""
