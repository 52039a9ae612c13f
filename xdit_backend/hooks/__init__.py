"""Hooks that run the parallel methods inside a model's unmodified forward, and the context that they share."""
