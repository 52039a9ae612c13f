"""A dry run of one rank: the workers' code on fake tensors, which have shapes but no values, and fake process
groups."""
