"""The model description API: families, model plans, and rules for files, names, positions and arguments."""
