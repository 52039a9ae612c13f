"""The commands of python -m xdit_backend bench, one per file, and their shared code."""
