"""For models of videos whose diffusers class takes frames before channels, where ComfyUI has channels first."""


def frames_first(model, config):
    """A rule for Family.amend: its forward takes, and gives, (B, C, F, rows, columns)."""
    forward = model.forward
    model.forward = lambda *, hidden_states, **inputs: tuple(
        output.transpose(1, 2) for output in forward(hidden_states=hidden_states.transpose(1, 2), **inputs))
