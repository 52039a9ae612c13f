"""Model patches, latents and conditioning of a workflow: each is run by the workers or rejected."""
