"""What a workflow may ask for: what it puts on a MODEL, a latent or a prompt is either honoured, or refused by its
name."""
