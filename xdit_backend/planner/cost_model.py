"""What a forecast computes with, and the seconds of one block on one rank. Pure arithmetic; run_time.py adds up a run.

A block on a rank takes as long as its device computes and waits for others, or as its host needs to launch its kernels,
whichever is longer. Rows are tokens times images. Sources: the papers that docs/design cites, published timings.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from ..protocol.specs import ALL, KEYS, WHOLE
from .quantised_matmul_memory import Product

HEAD_MULTIPLE = 32             # attention kernels pad a head's size to a multiple of this
# of a number in 8 bits, with a scale for 64 tokens of a head (distributed/fp8_communication.py)
FP8_BYTES = 1 + 4 / (64 * 128)
SMALL_PACKING = 2.5            # times what packing a tensor takes that rounding it to 8 bits and back adds
AGREED_BYTES = 4               # of a token, in float32 (docs/design/quantisation.md)
DEVICES_PER_NODE = 8           # a group that leaves its node goes by the network


@dataclass(frozen=True)
class ModelDims:
    """A diffusion transformer, as its config says. dims_of in checkpoints/model_dims.py derives it for the families."""

    blocks: int
    width: int
    heads: int
    elements: float                        # of the matrices that an image token passes in a block, in width ** 2
    parameters: float                      # of all of it
    key_heads: int = 0                     # 0: as many as heads
    joint: bool = True                     # text runs through the blocks; else blocks read it by cross-attention
    attention: str = "all"                 # "all" tokens, those of the own "frame", or "linear"
    shared: float = 1.0                    # share of the blocks whose attention crosses ranks
    skips: int = 0                         # U-shaped: so many later blocks read what an earlier one has given
    whole_attention: bool = False          # which tensor parallelism does not divide
    shards_text: bool = True               # sequence parallelism shards text too
    text_once: bool = False                # PipeFusion runs text with the first patch of a step alone
    branches_apart: bool = False           # and both branches of guidance one after the other
    kernels: float = 1.0                   # that a block launches, as multiples of a PixArt block's
    element_bytes: int = 2                 # of hidden states
    weight_bytes: float = 0.0              # of all parameters, as they are held; 0: as hidden states
    outside_bytes: float = 0.0             # of them, what every stage holds: those outside the blocks
    sums: float = 2.0                      # of all its tokens that tensor ranks add up in a block, on average
    agreed: float = 0.0                    # of them, before which ranks agree on a number of each token
    formats: dict[str, float] = field(default_factory=dict, hash=False)    # ComfyUI's -> share of elements in it
    block_bytes: tuple[float, ...] = ()    # of each block's weights, by which it is given to a stage; (): all are alike
    block_costs: tuple[float, ...] = ()    # likewise what it costs
    unpack_bytes: float = 0.0              # that the largest weight takes while it is unpacked or cast
    lora_unpack_bytes: tuple[float, float] = (0.0, 0.0)        # the same with a LoRA: of what narrows tokens, widens
    rounded_bytes: float = 0.0             # of a number of the inputs that layers keep rounded, for the next
    # with weights of blocks that comfy-kitchen multiplies: whose inputs are rounded; without kernels of its own
    rounded_products: tuple[Product, ...] = ()
    eager_products: tuple[Product, ...] = ()
    usual_tokens: int = 4096               # of a picture or video, before a run is known
    footprint: Any = None                       # memory_model.ActivationFootprint of its activations; None: the usual

    @property
    def resident_bytes(self):
        """Bytes of all weights."""
        return self.weight_bytes or self.element_bytes * self.parameters

    @property
    def key_fraction(self):
        """Size of keys, or of values, to that of queries."""
        return (self.key_heads or self.heads) / self.heads


@dataclass(frozen=True)
class Job:
    tokens: int                            # of an image or video
    text: int
    steps: int
    branches: int = 1                      # 2 with classifier-free guidance
    frames: int = 1
    compiled: bool = False                 # by torch.compile
    fixed_s: float = 0.0                   # outside the transformer
    images: int = 1                        # of a batch
    cached: int = 0                          # of text: references, whose keys and values the run keeps
    sequences: int = 1                     # that an image's tokens are in, of which each reads the text by itself
    rows: int | None = None                # of tokens, of which a rank has whole ones; None: of single tokens


@dataclass(frozen=True)
class Degrees:
    """A layout. displaced: DistriFusion's patches, which stand still on their ranks."""

    cfg: int = 1
    ulysses: int = 1
    ring: int = 1
    pipefusion: int = 1
    tensor: int = 1
    displaced: int = 1
    data: int = 1
    num_patches: int = 0                   # of PipeFusion; 0: as many as stages
    warmup_steps: int = 1
    warmup_by_sequence: bool = False       # whole steps run by Ring over all ranks, which then hold all blocks

    @property
    def devices(self):
        return self.cfg * self.data * self.sequence * self.pipefusion * self.tensor * self.displaced

    @property
    def sequence(self):
        return self.ulysses * self.ring

    def batch(self, job):
        """Rows of the batch that a rank computes."""
        return math.ceil(job.branches / self.cfg) * math.ceil(job.images / self.data)


