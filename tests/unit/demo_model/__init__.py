"""Tests of the demo model and of the script that trains it."""
