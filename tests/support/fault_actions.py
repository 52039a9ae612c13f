"""What faults.py does to files, memory and copies while weights come from them. Each returns what undoes it."""

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

# In a worker: while a file of its rank is there, each copy that the thread makes fails.
FAILING_COPIES = """
import os
import threading
import torch
copy = torch.Tensor.copy_

def failing(self, *args, **kwargs):
    if (threading.current_thread().name == "xdit-copies"
            and os.path.exists(os.path.join({folder!r}, "fails-" + os.environ["RANK"]))):
        raise OSError("no page-locked memory is left")
    return copy(self, *args, **kwargs)
torch.Tensor.copy_ = failing
"""

# In a worker: where a file of its rank names the place that runs, memory runs out there, once.
RUNNING_OUT = """
import dataclasses
import functools
import itertools
import os
import torch
import torch.distributed as dist

def run_out(place):
    path = os.path.join({folder!r}, "runs-out-" + os.environ["RANK"])
    if os.path.exists(path):
        with open(path) as file:
            if file.read() != place:
                return
        os.unlink(path)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
                                     "8.00 GiB of which 1.00 GiB is free.")

def running_out_in(place, function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        run_out(place)
        return function(*args, **kwargs)
    return wrapped

for name in ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_reduce", "batch_isend_irecv",
             "isend", "irecv", "recv", "broadcast"):
    if hasattr(dist, name):
        wrapped = running_out_in("exchange", getattr(dist, name))
        setattr(dist, name, wrapped)
        setattr(dist.distributed_c10d, name, wrapped)      # which compares the two
init = dist.init_process_group

def init_process_group(*args, **kwargs):
    from xdit_backend.hooks.transformer import Hooks
    from xdit_backend.worker import autoencoders, models, upscalers
    load, run_forward = models.load_transformer, Hooks._run_forward
    load_upscaler = upscalers.load_upscaler

    def with_shortage(*args):
        descriptor = load_upscaler(*args)
        call = descriptor._call_fn
        descriptor._call_fn = lambda model, image: (run_out("upscale"), call(model, image))[1]
        return descriptor
    upscalers.load_upscaler = with_shortage

    def load_transformer(spec, device, report, *more):
        def reported(done, total):
            if done * 2 > total:
                run_out("load")
            report(done, total)
        return load(spec, device, reported, *more)

    def last_block(hooks, forward, context, place, arguments):
        if place.index == context.blocks[-1]:
            run_out("block")
        return run_forward(hooks, forward, context, place, arguments)

    def in_rows(place, function):
        def of_rows(*args):
            *args, pieces = args
            count = itertools.count()

            def on_convolution(split):
                if next(count) == 3:
                    run_out(place)
                pieces.on_convolution(split)
            return function(*args, dataclasses.replace(pieces, on_convolution=on_convolution))
        return of_rows
    models.load_transformer, Hooks._run_forward = load_transformer, last_block
    autoencoders.decode_rows = in_rows("decode", autoencoders.decode_rows)
    autoencoders.encode_rows = in_rows("encode", autoencoders.encode_rows)
    return init(*args, **kwargs)
dist.init_process_group = init_process_group
"""


def can_fail_copies(folder):
    """Have workers that start from now on look for files in this folder, that fail_copies makes; returns what undoes
    it."""
    return _run_in_workers(FAILING_COPIES, folder)


def can_run_out(folder):
    """Have workers that start from now on look for files in this folder that run_out_of_memory makes; returns what
    undoes it."""
    return _run_in_workers(RUNNING_OUT, folder)


def run_out_of_memory(folder, rank, place):
    """Have this rank run out of memory once: in its "load" of a model, the last "block" of a forward, an "exchange",
    "decode", "encode" or "upscale". Returns the file that is there until then."""
    path = Path(folder, f"runs-out-{rank}")
    path.write_text(place)
    return path


def _run_in_workers(source, folder):
    Path(folder, "sitecustomize.py").write_text(source.replace("{folder!r}", repr(str(folder))))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))

    def undo():
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return undo


def fail_copies(folder, rank):
    """Fail each copy of weights in this rank."""
    path = Path(folder, f"fails-{rank}")
    path.touch()
    return path.unlink


def written_to(path):
    """Overwrite a part of a file."""
    was, content = os.stat(path), Path(path).read_bytes()
    with open(path, "r+b") as file:
        file.seek(was.st_size // 2)
        file.write(bytes(min(4096, was.st_size // 2)))
    return partial(_put_back, path, was, content)


def cut_short(path):
    """Cut off the second half of a file."""
    was, content = os.stat(path), Path(path).read_bytes()
    os.truncate(path, was.st_size // 2)
    return partial(_put_back, path, was, content)


def _put_back(path, was, content):
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))


def removed(path):
    """Remove a file."""
    elsewhere = f"{path}.removed"
    os.rename(path, elsewhere)
    return lambda: os.rename(elsewhere, path)


def without_memory(process):
    """Let a process take next to no more memory."""
    limits = process.rlimit(psutil.RLIMIT_AS)
    process.rlimit(psutil.RLIMIT_AS, (process.memory_info().vms + 2 ** 16, limits[1]))

    def undo():
        with suppress(psutil.Error):                           # it has ended of it
            process.rlimit(psutil.RLIMIT_AS, limits)
    return undo
