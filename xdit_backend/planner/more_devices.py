"""On how many devices a run would fit that these have no room for: what refusals say. Pure arithmetic. Asked by the
bridge and the benches."""

from ..protocol.specs import Stages
from .cost_model import Degrees
from .memory_model import rank_memory
from .planner import memory_settings, tensor_degrees

MOST_TOLD = 16                             # devices; who reads a refusal has not more


def stages_that_fit(config, dims, job, device_bytes):
    """The least pipefusion_degree with which this would fit on devices of this memory, of as many as there are;
    None: none does."""
    stages = Stages(2, offload=config.offload_keys_values)
    settings = memory_settings(config, stages)
    return next((degree for degree in range(2, dims.blocks + 1)
                 if rank_memory(dims, job, Degrees(pipefusion=degree, num_patches=2 * degree), settings).total
                 <= device_bytes), None)


def tensor_degree_that_fits(dims, job, device_bytes):
    """The least tensor_degree with which this would fit, as stages_that_fit."""
    return next((degree for degree in tensor_degrees(dims)
                 if rank_memory(dims, job, Degrees(tensor=degree)).total <= device_bytes), None)


def placement_that_fits(config, dims, refused, job, device_bytes):
    """On how many devices of this memory a run would fit, for a person: [text], [] where they would be more than
    MOST_TOLD; exactly, where only exact methods are allowed. net: None of a U-Net. refused: the family's."""
    if dims is None:
        return []
    if config.may_differ and "pipefusion" not in refused:
        name, degree = "pipefusion_degree", stages_that_fit(config, dims, job, device_bytes)
    elif "tensor" in refused:
        return []
    else:
        name, degree = "tensor_degree", tensor_degree_that_fits(dims, job, device_bytes)
    return [f"{name}={degree} on as many devices like these"] if degree and degree <= MOST_TOLD else []
