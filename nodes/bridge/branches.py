"""CFG branches as coroutines: cond and uncond ask for their predictions at the same time, however ComfyUI calls the model.

ComfyUI evaluates its branches one after the other when they cannot be batched. Here each branch runs ComfyUI's own code
in a greenlet of its own; when all wait for the model, their calls go to the workers as one prediction.
"""

import contextvars

import torch

MAX_BRANCHES = 2                           # what one prediction takes


class Branches:
    """Runs ComfyUI's calc_cond_batch branch by branch. predict(calls) -> predictions, in order."""

    def __init__(self, predict):
        self._predict = predict
        self._hub = None

    def ask(self, call):
        """The prediction for one call: at once, or together with the other branches' where they run as coroutines."""
        if self._hub is not None:
            return self._hub.switch(call)
        return self._predict([call])[0]

    def run(self, calc_cond_batch, model, conds, x, timestep, model_options):
        """ComfyUI's calc_cond_batch with one coroutine for each branch that has conditioning."""
        import greenlet                                        # here, so that the nodes load where it is missing

        live = [index for index, cond in enumerate(conds) if cond]
        outputs = [None] * len(conds)

        def run_branch(index):
            only = [cond if position == index else None for position, cond in enumerate(conds)]
            outputs[index] = calc_cond_batch(model, only, x, timestep, model_options)[index]

        tasks = {index: greenlet.greenlet(run_branch) for index in live}
        self._hub = greenlet.getcurrent()
        try:
            for task in tasks.values():
                task.gr_context = contextvars.copy_context()
            waiting = {}

            def resume(index, value):
                call = tasks[index].switch(value)
                if not tasks[index].dead:
                    waiting[index] = call

            for index in live:
                resume(index, index)
            while waiting:
                batch = list(waiting)[:MAX_BRANCHES]
                predictions = self._predict([waiting.pop(index) for index in batch])
                for index, prediction in zip(batch, predictions):
                    resume(index, prediction)
        finally:
            self._hub = None
            for task in tasks.values():
                if task and not task.dead:
                    task.throw()
        return [torch.zeros_like(x) if output is None else output for output in outputs]
