"""Which values of a parameter the quick tier runs. Used by tests whose whole matrix takes minutes."""

import pytest


def quick(chosen, values):
    """Parameters for all of `values`; those that are not chosen are marked slow. chosen: (value) -> bool, or the values."""
    is_chosen = chosen if callable(chosen) else lambda value: value in chosen
    return [value if is_chosen(value) else pytest.param(value, marks=pytest.mark.slow) for value in values]
