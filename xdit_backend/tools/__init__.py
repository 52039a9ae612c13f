"""Developer tools: benchmarks and the dry run."""
