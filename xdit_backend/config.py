"""ParallelConfig: devices, degrees and options of a worker group, and their validation."""

import dataclasses
import itertools
import math
import re
from dataclasses import dataclass

from .protocol.devices import resolve_devices
from .protocol.errors import ConfigError
from .protocol.specs import (
    ATTENTIONS,
    AUTO,
    EXCHANGES,
    METHODS_OF_SPARSE,
    MODES,
    SINKS,
    WHOLE,
    ForwardOptions,
    Layout,
    SparseOptions,
)

WARMUPS = ("auto", "whole", "micro_batches", "sequence")
DEGREES = tuple(field.name for field in dataclasses.fields(Layout))
APPROXIMATE = ("allowed", "not allowed", "for speed")
DISPLACED_MODES = (AUTO, *MODES)
COMPILE_AUTO = "auto"                      # blocks, if that is estimated to save more time than compiling takes
COMPILES = "off", "blocks", COMPILE_AUTO
DENSE = "off"                              # of sparse_attention
SPARSE_ATTENTIONS = DENSE, *METHODS_OF_SPARSE
# sparse_settings: lowest and highest number
SPARSE_RANGES = {"tau": (0, 4), "keep_percent": (0.5, 95), "start_percent": (0, 1), "end_percent": (0, 1),
                 "min_tokens": (0, 2 ** 20)}
BLOCK_RANGE = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?")
ALL_ON_DEVICE = "all on the device"
WEIGHTS_MEMORY = {"auto": None, ALL_ON_DEVICE: 0}      # keywords of weights_memory, and their value in bytes
FORMER_DEFAULTS = {"displaced_mode": "corrected_async_gn"}     # stored in older workflows without the user's choice
KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
MAX_SHOWN = 60                             # characters of a value of the wrong type that an error quotes
MAX_DIGITS = 9                             # of a number of blocks

PIPEFUSION = ("num_patches", "stage_blocks", "warmup", "offload_keys_values")          # read by PipeFusion alone
BOTH = ("warmup_steps", "forecast_keys_values")                # read by PipeFusion and displaced patches


