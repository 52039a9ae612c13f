"""Makes the packages importable under the names production uses, and checks that the tests leave nothing behind.

The repository's folder is not on sys.path: its nodes/ would shadow ComfyUI's nodes.py.
"""

import gc
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("XDIT_SHARED_DEVICES", "1")              # as many CPU workers as a test needs, on any machine


def _provide(name):
    """Make the package in ROOT / name importable without its parent folder on sys.path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / name / "__init__.py",
                                                      submodule_search_locations=[str(ROOT / name)])
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


_provide("tests")
_provide("xdit_backend")

from tests.programs import slow_tier  # noqa: E402
from tests.support import ordering, tiers, windows  # noqa: E402
from tests.support.worker_processes import FOLDER, host_of, kind_of  # noqa: E402


class NotedPopen(subprocess.Popen):
    """Notes the processes that tests start: what a dead host left is theirs, or that of tests which run beside them."""

    pids = set()

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.pids.add(self.pid)


subprocess.Popen = NotedPopen


def left_behind():
    """Segments' folders and worker processes that exist now,
    but for those of a host that tests here have not started."""
    folders = [str(path) for base in {"/dev/shm", tempfile.gettempdir()} if os.path.isdir(base)
               for path in Path(base).glob("xdit-*-*")]
    processes = []
    for process in psutil.process_iter():
        kind = kind_of(process)
        with suppress(psutil.Error, ValueError, IndexError):   # it ends at this moment
            if (kind is not None and (kind != "forkserver" or not psutil.pid_exists(host_of(process)))
                    and _counts(host_of(process))):
                processes.append(f"{process.pid} {kind}")      # a forkserver lives as long as its host
    return [folder for folder in folders if (host := FOLDER.search(folder)) and _counts(int(host[1]))] + processes


def still_there(before, within_s=120):
    """What is left behind beside `before`, after waiting so long for it to go; it takes a few seconds."""
    deadline_s = time.monotonic() + within_s
    while (left := set(left_behind()) - before) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def _counts(host_pid):
    if host_pid in NotedPopen.pids:
        return True
    try:
        host = psutil.Process(host_pid)
    except psutil.NoSuchProcess:
        return False
    return os.getpid() in (host_pid, *(parent.pid for parent in host.parents()))


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory):
    """No test leaves a process or a file in shared memory. What workers print is kept with what tests write."""
    os.environ["XDIT_LOG_FOLDER"] = str(tmp_path_factory.mktemp("logs"))
    before = set(left_behind())
    yield
    assert not (left := still_there(before)), f"left behind: {sorted(left)}"


def _common_state():
    """What the tests of a process have in common, and a careless one would leave otherwise than it found it."""
    import torch
    environment = {name: value for name, value in os.environ.items()
                   if name.startswith(("XDIT_", "NCCL_", "DIFFUSERS_", "PYTHON", "LC_"))}
    return {"gradients": torch.is_grad_enabled(), "default type": torch.get_default_dtype(),
            "threads": torch.get_num_threads(),
            "folder": os.getcwd(), "log level": logging.getLogger().level, "garbage collection": gc.isenabled(),
            "alarm": signal.getsignal(signal.SIGALRM) if hasattr(signal, "SIGALRM") else None, **environment}


@pytest.fixture(autouse=True)
def nothing_changed_for_others():
    """Tests may run in any order, and alone."""
    before = _common_state()
    yield
    after = _common_state()
    changed = {name: (before.get(name), after.get(name)) for name in before | after
               if before.get(name) != after.get(name)}
    assert not changed, f"changed for the tests that follow: {changed}"


@pytest.fixture(scope="session")
def supervisor():
    """What workers are forked from: one for all tests of this process, which so import their libraries once."""
    from xdit_backend.host.local_supervisor import local_supervisor
    server = local_supervisor()
    yield server
    server.close()


@pytest.fixture(scope="session")
def node():
    """The program that runs the page's modules without a page."""
    from tests.support.page_modules import node_program
    return node_program()


@pytest.fixture(scope="session")
def modules(tmp_path_factory):
    """The folder of the page's modules, which `node` can import."""
    from tests.support.page_modules import write_modules
    return write_modules(tmp_path_factory.mktemp("web"))


@pytest.fixture(autouse=True)
def seeded():
    """What a test draws does not depend on the tests before it."""
    import torch
    torch.manual_seed(0)


def pytest_addoption(parser):
    ordering.add_options(parser)
    slow_tier.add_options(parser)
    parser.addoption("--tolerances", action="store_true",
                     help="print, for every comparison of numbers, the largest error that was met beside the one "
                          "allowed")


def pytest_configure(config):
    ordering.choose_seeds(config)
    slow_tier.configure(config)
    busy = ordering.start_busy(config)
    config.add_cleanup(lambda: [process.kill() or process.wait() for process in busy])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    ordering.skip_after(item.config.option.until)


def pytest_configure_node(node):
    """Of pytest-xdist: before it starts a process."""
    node.workerinput.update({name: getattr(node.config.option, name) for name in ordering.SEEDS},
                            **slow_tier.for_processes(node.config))


def pytest_report_header(config):
    return ordering.header(config) + slow_tier.header(config)


def pytest_testnodedown(node):
    """Of pytest-xdist: when a process of it has ended."""
    tiers.take_count(node.config, getattr(node, "workeroutput", {}))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        tiers.give_count(session.config, session.config.workeroutput)


def pytest_terminal_summary(terminalreporter, config):
    terminalreporter.section("dearest files")
    terminalreporter.write_line("\n".join(tiers.dearest_files(terminalreporter)))
    for line in (tiers.summary(terminalreporter, config), *slow_tier.report(config, terminalreporter.stats)):
        terminalreporter.write_line(line)
    if config.getoption("tolerances"):
        from tests.support.tolerances import COMPARISONS, report
        terminalreporter.section("largest errors met, the loosest tolerance first")
        terminalreporter.write_line("\n".join(report(COMPARISONS)))


def pytest_collection_finish():
    """The libraries' objects stay: the garbage collector, which takes a second for all of them,
    need not look at them again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    import torch

    ordering.arrange(items, config.option.order, config.option.order_seed)

    tiers.mark(items)
    tiers.skip_lacking(items)
    slow_tier.select(config, items)
    tiers.count_left_out(config, items)
    windows.skip(items)
    if not torch.cuda.is_available():
        for item in items:
            if tiers.is_marked(item, "gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if lacking := [name for name in ("torchao", "bitsandbytes") if importlib.util.find_spec(name) is None]:
        for item in items:
            if tiers.is_marked(item, "quantisers"):
                item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(lacking)}: start.py test runs it with "
                                                        f".host/quantisers"))
