"""Unit tests; the folders mirror xdit_backend/."""
