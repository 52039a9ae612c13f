"""HTTP routes and state of the panel, as plain values for JSON."""
