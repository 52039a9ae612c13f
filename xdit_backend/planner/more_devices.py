"""The number of devices on which a run would fit, for error messages. Arithmetic only."""

from ..protocol.specs import Stages
from .cost_model import Degrees
from .memory_model import rank_memory
from .planner import memory_settings, tensor_degrees

MOST_SUGGESTED = 16                        # larger numbers of devices are not suggested


def stages_that_fit(config, dims, job, device_bytes):
    """The lowest pipefusion_degree with which a run would fit on as many devices of this memory; None: none does."""
    stages = Stages(2, offload=config.offload_keys_values)
    settings = memory_settings(config, stages)
    return next((degree for degree in range(2, dims.blocks + 1)
                 if rank_memory(dims, job, Degrees(pipefusion=degree, num_patches=2 * degree), settings).total
                 <= device_bytes), None)


def tensor_degree_that_fits(dims, job, device_bytes):
    """The lowest tensor_degree with which a run would fit, as stages_that_fit."""
    return next((degree for degree in tensor_degrees(dims)
                 if rank_memory(dims, job, Degrees(tensor=degree)).total <= device_bytes), None)


def placement_that_fits(config, dims, refused, job, device_bytes):
    """[text] with the degree, and thus the number of devices of this memory, with which a run would fit; [] if it is
    above MOST_SUGGESTED. Only exact methods if config allows no others. dims: None: U-Net. refused: methods that the
    family does not support."""
    if dims is None:
        return []
    if config.may_differ and "pipefusion" not in refused:
        name, degree = "pipefusion_degree", stages_that_fit(config, dims, job, device_bytes)
    elif "tensor" in refused:
        return []
    else:
        name, degree = "tensor_degree", tensor_degree_that_fits(dims, job, device_bytes)
    return [f"{name}={degree} on as many devices like these"] if degree and degree <= MOST_SUGGESTED else []
