"""Exactness of the collectives' order under a referee that is stricter than NCCL."""
