"""MODEL of Load xDiT Model: from a checkpoint to ComfyUI's MODEL without weights, and its weight patches."""
