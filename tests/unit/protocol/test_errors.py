"""How errors are called where a person sees them, and that they travel between processes all the same."""

import pickle

import pytest

from xdit_backend.protocol import errors

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.XDiTError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_has_a_short_name_and_can_be_pickled(kind):
    """ComfyUI's page writes module and name before the message."""
    again = pickle.loads(pickle.dumps(kind("a message")))

    assert f"{kind.__module__}.{kind.__qualname__}" == f"xDiT.{kind.__name__}"
    assert type(again) is kind and str(again) == "a message"
