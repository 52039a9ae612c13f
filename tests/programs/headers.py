"""Mutated and hostile model files: safetensors, GGUF, diffusers folders, LoRA files and pickles.

`HOSTILE` are files that held the GIL for seconds or raised a raw exception before limits were checked, and the largest
that are within the limits. `Mutator` mutates small real files: bytes, JSON values, numbers, nesting, repeated names.
"""

import json
import math
import pickle
import re
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.comfy_quants import packed_file
from tests.support.comfyui_server import comfyui_folder
from tests.support.tiny_checkpoints import import_comfyui, save, save_gguf, state_dict
from xdit_backend.checkpoints.build_transformer import build_empty
from xdit_backend.checkpoints.header_limits import MAX_GGUF_HEADER_BYTES, MAX_HEADER_BYTES, MAX_STRINGS, MAX_TENSORS
from xdit_backend.checkpoints.quantisation.gguf import read_gguf
from xdit_backend.checkpoints.safetensors_header import ITEM_BYTES
from xdit_backend.models import FAMILIES
from xdit_backend.tools.dry_run.published_models import PUBLISHED

KINDS = ("safetensors", "quantised", "unet", "gguf", "folder", "any family", "lora")
INTEGERS = [0, 1, 2, 3, 7, 8, 9, 2 ** 15, 2 ** 31 - 1, 2 ** 31, 2 ** 32 - 1, 2 ** 40, 2 ** 62, 2 ** 63 - 1, 2 ** 63,
            2 ** 64 - 1]
# JSON that takes the place of a value
VALUES = ["null", "true", "-1", "0", "1", "9", "1.5", "-0.0", "1e999", "NaN", "-Infinity", '""', '"x"', '"F32"', "[]",
          "{}", "[[]]", '{"a": 1}', "[1, 2]", '["a"]', "[-1]", "[null]", '"\\ud800"', '"\\u0000\\n"', '"é"',
          "9" * 30, "9" * 4000, "[" * 3000, "[" * 3000 + "]" * 3000, "[" * 10 + "]" * 10, f'"{"x" * 100_000}"',
          f"[{'0,' * 100_000}0]", *map(str, INTEGERS)]
NUMBERS = ["0", "1", "5", "99", "1000000", "9" * 40, "x"]      # of blocks, in names
MARK = "the value that is replaced"


