"""Time the loading of model files, compared with only reading them.

Random files of Flux's layout, in bf16, scaled fp8 and GGUF Q4_K, or the files given. Each is read and loaded in an
interleaved order, first after the page cache was dropped (cold), then from it (warm). On a CPU, where weights stay a
memory map of the file, each is then copied into a buffer, as on its way to a GPU.
"""

import gc
import json
import math
import os
import statistics
import struct
import tempfile
import time
from pathlib import Path

import torch

from ... import system
from ...checkpoints.checkpoint import open_checkpoint
from ...checkpoints.loader import load_transformer
from ...memory.staging import CHUNK_BYTES
from ...protocol.errors import ConfigError
from .worker_groups import count_cuda

WIDTH, HEAD_SIZE = 3072, 128               # Flux.1's
# and bytes per element
TYPES = {"bf16": ("safetensors", 2), "scaled fp8": ("safetensors", 1), "Q4_K": ("gguf", 144 / 256)}


def add_arguments(parser):
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE",
                        help="files to load (default: random ones, which are removed again)")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="approximate size of each random file")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()),
                        help="where random files are written")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, of which medians are shown")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto",
                        help="auto: CUDA if available")
    parser.add_argument("--threads", type=int, default=1, help="threads of the loading process")


def main(options):
    torch.set_num_threads(options.threads)
    device = torch.device("cuda:0" if count_cuda(options.device) else "cpu")
    for path in options.files:
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file. Give .safetensors or .gguf files of a model.")
    print(f"onto {device}, {options.threads} thread(s); GB/s, medians of {options.rounds} rounds", flush=True)
    print(f"{'':24}{'read cold':>12}{'load cold':>12}{'read warm':>12}{'load warm':>12}")
    if options.files:
        for path in options.files:
            print_speeds(path, path.name, device, options.rounds)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for type_, (end, item_bytes) in TYPES.items():
            path = Path(folder) / f"model.{end}"
            write_flux(path, type_, max(1, round(options.gigabytes * 1e9 / item_bytes / (51 * WIDTH ** 2))))
            print_speeds(path, type_, device, options.rounds)


def print_speeds(path, name, device, rounds):
    """Print a line of the table. The first load, which imports libraries, is not counted."""
    load(path, device)
    seconds = {}
    for _ in range(rounds):
        for work in (read, load):
            let_go(path)
            for state in ("cold", "warm"):
                started_s = time.perf_counter()
                work(path, device)
                seconds.setdefault((state, work), []).append(time.perf_counter() - started_s)
    size = path.stat().st_size / 1e9
    speeds = [size / statistics.median(seconds[state, work]) for state in ("cold", "warm") for work in (read, load)]
    print(f"{name:18}{size:6.2f}" + "".join(f"{speed:12.2f}" for speed in speeds), flush=True)


def read(path, device):
    memory = bytearray(CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(memory):
            pass


def load(path, device):
    header = open_checkpoint(path)
    model = load_transformer(header.spec("bfloat16", "bfloat16"), device).model
    if device.type == "cpu":
        buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
        for weight in (*model.parameters(), *model.buffers()):
            for section in weight.data.reshape(-1).view(torch.uint8).split(CHUNK_BYTES):
                buffer[:len(section)].copy_(section)
    else:
        torch.cuda.synchronize(device)


def let_go(path):
    """Drop a file from the page cache. Has no effect while a process maps the file."""
    gc.collect()
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        system.drop_from_cache(file, 0, 0)


def flux_shapes(depth):
    """{name in the publisher's format: shape} of a Flux.1 with this many blocks of each kind, 51 h^2 parameters for
    each."""
    h, linears, shapes = WIDTH, {"img_in": (WIDTH, 64), "txt_in": (WIDTH, 4096), "final_layer.linear": (64, WIDTH),
                                 "final_layer.adaLN_modulation.1": (2 * WIDTH, WIDTH)}, {}
    for name, columns in (("time_in", 256), ("guidance_in", 256), ("vector_in", 768)):
        linears |= {f"{name}.in_layer": (h, columns), f"{name}.out_layer": (h, h)}
    for block in (f"double_blocks.{index}.{stream}" for index in range(depth) for stream in ("img", "txt")):
        linears |= {f"{block}_mod.lin": (6 * h, h), f"{block}_attn.qkv": (3 * h, h), f"{block}_attn.proj": (h, h),
                    f"{block}_mlp.0": (4 * h, h), f"{block}_mlp.2": (h, 4 * h)}
        shapes |= {f"{block}_attn.norm.{name}_norm.scale": (HEAD_SIZE,) for name in ("query", "key")}
    for block in (f"single_blocks.{index}" for index in range(depth)):
        linears |= {f"{block}.linear1": (7 * h, h), f"{block}.linear2": (h, 5 * h),
                    f"{block}.modulation.lin": (3 * h, h)}
        shapes |= {f"{block}.norm.{name}_norm.scale": (HEAD_SIZE,) for name in ("query", "key")}
    return shapes | {f"{name}.{leaf}": shape[:dims] for name, shape in linears.items()
                     for leaf, dims in (("weight", 2), ("bias", 1))}


def write_flux(path, type_, depth):
    """Write a random file of Flux's layout. All of its tensors are slices of the same random numbers."""
    shapes = flux_shapes(depth)
    numbers = 0.02 * torch.randn(max(map(math.prod, shapes.values())))
    if type_ == "Q4_K":
        write_gguf(path, shapes, numbers)
        return
    plain, small = (numbers.to(dtype).view(torch.uint8).numpy() for dtype in (torch.bfloat16, torch.float8_e4m3fn))
    tensors = {}                                               # name: type, shape, bytes
    for name, shape in shapes.items():
        is_scaled = type_ == "scaled fp8" and len(shape) == 2
        tensors[name] = ("F8_E4M3", shape, small) if is_scaled else ("BF16", shape, plain)
        if is_scaled:
            tensors[name.replace(".weight", ".scale_weight")] = "F32", (), struct.pack("<f", 0.5)
    if type_ == "scaled fp8":
        tensors["scaled_fp8"] = "F8_E4M3", (2,), bytes(2)
    header, end = {}, 0
    for name, (dtype, shape, _) in tensors.items():
        start, end = end, end + math.prod(shape) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, (_, _, data) in tensors.items():
            start, end = header[name]["data_offsets"]
            file.write(memoryview(data)[:end - start])


def write_gguf(path, shapes, numbers):
    import gguf
    writer, type_ = gguf.GGUFWriter(str(path), "flux"), gguf.GGMLQuantizationType.Q4_K
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    blocks = torch.randint(0, 256, (len(numbers) // block, block_bytes), dtype=torch.uint8)
    blocks[:, :4] = torch.tensor([0.001, 0.001], dtype=torch.float16).view(torch.uint8)         # their scales
    for name, shape in shapes.items():
        count = math.prod(shape)
        if len(shape) == 2 and shape[1] % block == 0:
            writer.add_tensor(name, blocks[:count // block].view(shape[0], -1).numpy(), raw_dtype=type_)
        else:
            writer.add_tensor(name, numbers[:count].view(shape).numpy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file,
                  writer.close):
        write()
