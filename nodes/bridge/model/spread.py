"""How a model's weights are spread over devices: by a person's degrees, or as forecasts say. Asked by shell.py."""

from ....xdit_backend.checkpoints.shares import possible_splits
from ....xdit_backend.config import refuse_methods, validate_layout, validate_stages
from ....xdit_backend.forecast.planner import EVERYWHERE, Devices, choose_spread, usual_branches
from ....xdit_backend.protocol.devices import devices_per_machine
from ..workers.groups import GROUPS
from ..workers.memory_checks import has_own_memory


def spread_of(config, devices, device_bytes, checkpoint, net, model, compute_dtype):
    """The Spread. Raises ConfigError for degrees of manual mode that cannot work for this model.

    device_bytes: memory of each device. net: None of a U-Net. model: diffusers', on the meta device. GROUPS.machine
    also has the workers divide work by how fast each device is, where that was measured; in auto mode with several
    machines it is measured now.
    """
    family = checkpoint.family
    if config.mode == "manual":
        refuse_methods(config.layout, family.refused, family.name)
        validate_layout(config.layout, family.num_heads(checkpoint.config), family.name,
                        family.num_key_heads(checkpoint.config))
        if not family.is_unet:
            validate_stages(config, family.num_blocks(checkpoint.config), family.name)
    per_machine, is_auto = devices_per_machine(devices), config.mode == "auto" and not family.is_unet
    machine = (GROUPS.machine(devices, compute_dtype, may_measure=per_machine > 0 and is_auto) if len(devices) > 1
               else None)
    if family.is_unet:
        return EVERYWHERE
    return choose_spread(config, net, Devices(device_bytes, per_machine, machine),
                         lambda degree: "tensor" not in family.refused and possible_splits(model, family.plan, degree),
                         "pipefusion" not in family.refused, usual_branches(checkpoint.config),
                         all(map(has_own_memory, devices)))
