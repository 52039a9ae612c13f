"""All that knows ComfyUI's internals, in rooms: the MODEL (model), a run of it (run), what a workflow may ask for
(supported), VAEs (vae), the worker groups and their memory (workers), and the page (page). Each says at its head what
comes in and what goes out."""
