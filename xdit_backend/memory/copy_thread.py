"""Asynchronous copies from system RAM to a device, in a thread of their own."""

import queue
import threading
import weakref
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial

import torch

from ..system import accelerator
from .numa import pci_address, stay_near


class CopyThread:
    """Makes copies in order in a thread; on a GPU on a stream of its own, synchronised with the compute stream in both
    directions.

    staging: StagingBuffers of its own, which are not thread-safe. The thread starts with the first copy, and ends with
    this object. On a machine with several NUMA nodes it runs near the GPU. is_pageable: whether copies from now on are
    made by the driver instead of through pinned chunks.
    """

    def __init__(self, device, staging):
        self._device, self._staging = device, staging
        self._module = accelerator.module(device)
        self._stream = self._module.Stream(device) if device.type != "cpu" else None
        self._settle = partial(stay_near, pci_address(device)) if device.type != "cpu" else lambda: None
        self._requested: queue.SimpleQueue = queue.SimpleQueue()
        self._thread, self.is_pageable = None, False

    def start(self, pairs):
        """Copy the first of each of these pairs to the second, after all work enqueued on the device so far. Returns
        the argument of `wait`."""
        if self._thread is None:
            self._thread = threading.Thread(target=_copy_all, name="xdit-copies", daemon=True,
                                            args=(self._requested, self._staging, self._module, self._stream,
                                                  self._settle))
            self._thread.start()
            # Also at exit of the process: a copy in a thread that outlives the interpreter would abort it.
            weakref.finalize(self, _end, self._requested, self._thread)
        computed = self._module.current_stream(self._device).record_event() if self._stream is not None else None
        copied: Future = Future()
        self._requested.put((pairs, self.is_pageable, computed, copied))
        return copied

    def wait(self, copied):
        """Make work enqueued from now on wait for these copies. Raises an error that one of them raised."""
        event = copied.result()
        if event is not None:
            self._module.current_stream(self._device).wait_event(event)

    def drain(self):
        """Wait until no copy is in progress."""
        if self._thread is not None:
            self.start([]).result()
            if self._stream is not None:
                self._stream.synchronize()


def _end(requested, thread):
    requested.put(None)
    if thread is not threading.current_thread():               # garbage collection may run in it
        thread.join()


def _copy_all(requested, staging, module, stream, settle):
    """The thread's function. It references nothing that must be freed before it ends. settle(): pins it to CPUs."""
    settle()
    with torch.inference_mode():                               # thread-local, as is the current stream
        while (job := requested.get()) is not None:
            pairs, is_pageable, computed, copied = job
            try:
                with module.stream(stream) if stream is not None else nullcontext():
                    if computed is not None:
                        stream.wait_event(computed)
                    copy = staging.copy_pageable if is_pageable else staging.copy
                    for source, target in pairs:
                        copy(source, target)
                    copied.set_result(None if stream is None else stream.record_event())
            except BaseException as error:  # noqa: BLE001
                copied.set_exception(error)
            del job, pairs, copied
