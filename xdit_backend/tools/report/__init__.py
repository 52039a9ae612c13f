"""The command python -m xdit_backend report: checks and times of this machine's devices, in a file to publish."""