def save_header(path, header, num_bytes=0):
    """A safetensors file with this header, text or a value, and a hole of so many bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + num_bytes)


def gguf_text(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def save_gguf_header(path, num_tensors=0, infos=b"", num_values=0, metadata=b""):
    Path(path).write_bytes(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + metadata + infos + bytes(64))


# --- hostile files ---

def empty_tensors(count, name="t{}"):
    return {name.format(number): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(count)}


def one_tensor(**changes):
    return {"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | changes}


def in_json(count, entry):
    return f"{{{','.join(entry.format(number) for number in range(count))}}}".encode()


def infos(count, dims=(0,), name="t{}"):
    return b"".join(gguf_text(name.format(number)) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, 0)
                    for number in range(count))


def shape_said(type_, value, name="comfy.gguf.orig_shape.t0"):
    return {"num_tensors": 1, "infos": infos(1), "num_values": 1,
            "metadata": gguf_text(name) + struct.pack("<I", type_) + value}


DIGITS = '"t{}":{{"dtype":"F32","shape":[' + "9" * 4000 + '],"data_offsets":[0,0]}}'
TEXTS = {"__metadata__": {"thumbnail": "x\\n" * (MAX_HEADER_BYTES // 4 - 100)}}
# name -> the header of a safetensors file, or what save_gguf_header is given
HOSTILE = {
    "200,000 empty tensors": lambda: empty_tensors(200_000),
    "empty tensors of a model": lambda: empty_tensors(MAX_TENSORS, "model.diffusion_model.blocks.{}.weight"),
    "U-Net of as many blocks": lambda: empty_tensors(MAX_TENSORS, "input_blocks.{}.0.op.weight"),
    "most tensors": lambda: empty_tensors(MAX_TENSORS),
    "one more": lambda: empty_tensors(MAX_TENSORS + 1),
    "sizes of 4,000 digits": lambda: in_json(500, DIGITS),
    "a million dims": lambda: one_tensor(shape=[2 ** 62] * 1_000_000),
    "rows of nothing": lambda: one_tensor(shape=[2 ** 50, 0]),
    "lists in lists": lambda: b'{"a":' + b"[" * (MAX_HEADER_BYTES - 10),
    "lists without end": lambda: b'{"a":[' + b"[]," * 2_000_000 + b"[]]}",
    "names without end": lambda: in_json(400_000, '"{}":0'),
    "one name often": lambda: in_json(15_000, '"a":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
    "quotes without end": lambda: b'{"a":"' + b'\\"' * (MAX_HEADER_BYTES // 2 - 10),
    "text of the whole header": lambda: TEXTS,
    "more than a header": lambda: b" " * (MAX_HEADER_BYTES + 2),
    "a name without end": lambda: empty_tensors(1, "x" * 2 ** 20),
    "a name that is a command to terminals": lambda: empty_tensors(1, "\x1b[2Ja"),
    "a type that is a list": lambda: one_tensor(dtype=[]),
    "a type that is no type": lambda: one_tensor(dtype="F" * 1_000_000),
    "metadata in the metadata": lambda: {"__metadata__": {"_quantization_metadata": "[" * 100_000}} | one_tensor(),
    "GGUF: 100,000 dims": lambda: {"num_tensors": 1, "infos": infos(1, (2 ** 62,) * 100_000)},
    "GGUF: most tensors": lambda: {"num_tensors": MAX_TENSORS, "infos": infos(MAX_TENSORS)},
    "GGUF: one more": lambda: {"num_tensors": MAX_TENSORS + 1, "infos": infos(MAX_TENSORS + 1)},
    "GGUF: tensors without end": lambda: {"num_tensors": 2 ** 60},
    "GGUF: values without end": lambda: {"num_values": 2 ** 60},
    "GGUF: lists in lists": lambda: {"num_values": 1, "metadata": gguf_text("x") + struct.pack("<I", 9)
                                     + struct.pack("<IQ", 9, 1) * 3000 + struct.pack("<IQ", 0, 0)},
    "GGUF: a shape that is a text": lambda: shape_said(8, gguf_text("4, 4")),
    "GGUF: a shape that is a number": lambda: shape_said(4, struct.pack("<I", 4)),
    "GGUF: a shape of texts": lambda: shape_said(9, struct.pack("<IQ", 8, 1) + gguf_text("4")),
    "GGUF: a shape of fractions": lambda: shape_said(9, struct.pack("<IQf", 6, 1, 4.0)),
    "GGUF: a shape of 100,000": lambda: shape_said(9, struct.pack("<IQ", 4, 100_000) + bytes(400_000)),
    "GGUF: a vocabulary": lambda: shape_said(9, struct.pack("<IQ", 8, MAX_STRINGS) + gguf_text("abcdef") * MAX_STRINGS,
                                             "tokenizer.ggml.tokens"),
    "GGUF: two vocabularies": lambda: {
        "num_values": 2, "metadata": b"".join(gguf_text(name) + struct.pack("<IIQ", 9, 8, MAX_STRINGS)
                                              + bytes(8 * MAX_STRINGS) for name in "ab")},
    "GGUF: an image": lambda: {"num_values": 1, "metadata": gguf_text("x") + struct.pack(
        "<IIQ", 9, 0, MAX_GGUF_HEADER_BYTES) + bytes(MAX_GGUF_HEADER_BYTES)},
    "GGUF: an alignment without end": lambda: shape_said(10, struct.pack("<Q", 2 ** 63), "general.alignment"),
}


def save_hostile(name, folder):
    """Write one of HOSTILE. Returns its path."""
    header = HOSTILE[name]()
    if name.startswith("GGUF"):
        save_gguf_header(folder / "model.gguf", **header)
        return folder / "model.gguf"
    save_header(folder / "model.safetensors", header)
    return folder / "model.safetensors"


# --- mutated files ---

@dataclass
class Original:
    """A file of which mutated ones are made: its header, and how many bytes follow it."""

    header: bytes
    num_bytes: int
    tensors: bytes = b""                   # of a quantised file: JSON about layers is among them


class Mutator:
    """Writes mutated files into a folder of its own. chance: a random.Random. families_drawn: kinds of
    tests.support.tiny_checkpoints of which files without numbers are made too."""

    def __init__(self, folder, chance, families_drawn):
        self._folder, self._chance, self._num_bytes = Path(folder), chance, 0
        originals = self._folder / "originals"
        originals.mkdir()
        if comfyui_folder() is None:
            raise RuntimeError("Name ComfyUI's folder in XDIT_COMFYUI: the files that are mutated are made by it.")
        import_comfyui(comfyui_folder())
        with torch.inference_mode():
            for kind, name in (("sd3", "safetensors"), ("sdxl", "unet")):
                save(kind, originals / f"{name}.safetensors")
            packed_file(originals, "sd3", "nvfp4").rename(originals / "quantised.safetensors")
            save_gguf(originals / "model.gguf", originals / "safetensors.safetensors")
        self._published = [_published_folder("pixart-sigma", "transformer"), _published_folder("sdxl", "unet")]
        self._families, self._shapes = families_drawn, {}
        lora = {f"lora_unet_joint_blocks_{number}_x_block_attn_qkv.lora_{which}.weight": (4, 4)
                for number in range(3) for which in ("up", "down")}
        entries = {name: {"dtype": "F32", "shape": shape, "data_offsets": [64 * place, 64 * place + 64]}
                   for place, (name, shape) in enumerate(lora.items())}
        save_header(originals / "lora.safetensors", {"__metadata__": {"ss_network_dim": "4"}} | entries, 64 * len(lora))
        self._files = {name: _read(originals / f"{name}.safetensors")
                       for name in ("safetensors", "quantised", "unet", "lora")}
        self._files["gguf"] = _read_gguf(originals / "model.gguf")

    def write(self, number):
        """(kind, path) of a mutated file."""
        kind = KINDS[number % len(KINDS)] if number % 50 else "pickle"
        if kind == "pickle":
            path = self._folder / self._chance.choice(["model.ckpt", "model.pt", "model.safetensors", "model.gguf"])
            if self._chance.random() < 0.5:
                path.write_bytes(pickle.dumps({"state_dict": {"a": [1.0]}}))
            else:
                torch.save({"a": torch.ones(4)}, path)
        elif kind == "folder":
            path = self._write_folder()
        elif kind == "gguf":
            path = self._folder / "model.gguf"
            original = self._files[kind]
            header = (self._with_numbers if self._chance.random() < 0.8 else self._noise)(original.header)
            path.write_bytes(header + bytes(original.num_bytes))
        else:
            path = self._folder / "model.safetensors"
            self._write_safetensors(path, self._files.get(kind) or self._original_of_family())
        return kind, path

    def _write_safetensors(self, path, original):
        self._num_bytes = original.num_bytes
        header = self._mutated_json(original.header)
        save_header(path, header, min(self._num_bytes, 2 ** 42))
        with open(path, "r+b") as file:
            file.seek(8 + len(header))
            file.write(original.tensors)
            if self._chance.random() < 0.1:
                file.truncate(self._chance.randrange(8 + len(header) + original.num_bytes))
            elif self._chance.random() < 0.1:
                file.seek(0)
                file.write(struct.pack("<Q", self._chance.choice(INTEGERS)))

    def _write_folder(self):
        """A folder of a published size, of which one file is mutated, missing or under another name."""
        path = self._folder / "folder"
        shutil.rmtree(path, ignore_errors=True)
        part, config, original = self._chance.choice(self._published)
        own, weights = path / part, path / part / "diffusion_pytorch_model.safetensors"
        own.mkdir(parents=True)
        what = self._chance.choice(["config", "config", "config", "index", "header", "header", "missing", "renamed",
                                    "scheduler"])
        (own / "config.json").write_bytes(self._mutated_json(config) if what == "config" else config)
        index = json.dumps({"_class_name": "PixArtSigmaPipeline", "vae": ["diffusers", "AutoencoderKL"]}).encode()
        (path / "model_index.json").write_bytes(self._mutated_json(index) if what == "index" else index)
        if what == "header":
            self._write_safetensors(weights, original)
        else:
            save_header(weights, original.header, original.num_bytes)
        if what == "missing":
            self._chance.choice([weights, own / "config.json"]).unlink()
        elif what == "renamed":
            weights.rename(own / self._chance.choice(
                ["diffusion_pytorch_model-00001-of-00002.safetensors", f"a-1-of-{'9' * 200}.safetensors",
                 "diffusion_pytorch_model.bin", "a.fp16.safetensors"]))
        elif what == "scheduler":
            (path / "scheduler").mkdir()
            (path / "scheduler/scheduler_config.json").write_text(self._chance.choice(VALUES))
        return path

    def _original_of_family(self):
        """The header of a tiny file of any family, without its numbers."""
        kind = self._chance.choice(self._families)
        if kind not in self._shapes:
            with torch.inference_mode():
                self._shapes[kind] = {name: list(tensor.shape) for name, tensor in state_dict(kind).items()}
        return _original(self._shapes[kind])

    def _mutated_json(self, raw):
        """A header with bytes changed; or with a few of its values replaced, left out or repeated."""
        if self._chance.random() < 0.2:
            return self._noise(raw)
        value = json.loads(raw)
        if self._chance.random() < 0.5 and "data_offsets" in str(value):
            return json.dumps(self._with_other_tensors(value)).encode()
        replaced = []
        for _ in range(self._chance.choice([1, 1, 1, 2, 3])):
            self._mutate_value(value, replaced)
        text = json.dumps(value)
        for _ in replaced:
            text = text.replace(json.dumps(MARK), self._chance.choice(VALUES), 1)
        if self._chance.random() < 0.1:                        # a name twice
            name = re.search(r'"[^"]+":', text)
            text = f"{{{name[0]} {self._chance.choice(VALUES)}, {text[1:]}" if name else text
        return text.encode()

    def _mutate_value(self, value, replaced):
        """Change something below a list or object."""
        while isinstance(value, (list, dict)) and value:
            keys = list(value) if isinstance(value, dict) else list(range(len(value)))
            key = self._chance.choice(keys)
            below = value[key]
            if isinstance(below, (list, dict)) and below and self._chance.random() < 0.7:
                value = below
                continue
            what = self._chance.choice(["replace", "replace", "replace", "drop", "rename", "number"])
            if what == "replace":
                value[key] = MARK
                replaced.append(key)
            elif what == "number" and type(below) is int:
                value[key] = self._chance.choice([below + 1, below - 1, below * 2, below // 2, *INTEGERS])
            elif isinstance(value, dict) and what == "rename":
                value[re.sub(r"\d+", lambda found: str(self._chance.choice([7, 300, 10 ** 6, "9" * 50])), key)
                      if re.search(r"\d", key) else f"{key}x"] = value.pop(key)
            else:
                del value[key]
            return

    def _with_other_tensors(self, entries):
        """A header that agrees with itself: tensors left out, added, renamed, or of other shapes and types."""
        metadata = {key: entries.pop(key) for key in [*entries] if key == "__metadata__"}
        for _ in range(self._chance.choice([1, 1, 2, 5])):
            name = self._chance.choice([*entries])
            shape = entries[name]["shape"]
            what = self._chance.choice(["shape", "shape", "dims", "type", "drop", "rename", "copy", "many"])
            if what == "shape" and shape:
                shape[self._chance.randrange(len(shape))] = self._chance.choice(
                    [0, 1, 2, 3, 7, 64, 1000, 2 ** 20, 2 ** 31, 2 ** 40])
            elif what == "dims":
                entries[name]["shape"] = self._chance.choice([[], shape[1:], [*shape, 1], [1, *shape], [0], [1] * 8,
                                                              shape[::-1]])
            elif what == "type":
                entries[name]["dtype"] = self._chance.choice([*ITEM_BYTES])
            elif what == "drop":
                del entries[name]
            else:
                for _ in range(300 if what == "many" else 1):
                    other = re.sub(r"\d+", lambda found: self._chance.choice(NUMBERS), name)
                    entries[other] = dict(entries[name])
                if what == "rename":
                    entries.pop(name, None)
        end = 0
        for entry in entries.values():
            start, end = end, end + math.prod(entry["shape"]) * ITEM_BYTES[entry["dtype"]]
            entry["data_offsets"] = [start, end]
        self._num_bytes = end
        return metadata | entries

    def _noise(self, raw):
        raw = bytearray(raw)
        for _ in range(self._chance.randint(1, 6)):
            start = self._chance.randrange(len(raw))
            stop = start + self._chance.choice([0, 1, 1, 2, 8, 64])
            raw[start:stop] = self._chance.choice([b"", self._chance.randbytes(stop - start), b"[", b'"', b"9" * 30,
                                                   bytes(raw[:self._chance.randint(1, 64)])])
        return bytes(raw)

    def _with_numbers(self, raw):
        """Bytes with a few numbers of 4 or 8 bytes in the place of others."""
        raw = bytearray(raw)
        for _ in range(self._chance.randint(1, 3)):
            kind = self._chance.choice(["<I", "<Q"])
            size = struct.calcsize(kind)
            start = self._chance.choice([4, 8, 16, *(self._chance.randrange(len(raw) - size) for _ in range(9))])
            raw[start:start + size] = struct.pack(kind, self._chance.choice(INTEGERS) % 256 ** size)
        return bytes(raw)


def _read(path):
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return Original(raw[8:8 + length], len(raw) - 8 - length, raw[8 + length:] if b"comfy_quant" in raw else b"")


def _read_gguf(path):
    first = min(place for place, _ in read_gguf(path)[1].values())
    raw = path.read_bytes()
    return Original(raw[:first], len(raw) - first)


def _original(shapes, dtype="BF16"):
    entries, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return Original(json.dumps(entries).encode(), end)


def _published_folder(name, part):
    """(part, config.json, Original) of a diffusers folder of a published size."""
    one = PUBLISHED[name]
    family, config = FAMILIES[one.family], {key: value for key, value in one.config.items() if key[0] != "_"}
    shapes = {name: tensor.shape for name, tensor in build_empty(family, one.config).state_dict().items()}
    return part, json.dumps(config | {"_class_name": family.transformer}).encode(), _original(shapes)
