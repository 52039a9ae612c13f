"""The demo model: a small text-to-image model for first images and quality measurements, and its training code."""
