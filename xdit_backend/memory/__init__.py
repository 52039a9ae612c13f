"""System RAM, pinned staging, the copy thread, NUMA."""
