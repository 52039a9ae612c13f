"""The parallel methods: sequence parallelism (Ulysses and Ring), PipeFusion, displaced patches, tensor parallelism,
and the VAE split into rows or tiles."""
