"""VAE decode and encode on the workers."""
