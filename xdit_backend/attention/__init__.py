"""Attention on one rank: backends, log-sum-exp merge, masks."""
