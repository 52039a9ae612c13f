"""Command loop of a worker: receive, execute and answer the host's commands."""

import collections
import gc
import itertools
import logging
import os
import queue
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ..attention.backends import unusable
from ..distributed.mesh import backend_for, group_options, group_timeout
from ..distributed.shared_memory.process_group import register as register_shared_memory
from ..protocol import timeouts
from ..protocol.channel import connect
from ..protocol.devices import machine_of, own_name
from ..protocol.errors import ChannelClosedError, LinkError, WorkerStartError
from ..protocol.messages import (
    JOINING,
    STARTING,
    TRYING_LINKS,
    Abort,
    Done,
    Failed,
    Heartbeat,
    Phase,
    Ready,
    StartFailed,
    Stop,
    StoreReply,
)
from ..protocol.shared_memory import discard, folders_of
from ..system import accelerator
from .engine import Engine
from .host_store import open_store
from .log_rotation import keep_small
from .preflight import prepare_device, try_links

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0                                 # maximum interval of heartbeats during a command
BEATS = 4                                         # minimum number of heartbeats in XDIT_SILENCE_TIMEOUT_S
PREFETCHED = 3                                    # commands whose receives are posted: the current one and two ahead


def serve(folder, rank, devices, log_file):
    """Join the process group through its store, report to the host, and serve it until it sends Stop or is gone.

    log_file: of this process's output.
    """
    channel = connect(folder)
    store = open_store(folder, rank, devices, channel.send)    # referenced until the process group is destroyed
    channel.send(Phase(rank, STARTING))
    commands, busy, ready, aborted = queue.SimpleQueue(), threading.Event(), threading.Event(), set()
    threading.Thread(target=_heartbeat_until, args=(ready, channel, rank), daemon=True).start()
    threading.Thread(target=_read, args=(channel, commands, aborted, store, folder), daemon=True).start()
    device = torch.device(own_name(devices[rank]))
    torch.set_grad_enabled(False)
    try:
        prepare_device(device)
        _join(channel, rank, devices, device, store, folder)
    except (WorkerStartError, LinkError) as error:
        log.exception("cannot start")
        channel.send(StartFailed(rank, str(error), isinstance(error, LinkError)))
        # the host ends all processes: if this rank exited, others would abort
        threading.Event().wait()
    # the libraries' objects stay: garbage collection is faster without them
    gc.freeze()
    engine = Engine(rank, device, lambda *phase: channel.send(Phase(rank, *phase)), aborted,
                    tuple(map(machine_of, devices)))
    ready.set()
    channel.send(Ready(rank, os.getpid(), devices[rank], unusable(device)))
    threading.Thread(target=_heartbeat, args=(channel, engine, busy, log_file), daemon=True).start()
    waiting = collections.deque()
    while True:
        while not waiting or not commands.empty():
            waiting.append(_next(commands, engine.memory))
        prefetch_ahead(engine, itertools.islice(waiting, PREFETCHED))
        command = waiting.popleft()
        if isinstance(command, Stop):
            break
        busy.set()
        try:
            numbers = engine.execute(command)
            reply = Done(command.request, rank, numbers or {}, engine.spans_for(command),
                         engine.traffic.entered)
        except Exception as error:                             # all failures are reported to the host
            log.exception("command %s failed", type(command).__name__)
            reply = _failed(command, engine, devices[rank], error)
        if isinstance(reply, Failed):                          # by now nothing refers to the command's tensors
            engine.memory.give_back()
        busy.clear()
        channel.send(reply)
    dist.destroy_process_group()


def _join(channel, rank, devices, device, store, folder):
    """Join the process group, and test the links between its ranks."""
    backend = backend_for(devices, accelerator.has_nccl(), os.environ.get("XDIT_TRANSPORT", "").strip())
    register_shared_memory(folder)
    channel.send(Phase(rank, JOINING))
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=len(devices), timeout=group_timeout(),
                                device_id=device if backend == "nccl" else None, pg_options=group_options(backend))
    except (RuntimeError, OSError) as error:                   # NCCL connects its ranks here
        raise LinkError(f"rank {rank} ({device}) could not join the others: {type(error).__name__}: {error}") from error
    if len(devices) > 1:
        channel.send(Phase(rank, TRYING_LINKS))
        try_links(rank, devices, device)


def _failed(command, engine, device, error):
    """The Failed message for an exception of a command. Called while the exception is handled."""
    numbers, traffic = engine.out_of_memory(error), engine.traffic
    return Failed(command.request, engine.rank, device, "OutOfMemoryError" if numbers else type(error).__name__,
                  str(error), traceback.format_exc(), numbers, traffic.entered, traffic.is_broken, traffic.block)


def _next(commands, memory):
    """Wait for the next command; frees memory cached by earlier runs if none arrives for a while."""
    while True:
        try:
            return commands.get(timeout=memory.idle_timeout_s)
        except queue.Empty:
            memory.give_back()


def prefetch_ahead(engine, commands):
    """Post the receives of the current command and of the following ones, up to the first that cannot be prepared.

    Stops before a command with another layout: its step may be a collective of all ranks, and a receive that is posted
    before it would wait for a rank that sends only after that step.
    """
    layouts = set()
    for command in commands:
        layouts.add(getattr(command, "layout", None))
        if len(layouts) > 1 or not _prefetch(engine, command):
            break


def _prefetch(engine, command):
    try:
        return engine.prefetch(command)
    except Exception:                                          # it fails again, and is reported, when it is executed
        log.exception("cannot prepare %s", type(command).__name__)
        return False


def _interval_s():
    return min(HEARTBEAT_S, timeouts.seconds("XDIT_SILENCE_TIMEOUT_S") / BEATS)


def _heartbeat_until(ready, channel, rank):
    """Send heartbeats before there is an engine, while this process may wait for other ranks to join."""
    with suppress(ChannelClosedError):                         # _read ends the process
        while not ready.wait(_interval_s()):
            channel.send(Heartbeat(rank, 0, 0, False))


def _heartbeat(channel, engine, busy, log_file):
    """Send heartbeats with progress and memory use during commands, and limit the size of the log file."""
    try:
        while True:
            busy.wait()
            time.sleep(_interval_s())
            keep_small(log_file)
            if busy.is_set():
                channel.send(Heartbeat(engine.rank, engine.request, *engine.traffic.progress(), engine.memory.report(),
                                       dict(engine.traffic.entered)))
    except ChannelClosedError:
        pass                                                   # _read ends the process


def _read(channel, commands, aborted, store, folder):
    """Receive commands; when the host is gone, remove the group's files and end this process at once."""
    try:
        while True:
            command = channel.receive()
            if isinstance(command, Abort):
                aborted.add(command.request)
                continue
            if isinstance(command, StoreReply):
                store.take(command)
                continue
            commands.put(command)
            if isinstance(command, Stop):
                return
    except ChannelClosedError:
        for left in folders_of(Path(folder).name):
            discard(left)
        os._exit(1)
