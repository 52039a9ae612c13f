"""The parallel methods, one file each: USP (Ulysses and Ring), PipeFusion, tensor, displaced patches, NAG,
the VAE by rows."""
