"""The host's side: starts a worker group, and asks it for predictions and pictures."""