@dataclass(frozen=True)
class ParallelConfig:
    """Devices and degrees. The defaults run on any machine.

    devices: "auto", or torch device names separated by commas ("cuda:0,cuda:1", "cpu,cpu"); a remote device has its
    machine's name in front, "other-pc/cuda:0".
    mode: "auto" chooses the degrees for each run; "manual" uses those below, whose product is the number of devices.
    """

    devices: str = "auto"
    mode: str = "auto"
    cfg_degree: int = 1
    data_degree: int = 1
    pipefusion_degree: int = 1
    ring_degree: int = 1
    ulysses_degree: int = 1
    tensor_degree: int = 1
    num_patches: int = 0                       # 0: automatic
    warmup_steps: int = 1
    stage_blocks: str = ""                     # blocks of each stage, "20,37"; "": balanced by cost
    warmup: str = "auto"                       # how the warm-up steps run, one of WARMUPS
    offload_keys_values: bool = False          # offload stale keys and values to system RAM
    # extrapolation of stale keys and values, in units of their last change; 0: none
    forecast_keys_values: float = 0.6
    displaced_degree: int = 1
    displaced_mode: str = DISPLACED_MODES[0]   # how displaced patches synchronise, one of DISPLACED_MODES
    approximate: str = APPROXIMATE[0]          # whether results may differ from a single device's, one of APPROXIMATE
    # GB of weights resident on each device, the others being streamed in every step; "auto", or ALL_ON_DEVICE
    weights_memory: str = "auto"
    attention: str = ATTENTIONS[0]             # attention backend, one of ATTENTIONS
    compile: str = COMPILES[0]                 # whether blocks are compiled with torch.compile, one of COMPILES
    exchange: str = WHOLE                      # communication dtype of attention's tensors, one of EXCHANGES
    sparse_attention: str = DENSE              # block-sparse self-attention, one of SPARSE_ATTENTIONS
    sparse_settings: str = ""                  # fields of SparseOptions, "tau=1.5, dense_blocks=0 47-49"; "": defaults

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float) if field.type is float else field.type):
                raise ConfigError(f"Set {field.name} to {KINDS[field.type]}: "
                                  f"{field.name}={str(value)[:MAX_SHOWN]} is not.")

    @property
    def forward_options(self):
        """The ForwardOptions of these settings."""
        return ForwardOptions(compile_backend="inductor" if self.compile == "blocks" else "", exchange=self.exchange,
                              extrapolation=self.forecast_keys_values, sparse=self.sparse)

    @property
    def sparse(self):
        """The SparseOptions of these settings; None: attention is dense. Raises ConfigError for text that is not a
        list of settings."""
        if self.sparse_attention == DENSE:
            return None
        found: dict = {}
        for text in filter(None, map(str.strip, self.sparse_settings.split(","))):
            name, _, value = map(str.strip, text.partition("="))
            found[name] = _sparse_setting(name, value, text)
        return SparseOptions(self.sparse_attention, **found)

    @property
    def compiles_where_it_pays(self):
        """Whether each run decides itself if its blocks are compiled."""
        return self.compile == COMPILE_AUTO

    @property
    def num_stage_blocks(self):
        """stage_blocks as integers; (): balance the stages. Raises ConfigError if it is not a list of block counts."""
        if not self.stage_blocks.strip():
            return ()
        counts = [count.strip() for count in self.stage_blocks.split(",")]
        if not all(count.isdecimal() and len(count) <= MAX_DIGITS and int(count) > 0 for count in counts):
            raise ConfigError('Give stage_blocks one number a stage with commas, such as "20,37", or leave it empty: '
                              f'stage_blocks="{self.stage_blocks}" is not a list of block counts of at least 1.')
        return tuple(map(int, counts))

    @property
    def weights_memory_bytes(self):
        """Weights that may be resident on each device, in bytes; 0: all; None: as many as fit."""
        text = self.weights_memory.strip().lower()
        return WEIGHTS_MEMORY[text] if text in WEIGHTS_MEMORY else int(float(text.removesuffix("gb")) * 1e9)

    @property
    def idle(self):
        """A note on settings that are set but not read by this configuration's methods; "" if there are none."""
        read = self.mode == "manual" and self.displaced_degree > 1
        unused = {"pipefusion_degree": PIPEFUSION if read else (*PIPEFUSION, *BOTH),
                  "displaced_degree": () if read else ("displaced_mode",)}
        if self.mode == "manual" and self.ulysses_degree * self.ring_degree == 1:
            unused["ulysses_degree x ring_degree"] = ("exchange",)
        text = ""
        for degree, names in unused.items():
            changed = [f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self)
                     if field.name in names
                     and getattr(self, field.name) not in (field.default, FORMER_DEFAULTS.get(field.name))]
            text += f" ({', '.join(changed)} unused: {degree} is 1)" if changed else ""
        return text

    @property
    def requested_patches(self):
        """num_patches; 1 if auto mode must give exact results: with one patch no keys or values are stale."""
        return 1 if self.mode == "auto" and not self.may_differ else self.num_patches

    @property
    def cached_steps(self):
        """Steps whose stale keys and values are cached: 2 if they are extrapolated, else 1."""
        displaced = MODES.get(self.displaced_mode) if self.mode == "manual" and self.displaced_degree > 1 else None
        # auto mode never chooses a frozen mode
        frozen = displaced is not None and not (displaced.is_stale and displaced.publishes)
        return 2 if self.forecast_keys_values > 0 and not frozen else 1

    @property
    def may_differ(self):
        """True if results may differ slightly from a single device's."""
        return self.approximate != "not allowed"

    @property
    def layout(self):
        """The degrees of manual mode."""
        return Layout(**{name: getattr(self, name) for name in DEGREES})


