"""State of the panel: memory by owner, worker groups, the last run and its timeline, as plain values for JSON."""

import os

import psutil
import torch

from ....xdit_backend.config import ParallelConfig
from ....xdit_backend.memory.system_memory import available_memory
from ....xdit_backend.planner.descriptions import SHOWN_S, describe_method
from ....xdit_backend.protocol.devices import machine_of
from ....xdit_backend.protocol.errors import ConfigError
from ....xdit_backend.system import accelerator
from ..workers.settings import Idle, chosen_idle
from ..workers.worker_groups import GROUPS, devices_of, memory_of

OWNERS = ("weights", "keys_values", "activations", "vae", "workers", "parked", "comfyui", "other", "free")
SHORT_S = 1e-3                             # shorter transfers and waits for weights are left out of the timeline


def state():
    """Return the state of the panel without the timeline.

    devices: [{"name", "title", "total", "owners": {one of OWNERS: bytes}}]; the owners of each sum to the total.
    groups, run, phase: below. report: see ReportProcess.describe. residency: {"how": one of settings.IDLE_WAYS,
    "minutes"}, the policy for the memory of idle workers.
    """
    # during a run, heartbeats report memory, so that no message delays a step
    if not GROUPS.runs.is_running:
        for client in GROUPS.clients:
            if client.workers.state == "idle":
                GROUPS.runs.collect(client, client.report_if_idle)
    return {"devices": _devices(), "groups": [_group(client) for client in GROUPS.clients],
            "run": _run(GROUPS.runs.last), "phase": GROUPS.runs.phase, "residency": vars(_residency()),
            "report": GROUPS.report.describe()}


def timeline():
    """Return the last run's spans: {"run": its number, "seconds", "steps", "ranks": [{"name", "spans": [...]}]}.

    A span is [kind, start, end, step, first row], in seconds since the run began; steps are numbered from 1 by
    descending sigma, 0 is none.
    """
    run = GROUPS.runs.last
    if run is None:
        return {"run": 0, "seconds": 0.0, "steps": 0, "ranks": []}
    every = sorted(run.spans.items())
    times = sorted({span.time for _, spans in every for span in spans if span.time >= 0}, reverse=True)
    numbers = {time: number for number, time in enumerate(times, 1)}
    ranks = [{"name": f"{rank}: {devices[rank]}", "spans": [
        [span.kind, span.start_s - run.began_s, span.end_s - run.began_s, numbers.get(span.time, 0), span.first_row]
        for span in sorted(spans, key=lambda span: span.start_s) if span.kind not in ("exchange", "weights")
        or span.end_s - span.start_s >= SHORT_S]}
        for (devices, rank), spans in every]
    seconds = max([run.elapsed_s, *(span[2] for rank in ranks for span in rank["spans"])])
    return {"run": run.number, "seconds": seconds, "steps": len(times), "ranks": ranks}


def trace():
    """Return the timeline in the Trace Event Format of Perfetto and chrome://tracing: complete events in microseconds,
    one thread for each rank."""
    events = []
    for number, rank in enumerate(timeline()["ranks"]):
        events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number,
                       "args": {"name": f"rank {rank['name']}"}})
        events += [{"name": f"{kind} {step}" if step else kind, "cat": kind, "ph": "X", "pid": 0, "tid": number,
                    "ts": start * 1e6, "dur": (end - start) * 1e6, "args": {"step": step, "first_row": first_row}}
                   for kind, start, end, step, first_row in rank["spans"]]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def start_report():
    """Start the report of this machine's devices in a process of its own. The workers end, so that it has the devices'
    memory."""
    GROUPS.stop()
    GROUPS.report.start()


def measure_again():
    """Measure the most recently used devices again, see Groups.measure_again."""
    if GROUPS.report.is_running:
        raise ConfigError("Wait for the report, or cancel it: it is still running.")
    run = GROUPS.runs.last
    GROUPS.measure_again((run and run.dtype) or "bfloat16")


ACTIONS = {"give_back": GROUPS.give_back, "stop": GROUPS.stop, "measure": measure_again}


# --- memory ---

def add_up(total, owners):
    """Add the free memory, so that owners sum to the total. Owners that exceed it (past peaks) are cut."""
    left, result = int(total), {}
    for name in OWNERS[:-1]:
        result[name] = min(left, max(0, int(owners.get(name, 0))))
        left -= result[name]
    return result | {"free": left}


def _devices():
    names = dict.fromkeys(name for client in GROUPS.clients for name in client.devices)
    if not names:
        try:
            names = dict.fromkeys(devices_of(ParallelConfig()))
        except ConfigError:                                    # no usable device; the node shows the error
            names = {}
    gpus = sorted(name for name in names if not machine_of(name) and name != "cpu")
    return [*map(_gpu, gpus), _host()]


def _ranks(device):
    """Last memory reports of the ranks on a device."""
    return [client.memory[rank] for client in GROUPS.clients for rank, name in enumerate(client.devices)
            if name == device and rank in client.memory]


