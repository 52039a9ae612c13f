"""Fixtures, tiny models, oracles and test doubles."""
