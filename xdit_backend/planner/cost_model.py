"""Inputs of the cost model (model dimensions, job, degrees, device, links) and the estimated time of one block on one
rank. Arithmetic only.

The time of a block is the longer of two: its device's compute plus communication, and its host's kernel launches.
Rows are tokens times images. Sources: the papers cited in docs/README.md, and published timings.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any

from ..protocol.specs import ALL, KEYS, SOL_ATTN, SPARSE_BLOCK, WHOLE, SparseOptions
from .quantised_matmul_memory import Product

HEAD_MULTIPLE = 32             # attention kernels pad the head size to a multiple of this
# bytes of one element in fp8, with a scale per 64 tokens of a head (distributed/fp8_communication.py)
FP8_BYTES = 1 + 4 / (64 * 128)
SMALL_PACKING = 2.5            # cost of rounding a tensor to fp8 and back, as a multiple of packing it
AGREED_BYTES = 4               # per token, in float32 (docs/design/quantisation.md)
DEVICES_PER_NODE = 8           # larger groups use the network


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of a diffusion transformer. checkpoints/model_dims.py derives them from a config."""

    blocks: int
    width: int
    heads: int
    elements: float                        # of the matrices applied to an image token in a block, in width ** 2
    parameters: float                      # of the model
    key_heads: int = 0                     # 0: equal to heads
    joint: bool = True                     # text tokens pass through the blocks; False: cross-attention to text
    attention: str = "all"                 # image tokens attend to "all" tokens, their own "frame", or "linear"
    shared: float = 1.0                    # fraction of the blocks whose attention spans ranks
    skips: int = 0                         # U-shaped: number of later blocks that read an earlier block's output
    replicated_attention: bool = False     # tensor parallelism does not shard attention
    shards_text: bool = True               # sequence parallelism shards text too
    text_once: bool = False                # PipeFusion runs text with the first patch of a step only
    branches_apart: bool = False           # and the two guidance branches one after the other
    kernels: float = 1.0                   # kernels launched by a block, as a multiple of a PixArt block's
    element_bytes: int = 2                 # of hidden states
    weight_bytes: float = 0.0              # of all parameters as stored; 0: the dtype of hidden states
    outside_bytes: float = 0.0             # of weights outside the blocks, which every stage has
    sums: float = 2.0                      # all-reduces over all tokens in a block under tensor parallelism, on average
    agreed: float = 0.0                    # of these, all-reduces preceded by one of a number per token
    formats: dict[str, float] = field(default_factory=dict, hash=False)    # ComfyUI format -> fraction of elements
    block_bytes: tuple[float, ...] = ()    # of each block's weights, for assigning stages; (): all equal
    block_costs: tuple[float, ...] = ()    # relative compute of each block, likewise
    unpack_bytes: float = 0.0              # temporary memory for unpacking or casting the largest weight
    lora_unpack_bytes: tuple[float, float] = (0.0, 0.0)        # with a LoRA: for a down-projection, an up-projection
    rounded_bytes: float = 0.0             # per input element, of rounded inputs that layers retain for the next
    # products by comfy-kitchen with weights of blocks: with rounded inputs; without fused kernels
    rounded_products: tuple[Product, ...] = ()
    eager_products: tuple[Product, ...] = ()
    usual_tokens: int = 4096               # of an image or video, before the run is known
    footprint: Any = None                  # memory_model.ActivationFootprint; None: the default
    @property
    def resident_bytes(self):
        """Bytes of all weights."""
        return self.weight_bytes or self.element_bytes * self.parameters

    @property
    def key_fraction(self):
        """Ratio of the size of keys (or values) to that of queries."""
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
    images: int = 1                        # in the batch
    cached: int = 0                        # text tokens of references, whose keys and values the run caches
    sequences: int = 1                     # sequences per image, each with its own cross-attention to text
    rows: int | None = None                # token rows, if ranks get full rows; None: single tokens
    sparse: SparseOptions | None = None    # of self-attention; None: dense


