"""Baseline for bench methods: diffusers' context parallelism on the same model, in two processes, with one step per
line on stdin."""

import json
import multiprocessing
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ...checkpoints.checkpoint import open_checkpoint
from .synthetic_model import Setting, calls


def run(rank, job, store):
    """One of the two ranks. Rank 0 reads the lines and prints the seconds of each step."""
    from diffusers import ContextParallelConfig, FluxTransformer2DModel

    torch.set_grad_enabled(False)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    setting = Setting(**job["setting"])
    model = FluxTransformer2DModel.from_pretrained(job["folder"], subfolder="transformer",
                                                   torch_dtype=getattr(torch, setting.dtype))
    degrees = {"ulysses_degree": 2} if job["layout"] == "ulysses2" else {"ring_degree": 2}
    parallel = ContextParallelConfig(**degrees,
                                     mesh=init_device_mesh("cpu", (1, 2) if "ulysses_degree" in degrees else (2, 1),
                                                          mesh_dim_names=("ring", "ulysses")))
    _enable(model.eval(), parallel)
    header = open_checkpoint(job["folder"])
    family, call = header.family, calls(setting, 1)[0]
    inputs = family.forward_arguments(call.latent.to(model.dtype), call.timestep,
                           {k: v.to(model.dtype) for k, v in call.conditioning.items()},
                           model.config)
    while True:
        again = torch.tensor([1 if rank == 0 and sys.stdin.readline() else 0])
        dist.broadcast(again, 0)
        if not again.item():
            break
        started_s = time.perf_counter()
        model(**inputs, return_dict=False)
        if rank == 0:
            print(time.perf_counter() - started_s, flush=True)
    dist.destroy_process_group()


def _enable(model, parallel):
    """Enable context parallelism. Without an accelerator diffusers would divide by their number, 0."""
    accelerator = torch.accelerator
    count, accelerator.device_count = accelerator.device_count, lambda: 1
    try:
        model.enable_parallelism(config=parallel)
    finally:
        accelerator.device_count = count


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        arguments = (json.loads(sys.argv[1]), f"{folder}/store")
        other = multiprocessing.get_context("spawn").Process(target=run, args=(1, *arguments), daemon=True)
        other.start()
        run(0, *arguments)
        other.join(10)
