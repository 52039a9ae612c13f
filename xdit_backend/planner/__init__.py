"""Estimates of time and memory for any layout, and the automatic choice of a layout. Arithmetic only."""
