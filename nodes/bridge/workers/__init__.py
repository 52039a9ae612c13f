"""The worker groups in use, and the memory they take: what ComfyUI's memory manager and a person's settings ask comes
in."""
