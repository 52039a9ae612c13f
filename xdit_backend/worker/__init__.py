"""One worker: a process of the group, started by torchrun, that carries out the host's commands on its device."""