def fitting(config, num_cuda_devices):
    """Return the valid ParallelConfig nearest to this one, before a model is known.

    Its devices are those of `config` that exist, and the product of its degrees is their number, using methods that
    `config` uses as far as possible. Raises ConfigError if there is none.
    """
    try:
        devices = resolve_devices(config.devices, num_cuda_devices, "auto")
    except ConfigError:                                        # not a list of device names
        devices = resolve_devices("auto", num_cuda_devices)
    count = len(devices)
    text = config.devices if ",".join(devices) == config.devices.replace(" ", "").lower() else ",".join(devices)
    config = dataclasses.replace(config, devices=text)

    def distance(degrees):
        """Distance from the configured degrees; ties prefer the methods that communicate least."""
        configured = [max(1, getattr(config, name)) for name in DEGREES]
        return (sum(abs(math.log2(new / old)) + (10 if new > 1 and old == 1 else 0)
                    for new, old in zip(degrees, configured)),
                [-degree for degree in degrees])

    every = sorted(_factored(count, len(DEGREES)), key=distance)
    for degrees, stage_blocks in itertools.product(every, dict.fromkeys((config.stage_blocks, ""))):
        found = dataclasses.replace(config, **dict(zip(DEGREES, degrees)), stage_blocks=stage_blocks)
        try:
            validate(found, count)
        except ConfigError:
            continue
        return found
    raise ConfigError("Set mode to auto: no degrees make these settings work here.")


