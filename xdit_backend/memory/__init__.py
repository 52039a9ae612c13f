"""System RAM, pinned staging buffers, the copy thread, and NUMA placement."""
