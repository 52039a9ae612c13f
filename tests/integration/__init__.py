"""Tests of the nodes in a ComfyUI of this process. A package, so that its fixtures end with it."""
