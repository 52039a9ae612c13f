"""Block and layer offloading."""