@dataclass(frozen=True)
class Device:
    """One device, as measured: full matrix multiplications, attention over many keys, and memory."""

    matrix_flops_s: float
    attention_flops_s: float
    memory_bytes_s: float
    half_rows: float = 300.0               # rows at which a matrix multiplication runs at half of its rate
    half_keys: float = 300.0               # keys at which attention does
    kernel_bytes: float = 60.0             # that a block's small kernels move, in its hidden states
    block_launch_s: float = 1.3e-3         # the host's, for a block's kernels
    collective_launch_s: float = 2e-4
    round_launch_s: float = 3.5e-4         # of a round of Ring
    slot_launch_s: float = 2e-3            # of a patch on a stage
    merge_bytes: float = 8.0               # that merging a round's result moves, in float32 results
    # that packing and unpacking a tensor of an all-to-all moves, in its own bytes
    pack_bytes: float = 4.0
    name: str = ""                         # of the card
    memory_bytes: float = math.inf
    busy_ring: float = 0.1                 # by how much attention is slower while a hop runs beside it
    convolution_flops_s: float = 0.0       # of a decoder's convolutions; 0: as matrix multiplications
    narrow_fraction: float = 1.0              # of the attention's rate, with heads of 64 instead of 128
    # of launching, what can pass beside computing: nothing where the host is the device
    launch_hidden: float = 1.0
    # of copies from host memory, while all devices of the machine copy; 0: not measured, or it is the host itself
    host_bytes_s: float = 0.0
    host_alone_bytes_s: float = 0.0        # while it alone copies; 0: as fast
    capability: float = 0.0                # such as 8.9; 0: not known
    host_pageable: float = 0.0             # 1: these are copies by the driver, and not through page-locked pieces
    # attention by packages that are installed, "sage 128" with heads of 128: times as fast as torch's own
    kernels: dict[str, float] = field(default_factory=dict, hash=False)
    # products with weights in a format of ComfyUI's, rounding or unpacking included: times as fast as in its own type
    products: dict[str, float] = field(default_factory=dict, hash=False)

    def product_s(self, dims, flops):
        """Seconds of so many operations of matrix multiplications with a Net's weights, with many rows."""
        slowed = 1 + sum(share * (1 / self.products.get(format_, 1.0) - 1) for format_, share in dims.formats.items())
        return flops / self.matrix_flops_s * slowed

    def by_backend(self, name):
        """The device whose attention runs by this kernel, where that was measured."""
        wide, narrow = (self.kernels.get(f"{name} {head}", 1.0) for head in (128, 64))
        return replace(self, attention_flops_s=self.attention_flops_s * wide,
                       narrow_fraction=self.narrow_fraction * narrow / wide)

    def attention_rate(self, head_size):
        """Operations a second of attention with heads of this size:
        that of 64 and less, of 128 and more, or in between."""
        part = min(1.0, max(0.0, math.log2(head_size / 64)))
        return self.attention_flops_s * self.narrow_fraction ** (1 - part)

    def slower(self, factor):
        """A device that takes so many times as long for everything."""
        rates = {name: getattr(self, name) / factor for name in
                 ("matrix_flops_s", "attention_flops_s", "memory_bytes_s", "convolution_flops_s")}
        launches = {name: getattr(self, name) * factor for name in
                    ("block_launch_s", "collective_launch_s", "round_launch_s", "slot_launch_s")}
        return replace(self, **rates, **launches)


COLLECTIVES = ("all_to_all", "hop", "all_reduce", "gather")


