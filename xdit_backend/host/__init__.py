"""Host side of the worker group: starts it and requests predictions, decoded images and latents from it."""
