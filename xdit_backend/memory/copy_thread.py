"""Copies from host memory to a device that are made while the device computes. Used by offload/block_offload.py."""

import queue
import threading
import weakref
from concurrent.futures import Future
from functools import partial

import torch

from .numa import pci_address, stay_near


class CopyThread:
    """Makes copies in the order in which they are asked for, in a thread: on CUDA on a stream of its own, which waits
    for the stream that computes, and that one for it.

    staging: StagingBuffers of its own, since those are not for several threads. The thread begins with the first copy,
    and ends with this object. It runs near the card, where the machine has several NUMA nodes. is_pageable: do copies
    that are asked for from now on go by the driver, and not through page-locked pieces?
    """

    def __init__(self, device, staging):
        self._device, self._staging = device, staging
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._place = partial(stay_near, pci_address(device)) if device.type == "cuda" else lambda: None
        self._requested: queue.SimpleQueue = queue.SimpleQueue()
        self._thread, self.is_pageable = None, False

    def start(self, pairs):
        """Copy each first of these pairs into its second, once the device has done all that it has been asked for until
        now. Returns what `wait` takes."""
        if self._thread is None:
            self._thread = threading.Thread(target=_copy_all, name="xdit-copies", daemon=True,
                                            args=(self._requested, self._staging, self._stream, self._place))
            self._thread.start()
            # Also when the process ends: a copy in a thread that outlives the interpreter would abort it.
            weakref.finalize(self, _end, self._requested, self._thread)
        computed = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        copied: Future = Future()
        self._requested.put((pairs, self.is_pageable, computed, copied))
        return copied

    def wait(self, copied):
        """What the device is asked for from now on finds these copies made. Raises what one of them has raised."""
        event = copied.result()
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def drain(self):
        """Wait until no copy is under way."""
        if self._thread is not None:
            self.start([]).result()
            if self._stream is not None:
                self._stream.synchronize()


def _end(requested, thread):
    requested.put(None)
    if thread is not threading.current_thread():               # in which garbage may be collected too
        thread.join()


def _copy_all(requested, staging, stream, place):
    """The thread. It refers to nothing that has to end before it does. place(): have it run where it should."""
    place()
    with torch.inference_mode():                               # a thread's own, as the current stream is
        while (job := requested.get()) is not None:
            pairs, is_pageable, computed, copied = job
            try:
                with torch.cuda.stream(stream):                # without one it does nothing
                    if computed is not None:
                        stream.wait_event(computed)
                    copy = staging.copy_pageable if is_pageable else staging.copy
                    for source, target in pairs:
                        copy(source, target)
                    copied.set_result(None if stream is None else stream.record_event())
            except BaseException as error:  # noqa: BLE001
                copied.set_exception(error)
            del job, pairs, copied
