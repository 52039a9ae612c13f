"""CFG branches as coroutines, which request their predictions together however ComfyUI calls the model.

ComfyUI evaluates branches one after the other if it cannot batch them. Here each branch runs ComfyUI's code in its own
greenlet; when all of them wait for the model, their calls go to the workers as one prediction.
"""

import contextvars
import math
from dataclasses import dataclass, replace

import torch
from greenlet import getcurrent, greenlet

import comfy.conds
import comfy.samplers

from ....xdit_backend.host.calls import Call

MAX_BRANCHES = 2                           # of one prediction


@dataclass(frozen=True, eq=False)
class ModelCall:
    """ComfyUI's call of a diffusion model."""

    remote: object                         # the called RemoteModel
    call: Call
    schedule: torch.Tensor | None          # sigmas of the run; None outside a sampler
    sigmas: torch.Tensor                   # of this call
    num_branches: int = 1                  # that ComfyUI concatenated along the batch
    # with PipeFusion: results of pipefusion_support.why_synchronous and why_drained
    synchronous_reason: str | None = None
    drained_reason: str | None = None

    @property
    def step(self):
        """Step of the run as text for the user; "" outside a sampler."""
        if self.schedule is None or len(self.schedule) < 2:
            return ""
        steps = self.schedule[:-1]
        # samplers also call the model between two steps
        nearest = (steps.to(self.sigmas) - self.sigmas.max()).abs().argmin()
        return f"step {int(nearest) + 1} of {len(steps)}"

    def split_branches(self):
        """Return the two branches of a batched call as one call each."""
        call = self.call
        batch = call.latent.shape[0]
        slices = [slice(0, batch // 2), slice(batch // 2, batch)]

        def branch(rows):
            cut = lambda tensor: tensor[rows] if tensor.shape[0] == batch else tensor  # noqa: E731
            conditioning, call_conditioning = ({name: cut(tensor) for name, tensor in tensors.items()}
                                               for tensors in (call.conditioning, call.call_conditioning))
            return replace(call, latent=call.latent[rows], timestep=call.timestep[rows], conditioning=conditioning,
                           name="", control=call.control_by(cut),
                           scores=None if call.scores is None else call.scores[:, rows],
                           cached=call.cached and replace(call.cached, rows=call.cached.rows[rows]),
                           networks=tuple((replace(use, rows=use.rows[rows]), network)
                                          for use, network in call.networks),
                           left_out={name: cut(tensor) for name, tensor in call.left_out.items()},
                           call_conditioning=call_conditioning,
                           parts={name: tensor[rows] for name, tensor in call.parts.items()})
        return [branch(rows) for rows in slices]


class Task(greenlet):
    """Greenlet with its own context variables, as ComfyUI's code expects of a thread."""

    def __init__(self, run):
        super().__init__(run)
        self.gr_context = contextvars.copy_context()


def end_tasks(tasks):
    """End tasks that have started and not finished."""
    for task in tasks:
        if task and not task.dead:
            task.throw()


class BranchTask(Task):
    """Task that evaluates one branch and switches to its parent with each ModelCall."""


def ask(model_call):
    """Return the prediction for one call, batched with the other branches' calls inside a BranchTask."""
    current = getcurrent()
    if isinstance(current, BranchTask):
        return current.parent.switch(model_call)
    return answer([model_call])[0]


def answer(model_calls):
    """Return the predictions for at most MAX_BRANCHES calls of one model."""
    first = model_calls[0]
    together = first.num_branches != MAX_BRANCHES or first.call.compares_images
    if len(model_calls) == 1 and not together and first.remote.runs_branches_separately():
        return [torch.cat(first.remote.predict(first, first.split_branches()))]
    return first.remote.predict(first, [model_call.call for model_call in model_calls])


TEXT = "c_crossattn"


def as_in_one_batch(conds, x, timestep):
    """Repeat the text of ComfyUI's conds to the lengths that ComfyUI would give them in one batch.

    ComfyUI repeats shorter texts of some families when it batches them, which changes the prediction if text and image
    form one sequence (CogVideoX).
    """
    texts = [entry["model_conds"].get(TEXT) for cond in conds if cond for entry in cond]
    if (not all(isinstance(text, comfy.conds.CONDCrossAttn) for text in texts)
            or len({text.cond.shape[1] for text in texts}) < 2):
        return conds
    entries = [entry for cond in conds if cond for entry in cond if "default" not in entry]
    waiting = [(entry, area) for entry in entries
               if (area := comfy.samplers.get_area_and_mult(entry, x, timestep)) is not None]
    lengths = {}                                               # id of an entry -> tokens
    while waiting:
        batch = [entry for entry, area in waiting if comfy.samplers.can_concat_cond(area, waiting[0][1])]
        lengths |= dict.fromkeys(map(id, batch),
                                 math.lcm(*(entry["model_conds"][TEXT].cond.shape[1] for entry in batch)))
        waiting = [(entry, area) for entry, area in waiting if id(entry) not in lengths]

    def lengthened(entry):
        text = entry["model_conds"][TEXT]
        times = lengths.get(id(entry), 0) // text.cond.shape[1]
        if times < 2:
            return entry
        return {**entry, "model_conds": {**entry["model_conds"], TEXT: text._copy_with(text.cond.repeat(1, times, 1))}}
    return [[lengthened(entry) for entry in cond] if cond else cond for cond in conds]


def run_branches(calc_cond_batch, model, conds, x, timestep, model_options):
    """Run ComfyUI's calc_cond_batch in one coroutine for each branch with conditioning."""
    conds = as_in_one_batch(conds, x, timestep)
    indices = [index for index, cond in enumerate(conds) if cond]
    outputs = [None] * len(conds)

    def run_branch(index):
        only = [cond if position == index else None for position, cond in enumerate(conds)]
        outputs[index] = calc_cond_batch(model, only, x, timestep, model_options)[index]

    tasks = {index: BranchTask(run_branch) for index in indices}
    waiting = {}

    def resume(index, value):
        model_call = tasks[index].switch(value)
        if not tasks[index].dead:
            waiting[index] = model_call

    try:
        for index in indices:
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
