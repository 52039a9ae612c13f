"""What gives another picture than one device's, and is refused where that is not allowed. Asked by config.py."""

from .displaced_modes import AUTO, MODES
from .errors import ConfigError
from .exchanges import WHOLE


def refuse_approximate(config):
    """Refuse degrees of manual mode that give another picture than one device's, where that is not allowed."""
    if config.may_differ:
        return
    if config.pipefusion_degree > 1 and config.num_patches != 1:
        raise ConfigError("Set num_patches to 1, with which stages wait for each other, use tensor_degree, or set "
                          f'approximate to allowed: approximate="{config.approximate}" and '
                          f"pipefusion_degree={config.pipefusion_degree}, whose patches use keys and values of the "
                          "step before.")
    if config.displaced_degree > 1 and (config.displaced_mode == AUTO or MODES[config.displaced_mode].is_stale):
        raise ConfigError("Set displaced_mode to full_sync, or approximate to allowed: "
                          f'approximate="{config.approximate}" and displaced_degree={config.displaced_degree}, and '
                          f"in the mode {config.displaced_mode} devices use rows of the step before.")


def refuse_rounded_exchange(config):
    """Refuse tensors that are rounded as they travel, where the picture may not differ."""
    if not config.may_differ and config.exchange != WHOLE:
        raise ConfigError(f'Set exchange to {WHOLE}, or approximate to allowed: approximate="{config.approximate}" and '
                          f'exchange="{config.exchange}", which rounds what devices send each other to 8 bits.')