def _gpu(name):
    ranks, own, weights = _ranks(name), 0, 0
    for client in GROUPS.clients:
        for model_memory in filter(None, map(client.models.memory, client.models.names)):
            weights += sum(num_bytes - parked for device, num_bytes, parked in zip(
                client.devices, model_memory.weight_bytes, model_memory.parked_bytes) if device == name)
    if accelerator.module().is_initialized():
        own = accelerator.module().memory_reserved(torch.device(name))
    total = memory_of(name)
    known = {"weights": weights, "keys_values": _sum(ranks, "most_kept_bytes"), "vae": _sum(ranks, "vae_bytes"),
             "comfyui": own}
    known["activations"] = max(0, _sum(ranks, "activation_bytes") - known["keys_values"])
    reserved = _sum(ranks, "reserved_bytes")
    known["workers"] = max(0, reserved
                           - sum(known[owner] for owner in ("weights", "keys_values", "activations", "vae")))
    if ranks:
        known["other"] = total - min(rank["unused_bytes"] for rank in ranks) - reserved - own
    return {"name": name, "title": GROUPS.gpu_of(name)[0], "total": total,
            "known": bool(ranks), "owners": add_up(total, known)}


def _host():
    """System RAM of this machine: of CPU workers, and of weights that other workers have parked or offloaded. Pages of
    memory-mapped files count once."""
    (available, limit), ranks = available_memory(), _ranks("cpu")
    mapped = unmapped = parked = 0
    for client in GROUPS.clients:
        for model_memory in filter(None, map(client.models.memory, client.models.names)):
            for part in model_memory.parts:                    # ranks with the same weights
                num_bytes, most = model_memory.weight_bytes[part[0]], max(model_memory.parked_bytes[rank]
                                                                          for rank in part)
                parked += most + model_memory.offloaded_bytes[part[0]]
                if "cpu" in client.devices:
                    own = model_memory.unmapped_bytes[part[0]]
                    mapped += (num_bytes - own) * (num_bytes - most) // max(1, num_bytes)
                    unmapped += own * len(part) * (num_bytes - most) // max(1, num_bytes)
    cached = _sum(ranks, "most_kept_bytes")
    activations = max(0, _sum(ranks, "activation_bytes") - cached)
    vae = max([rank.get("vae_bytes", 0) for rank in ranks], default=0)
    processes = _sum(ranks, "reserved_bytes") + sum(
        _sum(_ranks(name), "host_bytes") for client in GROUPS.clients for name in set(client.devices)
        if not machine_of(name) and name != "cpu")
    own = psutil.Process().memory_info()
    comfyui = own.rss - getattr(own, "shared", 0)
    other = limit - available - processes - comfyui
    known = {"weights": mapped + unmapped, "keys_values": cached, "activations": activations, "vae": vae,
             "parked": parked,
             "workers": max(0, processes - unmapped - cached - activations - vae), "comfyui": comfyui, "other": other}
    return {"name": "cpu", "title": f"{os.cpu_count()} cores", "total": limit, "known": True,
            "owners": add_up(limit, known)}


def _sum(ranks, name):
    return sum(rank.get(name, 0) for rank in ranks)


# --- groups and the run ---

def _group(client):
    models = [{"name": name, "weights": model_memory.weight_bytes, "parked": model_memory.parked_bytes,
               "offloaded": model_memory.offloaded_bytes}
              for name in client.models.names if (model_memory := client.models.memory(name)) is not None]
    return {"devices": list(client.devices), "state": client.workers.state, "models": models,
            "vaes": len(client.autoencoders.names)}


def _residency():
    try:
        return chosen_idle()
    except ConfigError:                                        # logged by the idle timeout; weights stay in VRAM
        return Idle()


def _run(run):
    if run is None:
        return None
    run.update_from_remote()
    one = run.on_one_device if run.num_working > 1 else None
    plan = run.plan and {
        "chosen": _estimate(run.plan.chosen, run.num_steps), "one_fits": run.plan.one.fits,
        "second": next((_estimate(other, run.num_steps) for other in run.plan.ordered
                        if other.degrees != run.plan.chosen.degrees), None)}
    return {"number": run.number, "prompt": run.prompt, "file": run.file, "devices": list(run.devices),
            "state": run.state, "error": run.error, "how": run.how, "kernels": run.backends,
            "why_no_plan": run.why_no_plan,
            "step": run.step, "steps": run.num_steps, "seconds": round(run.elapsed_s, 2),
            "a_step": round(run.seconds_per_step, 4), "streamed": run.streamed_bytes, "plan": plan,
            "working": run.num_working,
            "on_one": one and {"a_step": round(one.step_s, 4), "date": one.date}}


def _estimate(one, num_steps):
    """Layout and estimate a step of an Estimate; a_step and limited_by are None for a run that is too short to be
    estimated to the user."""
    methods = describe_method(lambda axis: getattr(one.degrees, axis)) if one.working > 1 else []
    is_shown = one.seconds >= SHOWN_S and num_steps > 0
    return {"methods": methods, "a_step": one.seconds / num_steps if is_shown else None,
            "limited_by": one.limited_by if is_shown else None}
