"""Worker groups across machines: encrypted connections, the host's sessions, and the program that joins a machine."""