def _factored(product, num_factors):
    """Yield every way to write a number as an ordered product of num_factors factors."""
    if num_factors == 1:
        yield (product,)
        return
    for first in range(1, product + 1):
        if product % first == 0:
            yield from ((first, *rest) for rest in _factored(product // first, num_factors - 1))


def validate(config, num_devices):
    """Reject settings that cannot work on this number of devices, before a model is known.

    Raises ConfigError naming the field, its value and what would work (rules of docs/design/layouts.md).
    """
    if not 0 <= config.forecast_keys_values <= 1:
        raise ConfigError("Set forecast_keys_values to a number from 0 to 1: "
                          f"forecast_keys_values={config.forecast_keys_values} is outside this range.")
    for name in DEGREES:
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"Set {name} to 1 or more, where 1 switches the method off: {name}={value} is less.")
    if config.num_patches < 0 or config.warmup_steps < 0:
        raise ConfigError(f"Set num_patches and warmup_steps to 0 or more: num_patches={config.num_patches} and "
                          f"warmup_steps={config.warmup_steps} must not be negative.")
    for name, choices in (("mode", ("auto", "manual")), ("warmup", WARMUPS), ("displaced_mode", DISPLACED_MODES),
                        ("approximate", APPROXIMATE), ("compile", COMPILES), ("attention", ATTENTIONS),
                        ("exchange", EXCHANGES), ("sparse_attention", SPARSE_ATTENTIONS)):
        value = getattr(config, name)
        if value not in choices:
            raise ConfigError(f'Set {name} to {_one_of(choices)}: {name}="{value}" is none of these.')
    check_weights_memory(config.weights_memory)
    refuse_rounded_exchange(config)
    refuse_sparse(config)
    if config.mode == "auto":
        return
    if (count := len(config.num_stage_blocks)) not in (0, config.pipefusion_degree):
        raise ConfigError("Give stage_blocks one number a stage, or leave it empty: "
                          f'stage_blocks="{config.stage_blocks}" has {count} stages, and '
                          f"pipefusion_degree={config.pipefusion_degree}.")
    if config.displaced_degree > 1 and config.pipefusion_degree > 1:
        raise ConfigError("Set displaced_degree or pipefusion_degree to 1: "
                          f"displaced_degree={config.displaced_degree} and "
                          f"pipefusion_degree={config.pipefusion_degree} both use activations of the previous step, "
                          "and together a stage's would be two steps old.")
    refuse_approximate(config)
    if config.cfg_degree > 2:
        raise ConfigError(f"Set cfg_degree to 1 or 2, as guidance has two branches: cfg_degree={config.cfg_degree} "
                          "is not supported.")
    product, text = 1, []
    for name in DEGREES:
        value = getattr(config, name)
        product *= value
        if value > 1:
            text.append(f"{name}={value}")
    if product != num_devices:
        raise ConfigError(
            f"Set mode to auto, or for example {_example(num_devices)}: the degrees ({', '.join(text) or 'all 1'}) "
            f"multiply to {product}, and there {'is 1 device' if num_devices == 1 else f'are {num_devices} devices'}.")


def refuse_sparse(config):
    """Reject block-sparse attention where it cannot be applied, or results must equal a single device's."""
    if config.sparse is None:
        return
    if not config.may_differ:
        raise ConfigError(f'Set sparse_attention to {DENSE}, or approximate to allowed: '
                          f'approximate="{config.approximate}" and sparse_attention="{config.sparse_attention}", which '
                          "changes the image.")
    if config.mode == "manual" and config.displaced_degree > 1:
        raise ConfigError(f"Set displaced_degree to 1, or sparse_attention to {DENSE}: "
                          f"displaced_degree={config.displaced_degree}, which does not run with "
                          f'sparse_attention="{config.sparse_attention}".')


def _sparse_setting(name, value, text):
    """The value of one field of SparseOptions. Raises ConfigError if it has none."""
    if name in SPARSE_RANGES:
        lowest, highest = SPARSE_RANGES[name]
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not lowest <= number <= highest or (name == "min_tokens" and number != int(number)):
            raise ConfigError(f"Set {name} in sparse_settings to a number from {lowest} to {highest}: "
                              f'sparse_settings has "{text[:MAX_SHOWN]}".')
        return int(number) if name == "min_tokens" else number
    if name == "dense_blocks":
        ranges = [BLOCK_RANGE.fullmatch(each) for each in value.split()]
        if not all(ranges):
            raise ConfigError('Set dense_blocks in sparse_settings to blocks separated by spaces, such as "0 1 47-49": '
                              f'sparse_settings has "{text[:MAX_SHOWN]}".')
        return tuple(sorted({block for each in ranges if each
                             for block in range(int(each[1]), int(each[2] or each[1]) + 1)}))
    if name == "sink_conditioning" and value in SINKS:
        return value
    if name == "sink_conditioning":
        raise ConfigError(f"Set sink_conditioning in sparse_settings to {_one_of(SINKS)}: sparse_settings has "
                          f'"{text[:MAX_SHOWN]}".')
    raise ConfigError('Give sparse_settings as "name=value" separated by commas, with the names '
                      f"{', '.join([*SPARSE_RANGES, 'dense_blocks', 'sink_conditioning'])}: sparse_settings has "
                      f'"{text[:MAX_SHOWN]}".')


def validate_sparse(config, plan, family):
    """Reject block-sparse attention for a model without self-attention over all tokens of the image. plan: its
    ModelPlan."""
    streams = [streams for list_ in plan.lists for streams in (list_.attention or {}).values()]
    if config.sparse is not None and not any("image" in names for names in streams):
        raise ConfigError(f"Set sparse_attention to {DENSE}: {family} has no self-attention over all tokens of the "
                          f'image, which sparse_attention="{config.sparse_attention}" is about.')


def check_weights_memory(weights_memory):
    """Raise ConfigError for text that is not a value of ParallelConfig.weights_memory."""
    text = weights_memory.strip().lower()
    try:
        num_bytes = float(text.removesuffix("gb")) * 1e9
    except ValueError:
        num_bytes = math.nan
    if text not in WEIGHTS_MEMORY and not 1 <= num_bytes < math.inf:
        raise ConfigError('Set weights_memory to a number of GB above 0, such as "10", to "auto" or to '
                          f'"{ALL_ON_DEVICE}": weights_memory="{weights_memory}" is none of these.')


def validate_stages(config, num_blocks, family):
    """Reject stages for which this model has too few blocks. Raises ConfigError with what would work."""
    if config.pipefusion_degree > num_blocks:
        raise ConfigError(f"Set pipefusion_degree to at most {num_blocks}: "
                          f"pipefusion_degree={config.pipefusion_degree} is more than {family}'s {num_blocks} blocks.")
    counts = config.num_stage_blocks
    if counts and sum(counts) != num_blocks:
        raise ConfigError(f"Give stage_blocks numbers that add up to {num_blocks}, or leave it empty to balance the "
                          f'stages: stage_blocks="{config.stage_blocks}" adds up to {sum(counts)}, and this {family} '
                          f"model has {num_blocks} blocks.")


def validate_layout(layout, num_heads, family, num_key_heads=None):
    """Reject a layout that this model cannot run.

    num_heads: None for a U-Net. num_key_heads: None: as many as num_heads. Raises ConfigError with what would work.
    """
    degree = layout.ulysses_degree
    if num_heads is None:
        for name in ("ulysses_degree", "ring_degree", "pipefusion_degree", "tensor_degree"):
            value = getattr(layout, name)
            if value > 1:
                raise ConfigError(f"Set {name} to 1, and use cfg_degree, data_degree or displaced_degree: "
                                  f"{name}={value} splits the tokens or blocks of a transformer, and {family} is a "
                                  "U-Net, which has no single sequence of either.")
        return
    if layout.tensor_degree > 1:
        _validate_tensor_degree(layout, num_heads, num_key_heads or num_heads, family)
    elif num_heads % degree:
        works = [d for d in range(1, num_heads + 1) if num_heads % d == 0]
        raise ConfigError(f"Set ulysses_degree to {_one_of(works)}, or use ring_degree: ulysses_degree={degree} does "
                          f"not divide {family}'s {num_heads} attention heads.")


def refuse_methods(layout, refused, family, others=("cfg", "data", "ulysses", "ring", "tensor")):
    """Reject methods that a family does not support. Raises ConfigError with what would work.

    refused: {degree, without "_degree": reason}. others: methods to suggest instead.
    """
    for name, reason in refused.items():
        value = getattr(layout, f"{name}_degree")
        if value > 1:
            left = [f"{other}_degree" for other in others if other not in refused]
            raise ConfigError(f"Set {name}_degree to 1, and use {_one_of(left)}: {name}_degree={value} is not "
                              f"supported for {family}: {reason}.")


def _validate_tensor_degree(layout, num_heads, num_key_heads, family):
    degree, ulysses_degree = layout.tensor_degree, layout.ulysses_degree
    works = [d for d in range(1, num_heads + 1) if num_heads % d == num_key_heads % d == 0]
    if degree not in works:
        heads = f"{num_heads} attention heads" + (f" and {num_key_heads} key heads" if num_key_heads != num_heads
                                                  else "")
        raise ConfigError(f"Set tensor_degree to {_one_of(works)}: tensor_degree={degree} does not divide {family}'s "
                          f"{heads}.")
    if num_heads // degree % ulysses_degree:
        works = [d for d in range(1, num_heads // degree + 1) if num_heads // degree % d == 0]
        raise ConfigError(f"Set ulysses_degree to {_one_of(works)}, or use ring_degree: "
                          f"ulysses_degree={ulysses_degree} does not divide the {num_heads // degree} of {family}'s "
                          f"{num_heads} attention heads that a rank has with tensor_degree={degree}.")


def _one_of(numbers):
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _example(num_devices):
    """Degrees for this number of devices. Without "=", which marks the widget that an error is about on the page."""
    return "all degrees 1" if num_devices == 1 else f"ulysses_degree {num_devices}"


def refuse_approximate(config):
    """Reject manual degrees whose result differs from a single device's, if that is not allowed."""
    if config.may_differ:
        return
    if config.pipefusion_degree > 1 and config.num_patches != 1:
        raise ConfigError("Set num_patches to 1, with which stages wait for each other, use tensor_degree, or set "
                          f'approximate to allowed: approximate="{config.approximate}" and '
                          f"pipefusion_degree={config.pipefusion_degree}, whose patches use keys and values of the "
                          "previous step.")
    if config.displaced_degree > 1 and (config.displaced_mode == AUTO or MODES[config.displaced_mode].is_stale):
        raise ConfigError("Set displaced_mode to full_sync, or approximate to allowed: "
                          f'approximate="{config.approximate}" and displaced_degree={config.displaced_degree}, and '
                          f"with displaced_mode {config.displaced_mode} devices use rows of the previous step.")


def refuse_rounded_exchange(config):
    """Reject 8-bit communication if results must equal a single device's."""
    if not config.may_differ and config.exchange != WHOLE:
        raise ConfigError(f'Set exchange to {WHOLE}, or approximate to allowed: approximate="{config.approximate}" and '
                          f'exchange="{config.exchange}", which rounds the tensors that devices exchange to 8 bits.')
