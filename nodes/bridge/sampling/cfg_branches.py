"""CFG branches as coroutines: cond and uncond ask for their predictions at the same time, however ComfyUI calls the
model.

ComfyUI evaluates its branches one after the other when they cannot be batched. Here each branch runs ComfyUI's own code
in a greenlet of its own; when all wait for the model, their calls go to the workers as one prediction.
"""

import contextvars
import math
from dataclasses import dataclass, replace

import torch
from greenlet import getcurrent, greenlet

import comfy.conds
import comfy.samplers

from ....xdit_backend.host.calls import Call

MAX_BRANCHES = 2                           # what one prediction takes


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A call of a diffusion model by ComfyUI."""

    remote: object                         # the RemoteModel that was called
    call: Call
    schedule: torch.Tensor | None          # the sigmas of the run; None outside of a sampler
    sigmas: torch.Tensor                   # of the call
    num_branches: int = 1                  # that ComfyUI has put into its batch, one after the other
    # with PipeFusion: what reasons.why_synchronous and why_drained have said
    synchronous_reason: str | None = None
    drained_reason: str | None = None

    @property
    def step(self):
        """Which step of a run it belongs to, for a person; "" outside of a sampler."""
        if self.schedule is None or len(self.schedule) < 2:
            return ""
        steps = self.schedule[:-1]
        # samplers also call between two steps
        nearest = (steps.to(self.sigmas) - self.sigmas.max()).abs().argmin()
        return f"step {int(nearest) + 1} of {len(steps)}"

    def halves(self):
        """The call as two, of one branch each."""
        call = self.call
        batch = call.latent.shape[0]
        parts = [slice(0, batch // 2), slice(batch // 2, batch)]

        def half(part):
            cut = lambda tensor: tensor[part] if tensor.shape[0] == batch else tensor  # noqa: E731
            conditioning, call_conditioning = ({name: cut(tensor) for name, tensor in given.items()}
                                    for given in (call.conditioning, call.call_conditioning))
            return replace(call, latent=call.latent[part], timestep=call.timestep[part], conditioning=conditioning,
                           name="", control=call.control_by(cut),
                           scores=None if call.scores is None else call.scores[:, part],
                           cached=call.cached and replace(call.cached, rows=call.cached.rows[part]),
                           networks=tuple((replace(use, rows=use.rows[part]), network)
                                          for use, network in call.networks),
                           left_out={name: cut(tensor) for name, tensor in call.left_out.items()},
                           call_conditioning=call_conditioning,
                           parts={name: tensor[part] for name, tensor in call.parts.items()})
        return [half(part) for part in parts]


class Task(greenlet):
    """A coroutine with context variables of its own, as ComfyUI's code expects of a thread of work."""

    def __init__(self, run):
        super().__init__(run)
        self.gr_context = contextvars.copy_context()


def end_tasks(tasks):
    """End those that have begun and not come to their end."""
    for task in tasks:
        if task and not task.dead:
            task.throw()


class BranchTask(Task):
    """A coroutine that evaluates one branch. It hands its parent the calls that it makes of the model."""


def ask(model_call):
    """The prediction for one call: at once, or together with the other branches' calls."""
    current = getcurrent()
    if isinstance(current, BranchTask):
        return current.parent.switch(model_call)
    return answer([model_call])[0]


def answer(model_calls):
    """The predictions for calls of one model, at most MAX_BRANCHES of them."""
    first = model_calls[0]
    together = first.num_branches != MAX_BRANCHES or first.call.guided
    if len(model_calls) == 1 and not together and first.remote.runs_branches_separately():
        return [torch.cat(first.remote.predict(first, first.halves()))]
    return first.remote.predict(first, [model_call.call for model_call in model_calls])


TEXT = "c_crossattn"


def as_in_one_batch(conds, x, timestep):
    """ComfyUI's conds with their texts as long as ComfyUI makes them in one batch.

    In a batch it repeats the shorter texts of some families, which changes the prediction where text and image are one
    sequence (CogVideoX).
    """
    texts = [entry["model_conds"].get(TEXT) for cond in conds if cond for entry in cond]
    if (not all(isinstance(text, comfy.conds.CONDCrossAttn) for text in texts)
            or len({text.cond.shape[1] for text in texts}) < 2):
        return conds
    entries = [entry for cond in conds if cond for entry in cond if "default" not in entry]
    waiting = [(entry, part) for entry in entries
               if (part := comfy.samplers.get_area_and_mult(entry, x, timestep)) is not None]
    lengths = {}                                               # id of an entry -> tokens
    while waiting:
        batch = [entry for entry, part in waiting if comfy.samplers.can_concat_cond(part, waiting[0][1])]
        lengths |= dict.fromkeys(map(id, batch),
                                 math.lcm(*(entry["model_conds"][TEXT].cond.shape[1] for entry in batch)))
        waiting = [(entry, part) for entry, part in waiting if id(entry) not in lengths]

    def lengthened(entry):
        text = entry["model_conds"][TEXT]
        times = lengths.get(id(entry), 0) // text.cond.shape[1]
        if times < 2:
            return entry
        return {**entry, "model_conds": {**entry["model_conds"], TEXT: text._copy_with(text.cond.repeat(1, times, 1))}}
    return [[lengthened(entry) for entry in cond] if cond else cond for cond in conds]


def run_branches(calc_cond_batch, model, conds, x, timestep, model_options):
    """ComfyUI's calc_cond_batch with one coroutine for each branch that has conditioning."""
    conds = as_in_one_batch(conds, x, timestep)
    live = [index for index, cond in enumerate(conds) if cond]
    outputs = [None] * len(conds)

    def run_branch(index):
        only = [cond if position == index else None for position, cond in enumerate(conds)]
        outputs[index] = calc_cond_batch(model, only, x, timestep, model_options)[index]

    tasks = {index: BranchTask(run_branch) for index in live}
    waiting = {}

    def resume(index, value):
        model_call = tasks[index].switch(value)
        if not tasks[index].dead:
            waiting[index] = model_call

    try:
        for index in live:
            resume(index, index)
        while waiting:
            requested = next(iter(waiting.values())).remote
            batch = [index for index, model_call in waiting.items() if model_call.remote is requested][:MAX_BRANCHES]
            predictions = answer([waiting.pop(index) for index in batch])
            for index, prediction in zip(batch, predictions):
                resume(index, prediction)
    finally:
        end_tasks(tasks.values())
    return [torch.zeros_like(x) if output is None else output for output in outputs]
