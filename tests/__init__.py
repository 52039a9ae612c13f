"""The tests. Files mirror the rooms of the project."""
