"""A pack without nodes, whose page opens the demo's graph. Used by demo.py."""

NODE_CLASS_MAPPINGS: dict = {}
WEB_DIRECTORY = "./web"
