"""A pytest plugin that runs tests with workers on a device of another type, "fakegpu", to find code that names a type.

    PYTHONPATH=. pytest -p tests.support.renamed_device tests/unit/host/test_client.py

Workers on "cpu" run on "fakegpu:0", "fakegpu:1" instead. Their device has that type everywhere, and torch has a module
of that name. Its tensors are CPU tensors, since torch creates them on the CPU.
"""

import contextlib
import os
import sys
import tempfile
import threading
import time
import types

TYPE, NUM_DEVICES, TOTAL_BYTES = "fakegpu", 4, 2 ** 34
CUSTOMIZE = "from tests.support.renamed_device import install\ninstall()\n"


def pytest_configure(config):
    folder = tempfile.mkdtemp()
    with open(os.path.join(folder, "sitecustomize.py"), "w") as file:
        file.write(CUSTOMIZE)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, root, os.environ.get("PYTHONPATH"))))
    install()
    _rename_workers()


def install():
    """Give torch the device type in this process."""
    import torch
    if hasattr(torch, TYPE):
        return
    torch.utils.rename_privateuse1_backend(TYPE)
    torch._register_device_module(TYPE, device_module())
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device(TYPE)
    mode = _on_cpu()
    mode.__enter__()                                           # of this thread
    run = threading.Thread.run

    def run_in_mode(thread):
        with mode:
            run(thread)
    threading.Thread.run = run_in_mode


def _on_cpu():
    import torch
    from torch.overrides import TorchFunctionMode

    def moved(argument):
        is_here = (argument.type == TYPE if isinstance(argument, torch.device)
                   else isinstance(argument, str) and argument.partition(":")[0] == TYPE)
        return torch.device("cpu") if is_here else argument

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is torch.Tensor.pin_memory:
                return args[0]
            if function is torch.device:
                return function(*args, **kwargs or {})
            kwargs = {name: moved(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
            return function(*map(moved, args), **kwargs)
    return OnCpu()


class Stream:
    """A stream that has done all of its work."""

    def __init__(self, device=None):
        pass

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def wait_event(self, event):
        pass

    wait_stream = wait_event

    def synchronize(self):
        pass


class Event:
    def __init__(self, **options):
        self._s = 0.0

    def record(self, stream=None):
        self._s = time.perf_counter()

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 1000 * (other._s - self._s)


def device_module():
    """torch's module for the type."""
    import torch
    module = types.ModuleType(f"torch.{TYPE}")
    properties = types.SimpleNamespace(name="Fake GPU", total_memory=TOTAL_BYTES, max_compute_units=8)
    zero = dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_allocated", "current_device"),
                         lambda device=None: 0)
    nothing = dict.fromkeys(("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device", "init",
                             "manual_seed_all", "manual_seed"), lambda *_: None)
    vars(module).update(
        Stream=Stream, Event=Event, current_stream=lambda device=None: Stream(),
        stream=lambda stream: contextlib.nullcontext(), is_available=lambda: True, device_count=lambda: NUM_DEVICES,
        is_initialized=lambda: False, _is_in_bad_fork=lambda: False, get_amp_supported_dtype=lambda: [torch.float16],
        get_device_properties=lambda device: properties,
        mem_get_info=lambda device=None: (TOTAL_BYTES // 2, TOTAL_BYTES), **zero, **nothing)
    return module


def _rename_workers():
    from xdit_backend.host import client, launcher, torchrun, workers
    environment_of = torchrun.environment_of
    # for tests with a sitecustomize of their own
    torchrun.environment_of = lambda *of: environment_of(*of) | {"TEST_DEVICE": TYPE}

    def renamed(devices):
        return tuple(f"{TYPE}:{rank}" if name == "cpu" else name for rank, name in enumerate(devices))

    class Renamed(launcher.WorkerGroup):
        def __init__(self, devices, *arguments, **options):
            super().__init__(renamed(devices), *arguments, **options)
    assert "xdit_backend.host.client" in sys.modules
    workers.WorkerGroup = Renamed
    init = client.Client.__init__

    def start(self, devices, *arguments, **options):
        init(self, renamed(devices), *arguments, **options)
    client.Client.__init__ = start