@dataclass(frozen=True)
class Degrees:
    """Parallel degrees of a layout. displaced: patches of DistriFusion, each fixed to a rank."""

    cfg: int = 1
    ulysses: int = 1
    ring: int = 1
    pipefusion: int = 1
    tensor: int = 1
    displaced: int = 1
    data: int = 1
    num_patches: int = 0                   # of PipeFusion; 0: the number of stages
    warmup_steps: int = 1
    warmup_by_sequence: bool = False       # synchronous steps use Ring over all ranks, each of which has all blocks

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
    """Measured rates of one device: large matrix multiplications, attention over many keys, and memory."""

    matrix_flops_s: float
    attention_flops_s: float
    memory_bytes_s: float
    half_rows: float = 300.0               # rows at which a matrix multiplication reaches half of its rate
    half_keys: float = 300.0               # keys at which attention does
    kernel_bytes: float = 60.0             # moved by a block's small kernels, as a multiple of its hidden states
    block_launch_s: float = 1.3e-3         # host time to launch a block's kernels
    collective_launch_s: float = 2e-4
    round_launch_s: float = 3.5e-4         # of a round of Ring
    slot_launch_s: float = 2e-3            # of a patch on a stage
    merge_bytes: float = 8.0               # moved by merging a round's result, as a multiple of float32 results
    # moved by packing and unpacking a tensor for an all-to-all, as a multiple of its bytes
    pack_bytes: float = 4.0
    name: str = ""                         # of the GPU
    memory_bytes: float = math.inf
    busy_ring: float = 0.1                 # relative slowdown of attention during a hop
    convolution_flops_s: float = 0.0       # in a VAE decoder; 0: as matrix multiplications
    narrow_fraction: float = 1.0           # attention rate with heads of 64, relative to heads of 128
    # fraction of launch time that overlaps compute: 0 if the host is the device
    launch_hidden: float = 1.0
    # rate of copies from system RAM while all devices of the machine copy; 0: not measured, or a CPU worker
    host_bytes_s: float = 0.0
    host_alone_bytes_s: float = 0.0        # while no other device copies; 0: the same
    capability: float = 0.0                # CUDA compute capability such as 8.9; 0: unknown
    host_pageable: float = 0.0             # 1: the driver copies pageable memory; 0: copies through pinned chunks
    # installed attention backends, such as "sage 128" with heads of 128: speedup over torch SDPA
    kernels: dict[str, float] = field(default_factory=dict, hash=False)
    # exact attention operators, such as "torch_flash 128 4096" with heads of 128 and 4096 keys: seconds
    operators: dict[str, float] = field(default_factory=dict, hash=False)
    # matrix multiplications in a ComfyUI format, including rounding or unpacking: speedup over the compute dtype
    products: dict[str, float] = field(default_factory=dict, hash=False)
    def product_s(self, dims, flops):
        """Seconds of this many floating-point operations in matrix multiplications with a model's weights, at many
        rows."""
        slowed = 1 + sum(share * (1 / self.products.get(format_, 1.0) - 1) for format_, share in dims.formats.items())
        return flops / self.matrix_flops_s * slowed

    def by_backend(self, name):
        """The device with the attention rates of this attention backend, if they were measured."""
        wide, narrow = (self.kernels.get(f"{name} {head}", 1.0) for head in (128, 64))
        return replace(self, attention_flops_s=self.attention_flops_s * wide,
                       narrow_fraction=self.narrow_fraction * narrow / wide)

    def attention_rate(self, head_size):
        """Operations per second of attention with heads of this size, interpolated between 64 and 128."""
        part = min(1.0, max(0.0, math.log2(head_size / 64)))
        return self.attention_flops_s * self.narrow_fraction ** (1 - part)

    def slower(self, factor):
        """A device that takes this many times as long for everything."""
        rates = {name: getattr(self, name) / factor for name in
                 ("matrix_flops_s", "attention_flops_s", "memory_bytes_s", "convolution_flops_s")}
        launches = {name: getattr(self, name) * factor for name in
                    ("block_launch_s", "collective_launch_s", "round_launch_s", "slot_launch_s")}
        return replace(self, **rates, **launches)


