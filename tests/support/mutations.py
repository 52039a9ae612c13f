"""ComfyUI's classes with a line of their source changed, as another version of ComfyUI has them."""

import inspect
import textwrap


def mutate(monkeypatch, owner, name, old, new):
    """Replace `old` by `new` in the source of a method of a class, or of a function of a module, for a test. Skips
    where this ComfyUI has no such line."""
    import pytest
    function = vars(owner)[name]
    function = getattr(function, "__func__", function)
    source = textwrap.dedent(inspect.getsource(function))
    if old not in source:
        pytest.skip(f"{owner.__name__}.{name} of this ComfyUI is another one")
    assert source.count(old) == 1, f"{owner.__name__}.{name} has {source.count(old)} times: {old}"
    names = {"__class__": owner}
    exec(compile(source.replace(old, new), f"mutated {name}", "exec"), function.__globals__, names)
    monkeypatch.setattr(owner, name, names[name])
