"""Weight placement of a model on its devices: by the user's degrees, or by estimates."""

from ....xdit_backend.checkpoints.tensor_sharding import possible_splits
from ....xdit_backend.config import refuse_methods, validate_layout, validate_stages
from ....xdit_backend.memory.system_memory import pages_of
from ....xdit_backend.planner.planner import EVERYWHERE, Devices, choose_placement, placement_for_speed, usual_branches
from ....xdit_backend.protocol.devices import devices_per_machine
from ..workers.memory_checks import has_own_memory
from ..workers.worker_groups import GROUPS, show_text


def placement_of(config, devices, device_bytes, checkpoint, dims, model, compute_dtype):
    """Return the WeightPlacement. Raises ConfigError for degrees of manual mode that cannot work for this model.

    device_bytes: memory of each device. dims: None for a U-Net. model: diffusers', on the meta device. With the
    measured Machine, workers also split work by the speed of each device. In auto mode it is measured now if there are
    several machines, if the image may differ for speed, or if weights may have to be offloaded. Stages chosen for speed
    are shown on the node, with their gain.
    """
    family = checkpoint.family
    if config.mode == "manual":
        refuse_methods(config.layout, family.refused, family.name, family.plan.methods)
        validate_layout(config.layout, family.num_heads(checkpoint.config), family.name,
                        family.num_key_heads(checkpoint.config))
        if family.blocks:
            validate_stages(config, family.num_blocks(checkpoint.config), family.name)
    per_machine, is_auto = devices_per_machine(devices), config.mode == "auto" and dims is not None
    streamed = (is_auto and config.weights_memory_bytes is None and all(map(has_own_memory, devices))
             and not Devices(device_bytes).holds(dims))
    machine = (GROUPS.machine(devices, compute_dtype, may_measure=streamed or is_auto and (
        per_machine > 0 or config.approximate == "for speed")) if len(devices) > 1 else None)
    if dims is None:
        return EVERYWHERE
    if machine is not None:
        machine = machine.exchanging(config.exchange).reading(pages_of(checkpoint.files))
    known, branches = Devices(device_bytes, per_machine, machine), usual_branches(checkpoint.config)
    faster = None if "pipefusion" in family.refused else placement_for_speed(config, dims, known, branches)
    if faster is not None:
        show_text(faster.words)
        return faster.placement
    return choose_placement(config, dims, known,
                         lambda degree: "tensor" not in family.refused and possible_splits(model, family.plan, degree),
                         "pipefusion" not in family.refused, branches,
                         all(map(has_own_memory, devices)))