COLLECTIVES = ("all_to_all", "hop", "all_reduce", "gather")


@dataclass(frozen=True)
class Links:
    """Bytes per second that a rank sends in a group of neighbours, {(collective, size): rate}, and seconds of latency.

    Collectives: COLLECTIVES; intermediate sizes are interpolated. latencies: {(collective, size): seconds} where
    measured. hidden: fraction of a hop that overlaps compute. per_machine: config.devices_per_machine; measurements
    inside a machine do not apply to groups that span machines, nor the reverse. exchange: communication dtype of
    attention's tensors, one of exchanges.EXCHANGES.
    """

    rates: dict = field(default_factory=dict)
    latency_s: float = 3e-5
    hidden: float = 1.0
    latencies: dict = field(default_factory=dict)
    per_machine: int = 0
    exchange: str = WHOLE

    def sent_bytes(self, dims, of_keys):
        """Bytes per element sent: of attention's keys and values, or of its queries and results."""
        is_small = self.exchange == ALL or (self.exchange == KEYS and of_keys)
        return FP8_BYTES if is_small else dims.element_bytes

    def crosses(self, size):
        """Whether some groups of this many neighbours span machines."""
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
    """The measurement of a collective for this group size; geometric interpolation between measured sizes."""
    known = [of for name, of in measured if name == collective]
    below = max((of for of in known if of <= size), default=min(known))
    above = min((of for of in known if of >= size), default=max(known))
    if below == above:
        return measured[collective, below]
    part = math.log(size / below) / math.log(above / below)
    return measured[collective, below] ** (1 - part) * measured[collective, above] ** part


@dataclass(frozen=True)
class Run:
    """A run under a layout, with the same device and links on every rank."""

    dims: ModelDims
    job: Job
    degrees: Degrees
    device: Device
    links: Links

    @property
    def text(self):
        """Text tokens that pass through the blocks."""
        return self.job.text if self.dims.joint else 0

    @property
    def keys(self):
        """Tokens that attention reads."""
        return self.job.tokens + self.text


@dataclass(frozen=True)
class Tokens:
    """A rank's tokens in a block: image and text tokens of each image of its batch."""

    batch: int
    image: float
    text: float

    @property
    def rows(self):
        return self.batch * (self.image + self.text)


@dataclass(frozen=True)
class BlockTime:
    """Seconds of a block, a step or a run: device compute, communication, and kernel launches by the host."""

    compute: float
    link: float
    launch: float

    @property
    def seconds(self):
        return max(self.compute + self.link, self.launch)

    def times(self, factor):
        return BlockTime(self.compute * factor, self.link * factor, self.launch * factor)

    def plus(self, other):
        return BlockTime(self.compute + other.compute, self.link + other.link, self.launch + other.launch)


def block_time(run, tokens):
    """Time of one block on one rank with these Tokens."""
    degrees, device = run.degrees, run.device
    time = BlockTime(_matrices_s(run, tokens), 0.0, device.block_launch_s * run.dims.kernels)
    if degrees.ulysses > 1:
        time = time.plus(_ulysses_time(run, tokens))
    attend_s = _attention_s(run, tokens)
    time = time.plus(_ring_time(run, tokens, attend_s) if degrees.ring > 1 else BlockTime(attend_s, 0.0, 0.0))
    if degrees.tensor > 1:
        time = time.plus(_all_reduce_time(run, tokens))
    return BlockTime(time.compute + (1 - device.launch_hidden) * time.launch, time.link,
                 device.launch_hidden * time.launch)


def _matrices_s(run, tokens):
    """Seconds of matrix multiplications and small kernels."""
    dims, device, tensor, rows = run.dims, run.device, run.degrees.tensor, tokens.rows
    flops = 2 * dims.elements * dims.width ** 2 * rows / tensor
    if not dims.joint:                                          # keys and values of the text
        flops += 4 * dims.width ** 2 * tokens.batch * run.job.text / tensor
    return (device.product_s(dims, flops) * (1 + device.half_rows / rows)
            + device.kernel_bytes * rows * dims.width * dims.element_bytes / device.memory_bytes_s)


