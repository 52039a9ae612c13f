"""All that knows ComfyUI's internals: the shell MODEL, CFG branches, VAE weights, progress, the worker groups in use."""