@dataclass(frozen=True)
class Links:
    """Bytes a second that a rank sends in a group of so many neighbours: {(collective, size): rate}, and seconds a
    message takes.

    Collectives are COLLECTIVES; sizes in between are interpolated. latencies: {(collective,
    size): seconds} where they were measured. hidden: the share of a hop that can pass beside computing. per_machine:
    config.devices_per_machine; what was measured inside of a machine says nothing of groups that leave it, nor they of
    it. exchange: in which form attention's tensors travel, one of exchanges.EXCHANGES.
    """

    rates: dict = field(default_factory=dict)
    latency_s: float = 3e-5
    hidden: float = 1.0
    latencies: dict = field(default_factory=dict)
    per_machine: int = 0
    exchange: str = WHOLE

    def sent_bytes(self, dims, of_keys):
        """Bytes of a number of attention's keys and values, or of its queries and results, as it travels."""
        is_small = self.exchange == ALL or (self.exchange == KEYS and of_keys)
        return FP8_BYTES if is_small else dims.element_bytes

    def crosses(self, size):
        """Do some groups of so many neighbours leave their machine?"""
        return self.per_machine > 0 and self.per_machine % size > 0

    def rate(self, collective, size):
        known = sorted(of for name, of in self.rates if name == collective)
        if not known:
            raise KeyError(f"no rate of {collective} was measured")
        if size > DEVICES_PER_NODE >= known[-1] and ("network", 0) in self.rates:
            return self.rates["network", 0]
        return self._between(self.rates, collective, size)

    def latency(self, collective, size):
        known = any(name == collective for name, _ in self.latencies)
        return self._between(self.latencies, collective, size) if known else self.latency_s

    def _between(self, measured, collective, size):
        identical = {(name, of): value for (name, of),
                     value in measured.items() if self.crosses(of) == self.crosses(size)}
        return between(identical if any(name == collective for name, _ in identical) else measured, collective, size)


def between(measured, collective, size):
    """What was measured of a collective in groups of this size; of sizes in between, a mean of logarithms."""
    known = [of for name, of in measured if name == collective]
    below = max((of for of in known if of <= size), default=min(known))
    above = min((of for of in known if of >= size), default=max(known))
    if below == above:
        return measured[collective, below]
    part = math.log(size / below) / math.log(above / below)
    return measured[collective, below] ** (1 - part) * measured[collective, above] ** part


@dataclass(frozen=True)
class Run:
    """A run under a layout. All its ranks have such a device and such links."""

    dims: ModelDims
    job: Job
    degrees: Degrees
    device: Device
    links: Links

    @property
    def text(self):
        """Tokens of the text that run through the blocks."""
        return self.job.text if self.dims.joint else 0

    @property
    def keys(self):
        """Tokens in all that attention reads."""
        return self.job.tokens + self.text


@dataclass(frozen=True)
class Tokens:
    """What a rank has in a block: so many tokens of the image and of the text, of each image of its batch."""

    batch: int
    image: float
    text: float

    @property
    def rows(self):
        return self.batch * (self.image + self.text)


def block_parts(run, tokens):
    """Parts of one block on one rank, which has these Tokens."""
    degrees, device = run.degrees, run.device
    parts = Parts(_matrices_s(run, tokens), 0.0, device.block_launch_s * run.dims.kernels)
    if degrees.ulysses > 1:
        parts = parts.plus(_exchange_parts(run, tokens))
    attend_s = _attention_s(run, tokens)
    parts = parts.plus(_ring_parts(run, tokens, attend_s) if degrees.ring > 1 else Parts(attend_s, 0.0, 0.0))
    if degrees.tensor > 1:
        parts = parts.plus(_sum_parts(run, tokens))
    return Parts(parts.compute + (1 - device.launch_hidden) * parts.launch, parts.link,
                 device.launch_hidden * parts.launch)


def _matrices_s(run, tokens):
    """Of matrix multiplications and of small kernels."""
    dims, device, tensor, rows = run.dims, run.device, run.degrees.tensor, tokens.rows
    flops = 2 * dims.elements * dims.width ** 2 * rows / tensor
    if not dims.joint:                                          # keys and values of the text
        flops += 4 * dims.width ** 2 * tokens.batch * run.job.text / tensor
    return (device.product_s(dims, flops) * (1 + device.half_rows / rows)
            + device.kernel_bytes * rows * dims.width * dims.element_bytes / device.memory_bytes_s)


