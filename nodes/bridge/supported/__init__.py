"""What a workflow may ask for: what it put on a MODEL, a latent or a prompt comes in;
it is honoured, or refused by its name."""
