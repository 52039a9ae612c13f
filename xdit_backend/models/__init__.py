"""The families this project runs: a dict, one entry a file."""

from .flux import FLUX
from .pixart import PIXART
from .sd3 import SD3
from .wan import WAN

FAMILIES = {family.name: family for family in (SD3, FLUX, WAN, PIXART)}