def _attention_s(run, tokens):
    """Of attention, where its keys are all there."""
    dims, device, tensor = run.dims, run.device, run.degrees.tensor
    scores = 4 * tokens.rows * dims.width / tensor * seen_keys(dims, run.job, run.keys)
    if not dims.joint:                                          # attention to the text
        scores += 4 * tokens.batch * tokens.image * run.job.text * dims.width / tensor
    head = dims.width / dims.heads
    scores *= HEAD_MULTIPLE * math.ceil(head / HEAD_MULTIPLE) / head
    attend_s = scores / device.attention_rate(head)
    if dims.attention == "all":
        attend_s *= 1 + device.half_keys / (run.keys / run.degrees.ring)
    return attend_s


def seen_keys(dims, job, keys):
    if dims.attention == "linear":
        return 2 * dims.width / dims.heads
    return keys / job.frames if dims.attention == "frame" else keys


def _exchange_parts(run, tokens):
    """Of Ulysses' all-to-alls of four tensors, which are not hidden, and of packing these."""
    dims, degrees, device, links = run.dims, run.degrees, run.device, run.links
    # bytes of queries and results, of keys and values
    others, keys = 2 * links.sent_bytes(dims, False), 2 * dims.key_fraction * links.sent_bytes(dims, True)
    own_shard = (degrees.ulysses - 1) / degrees.ulysses
    size = ((others + keys) * tokens.image + (others + keys if dims.shards_text else others)
            * tokens.text) * tokens.batch * dims.width * own_shard
    group = wide(degrees.ulysses * degrees.tensor, degrees)
    packed = 4 + SMALL_PACKING * (2 * (links.exchange == ALL) + 2 * (links.exchange != WHOLE))
    packed *= tokens.rows * dims.width * dims.element_bytes
    packing_s = dims.shared * device.pack_bytes * packed / device.memory_bytes_s
    return Parts(packing_s,
                 dims.shared * (size / links.rate("all_to_all", group) + 4 * links.latency("all_to_all", group)),
                 4 * device.collective_launch_s)


def _ring_parts(run, tokens, attend_s):
    """Of attention that takes so long with all keys, and whose keys go round."""
    dims, degrees, device, links, ring = run.dims, run.degrees, run.device, run.links, run.degrees.ring
    sent = tokens.image + (tokens.text if dims.shards_text else 0)
    piece = 2 * dims.key_fraction * tokens.batch * sent * dims.width * links.sent_bytes(dims, True)
    group = wide(degrees.sequence * degrees.tensor, degrees)
    hop = piece / links.rate("hop", group) + links.latency("hop", group)
    merge_s = device.merge_bytes * tokens.rows * dims.width * 4 / device.memory_bytes_s
    turn = attend_s / ring * (1 + device.busy_ring) + merge_s
    waits = (ring - 1) * (max(turn, hop) + (1 - links.hidden) * min(turn, hop) - turn)
    return Parts(dims.shared * ring * turn + (1 - dims.shared) * attend_s, dims.shared * waits,
                 ring * device.round_launch_s)


def _sum_parts(run, tokens):
    """Of what tensor ranks add up, and agree on before that, by all-reduces, which are not hidden."""
    dims, tensor = run.dims, run.degrees.tensor
    a_token = dims.sums * dims.width * dims.element_bytes + dims.agreed * AGREED_BYTES
    size, count = 2 * tokens.rows * a_token * (tensor - 1) / tensor, dims.sums + dims.agreed
    link_s = size / run.links.rate("all_reduce", tensor) + count * run.links.latency("all_reduce", tensor)
    return Parts(0.0, link_s, count * run.device.collective_launch_s)


def wide(size, degrees):
    """The devices that a group spans: one that does not tile a node crosses it."""
    return 2 * DEVICES_PER_NODE if degrees.devices > DEVICES_PER_NODE and degrees.devices // 2 % size else size


@dataclass(frozen=True)
class Parts:
    """Seconds of a block, a step or a run: what the device computes, waits for others, and the host launches."""

    compute: float
    link: float
    launch: float

    @property
    def seconds(self):
        return max(self.compute + self.link, self.launch)

    def times(self, factor):
        return Parts(self.compute * factor, self.link * factor, self.launch * factor)

    def plus(self, other):
        return Parts(self.compute + other.compute, self.link + other.link, self.launch + other.launch)
