"""What a test on a GPU leaves free for the next one, and for those beside it."""

import pytest


@pytest.fixture(autouse=True)
def memory_given_back():
    """torch keeps what was freed, of which other processes' tests have need."""
    yield
    import torch
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