def _attention_s(run, tokens):
    """Seconds of attention with all keys on the rank."""
    dims, device, tensor = run.dims, run.device, run.degrees.tensor
    scores = 4 * tokens.rows * dims.width / tensor * seen_keys(dims, run.job, run.keys)
    scores *= attended_fraction(dims, run.job, run.keys, run.text)
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


def attended_fraction(dims, job, keys, text):
    """Fraction of self-attention's logits that a run computes on average, with the sparse options of its Job.

    Of a block's scores, a normal distribution, those above the threshold are selected. In addition: its neighbours, the
    text, the pooled blocks, and the steps outside start_percent and end_percent, taken as percentages of the steps.
    """
    sparse = job.sparse
    if sparse is None or dims.attention != "all" or keys < sparse.min_tokens:
        return 1.0
    selected = (math.erfc(sparse.tau / math.sqrt(2)) / 2 if sparse.method == SOL_ATTN
                else sparse.keep_percent / 100)
    sinks = {"off": 0, "exact_kv": 1, "exact_kv_and_rows": 2}[sparse.sink_conditioning] * text
    selected = min(1.0, selected + (3 * SPARSE_BLOCK + sinks) / keys + 1 / SPARSE_BLOCK)
    blocks = 1 - min(1.0, len(sparse.dense_blocks) / dims.blocks)
    return 1 - max(0.0, sparse.end_percent - sparse.start_percent) * blocks * (1 - selected)


def _ulysses_time(run, tokens):
    """Ulysses: four all-to-alls, which do not overlap compute, and the packing of their tensors."""
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
    return BlockTime(packing_s,
                 dims.shared * (size / links.rate("all_to_all", group) + 4 * links.latency("all_to_all", group)),
                 4 * device.collective_launch_s)


def _ring_time(run, tokens, attend_s):
    """Ring attention, from the seconds of attention to all keys on one rank."""
    dims, degrees, device, links, ring = run.dims, run.degrees, run.device, run.links, run.degrees.ring
    sent = tokens.image + (tokens.text if dims.shards_text else 0)
    chunk_bytes = 2 * dims.key_fraction * tokens.batch * sent * dims.width * links.sent_bytes(dims, True)
    group = wide(degrees.sequence * degrees.tensor, degrees)
    hop = chunk_bytes / links.rate("hop", group) + links.latency("hop", group)
    merge_s = device.merge_bytes * tokens.rows * dims.width * 4 / device.memory_bytes_s
    round_s = attend_s / ring * (1 + device.busy_ring) + merge_s
    waits = (ring - 1) * (max(round_s, hop) + (1 - links.hidden) * min(round_s, hop) - round_s)
    return BlockTime(dims.shared * ring * round_s + (1 - dims.shared) * attend_s, dims.shared * waits,
                 ring * device.round_launch_s)


def _all_reduce_time(run, tokens):
    """Tensor parallelism: all-reduces of partial sums, and of the number per token agreed on before some of them. None
    overlap compute."""
    dims, tensor = run.dims, run.degrees.tensor
    token_bytes = dims.sums * dims.width * dims.element_bytes + dims.agreed * AGREED_BYTES
    size, count = 2 * tokens.rows * token_bytes * (tensor - 1) / tensor, dims.sums + dims.agreed
    link_s = size / run.links.rate("all_reduce", tensor) + count * run.links.latency("all_reduce", tensor)
    return BlockTime(0.0, link_s, count * run.device.collective_launch_s)


def wide(size, degrees):
    """The number of devices that a group spans: a group whose size does not divide a node crosses its boundary."""
    return 2 * DEVICES_PER_NODE if degrees.devices > DEVICES_PER_NODE and degrees.devices // 2 % size else size
