"""Where diffusers' unmodified forward meets the methods:
hooks on a transformer and on a U-Net, and what a forward knows."""
