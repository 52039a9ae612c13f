"""What python -m xdit_backend bench runs: a command a file, and what they share."""
