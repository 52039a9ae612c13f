"""Runs a test's function on several real processes joined by gloo. Called by every test of code that communicates.

    def sum_of_ranks(rank, world_size, start): ...      # at the top level of a test module

    assert run_ranks(sum_of_ranks, 4, 10) == [16, 16, 16, 16]
"""

import datetime
import faulthandler
import importlib.util
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import psutil


class RankError(Exception):
    """A rank died, hung, or raised what cannot be pickled; or the traceback of what it raised, as that one's cause."""


def run_ranks(function, world_size, *args, timeout_s=900):
    """Call function(rank, world_size, *args) on each of `world_size` processes and return their results by rank.

    The function stands at the top level of a test module; it runs on one thread, with gloo initialised.
    Arguments and results are pickled. What the first failing rank raised is raised here; a rank that was killed
    or is not done after `timeout_s` raises RankError. No process is left in any case.
    """
    return [result for result, in _run(function, world_size, [args], timeout_s)]


def run_cases(function, world_size, cases, timeout_s=1800):
    """As run_ranks(function, world_size, *case) of each case, one after the other on one set of processes.

    Returns for each case its results by rank, or what was raised: where one fails, each runs by itself, since it may
    leave ranks apart.
    """
    try:
        return list(zip(*_run(function, world_size, cases, timeout_s)))
    except Exception:
        return [_outcome(function, world_size, case) for case in cases]


def _outcome(function, world_size, case):
    try:
        return run_ranks(function, world_size, *case)
    except Exception as error:
        return error


def _run(function, world_size, cases, timeout_s):
    """[results of each case] by rank."""
    assert function.__qualname__.isidentifier(), f"{function.__qualname__} is not at the top level of its module"
    context = _supervisor()
    call = pickle.dumps((function.__name__, cases))
    connections, processes = [], []
    with tempfile.TemporaryDirectory(prefix="xdit-ranks-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                source = (function.__module__, function.__code__.co_filename)
                job = (*source, call, rank, world_size, folder, timeout_s, theirs)
                # By path: the server cannot import this file, and nothing it can import is ours.
                process = context.Process(
                    target=runpy.run_path, args=(__file__, {"JOB": job}, "rank"), name=f"rank{rank}", daemon=True
                )
                process.start()
                theirs.close()
                connections.append(ours)
                processes.append(process)
            results = _collect(connections, processes, folder, timeout_s)
            for connection in connections:
                connection.close()  # the ranks wait for this before they leave the group
            for process in processes:
                process.join(5)
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _supervisor():
    """The server that ranks are forked from, which has imported all that they need: 8 s for the first ranks, 0.2 s for
    later ones.

    It finds the module by a folder of its own, since the repository's must not be on sys.path (see conftest.py).
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():            # on Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["imported_before_ranks"])
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).with_name("preload")), path]))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path
    return context


def _collect(connections, processes, folder, timeout_s):
    results, failures, deaths = {}, [], []
    deadline_s = time.monotonic() + timeout_s
    pending = dict(zip(connections, range(len(connections))))
    while pending and not (failures or deaths):
        ready = multiprocessing.connection.wait(pending, max(0, deadline_s - time.monotonic()))
        if not ready:
            raise RankError(f"not done after {timeout_s} s:\n{_stacks(pending.values(), processes, folder)}")
        for connection in ready:
            try:
                kind, payload = pickle.loads(connection.recv_bytes())
            except EOFError:
                deaths.append(pending.pop(connection))
                continue
            rank = pending.pop(connection)
            if kind == "result":
                results[rank] = pickle.loads(payload)
            else:
                failures.append((rank, *payload))

    if failures and not deaths:
        # A killed rank also fails its neighbours, who may report it before its own pipe closes.
        deaths = [pending[c] for c in multiprocessing.connection.wait(pending, 0.2) if _at_end(c)]
    if deaths:
        processes[deaths[0]].join(5)
        raise RankError(f"rank {deaths[0]} died with exit code {processes[deaths[0]].exitcode}")
    if failures:
        rank, exception, text = failures[0]
        cause = RankError(f"rank {rank} of {len(processes)}:\n{text}")
        if exception is None:
            raise cause
        raise pickle.loads(exception) from cause
    return [results[rank] for rank in range(len(processes))]


def _at_end(connection):
    try:
        connection.recv_bytes()
    except EOFError:
        return True
    return False


def _stacks(ranks, processes, folder):
    for rank in ranks if hasattr(faulthandler, "register") else ():            # Windows has no such signal
        os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)
    return "\n".join(f"rank {rank}:\n{Path(folder, f'stack{rank}').read_text()}" for rank in ranks)


def _rank(module_name, module_path, call, rank, world_size, folder, timeout_s, connection):
    """The life of one rank, in its own process."""
    import torch
    import torch.distributed as dist

    stack = open(Path(folder, f"stack{rank}"), "w")
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, stack)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for name, addresses in psutil.net_if_addrs().items()
                                            if any(each.address == "127.0.0.1" for each in addresses))
    dist.init_process_group(
        "gloo",
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        function_name, cases = _load(module_name, module_path, call)
        function = getattr(sys.modules[module_name], function_name)
        report = ("result", pickle.dumps([function(rank, world_size, *case) for case in cases]))
    except BaseException as error:  # whatever it was, it belongs to the test
        report = ("failure", (_pickled_or_none(error), traceback.format_exc()))
    connection.send_bytes(pickle.dumps(report))
    # Stay in the group until the test has heard all ranks: who leaves early fails others and hides who failed first.
    connection.poll(None)
    if dist.is_initialized():
        dist.destroy_process_group()


def _load(module_name, module_path, call):
    """Import the test module under the name pytest gave it, so that its classes and functions can be pickled."""
    runpy.run_path(str(Path(__file__).parent.parent / "conftest.py"))  # makes our packages importable
    spec = importlib.util.spec_from_file_location(module_name, module_path)
    sys.modules[module_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module_name])
    return pickle.loads(call)


def _pickled_or_none(error):
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:  # any class may refuse to be pickled in its own way
        return None
    return pickled


if __name__ == "rank":
    _rank(*JOB)  # noqa: F821, given by run_path
