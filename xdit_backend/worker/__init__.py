"""Worker process: one rank of a group, started by torchrun, which executes the host's commands on its device."""
