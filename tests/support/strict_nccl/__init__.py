"""A simulation of NCCL on CPUs: its order of operations, without any of gloo's leniency."""
