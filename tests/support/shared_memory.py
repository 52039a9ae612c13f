"""Process groups over shared memory in ranks that tests.support.ranks has joined by gloo."""

import datetime
import random
import time

import torch.distributed as dist

from tests.support import compare_single_device
from xdit_backend.distributed.shared_memory.process_group import BACKEND, SharedMemoryGroup, register

MAX_DELAY_S = 2e-3


def new_group(folder, timeout_s=60.0):
    """A group of all ranks. A collective. folder: common to the ranks."""
    register(folder)
    return dist.new_group(backend=BACKEND, timeout=datetime.timedelta(seconds=timeout_s))


def be_late(is_late, seed=0):
    """Have this process begin its operations after random delays, from now on."""
    if is_late:
        begin, rng = SharedMemoryGroup._begin, random.Random(seed)

        def begin_late(*arguments, **options):
            time.sleep(rng.random() * MAX_DELAY_S)
            return begin(*arguments, **options)
        SharedMemoryGroup._begin = begin_late


def execute(rank, world_size, runs, folder, late_rank):
    """compare_single_device.execute with shared memory in place of gloo. late_rank: see be_late; None: none."""
    dist.destroy_process_group()
    register(folder)
    dist.init_process_group(BACKEND, init_method=f"file://{folder}/shared memory", rank=rank, world_size=world_size)
    be_late(rank == late_rank)
    compare_single_device.execute(rank, world_size, runs)
