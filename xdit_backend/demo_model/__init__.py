"""The demo model: a small text-to-image model for first pictures and quality measurements,
and the script that made it."""
