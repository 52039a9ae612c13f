"""The worker groups in use, and the memory they take, as ComfyUI's memory manager and a person's settings ask for
it."""
