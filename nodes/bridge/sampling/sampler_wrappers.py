"""Wrappers that a proxy model's MODEL puts around ComfyUI's functions, under a key of their own."""

import collections
import functools
import time
from contextlib import nullcontext

from comfy.patcher_extension import WrapperExecutor

from ....xdit_backend.protocol.specs import SDPA
from ..compatibility.model_options import refuse_model_options
from ..compatibility.pipefusion_support import (
    BACKENDS,
    COMPILE,
    DRAINED,
    PATCHWISE,
    SYNCHRONOUS,
    why_drained,
    why_one_call,
    why_synchronous,
    why_synchronous_run,
)
from ..workers.progress import describe_backends
from ..workers.worker_groups import GROUPS, show_text
from .compile_choice import BACKEND
from .controlnet import lend_layers
from .run_digest import run_digest


def calc_cond_batch(executor, *arguments):
    """Wraps ComfyUI's calc_cond_batch inside all other wrappers, so that those see all branches at once."""
    others = executor.wrappers[executor.idx + 1:]
    return WrapperExecutor.new_executor(functools.partial(_calc_cond_batch, executor.original), others).execute(
        *arguments)


def _calc_cond_batch(original, model, conds, x, timestep, model_options):
    """Run branches as coroutines if each goes to the workers separately.

    model: ComfyUI's BaseModel; a guider with several MODELs may pass another one's.
    """
    from . import cfg_branches  # here and below: nodes must load without greenlet
    remote = getattr(model, "remote", None)
    if remote is None:
        return original(model, conds, x, timestep, model_options)
    refuse_model_options(model_options, remote.family)
    if remote.uses_cache:                                      # the reason is passed along with the calls
        from . import patchwise_sampler
        conds = patchwise_sampler.cut_conditioning(remote, conds)
        model_options = _with_option(model_options, SYNCHRONOUS, why_synchronous(conds, model_options))
    backend = (model_options.get("torch_compile_kwargs") or {}).get("backend")
    if backend in BACKENDS:                                    # set by TorchCompileModel; others are for one device
        model_options = _with_option(model_options, COMPILE, backend)
    # hooks give each call weights of its own
    hooked = any(entry.get("hooks") is not None for cond in conds if cond for entry in cond)
    if (sum(bool(cond) for cond in conds) < 2 or hooked or not remote.runs_branches_separately()
            or why_one_call(model, model_options)):
        return original(model, conds, x, timestep, model_options)
    return cfg_branches.run_branches(original, model, conds, x, timestep, model_options)


def _with_option(model_options, name, value):
    return {**model_options, "transformer_options": {**model_options["transformer_options"], name: value}}


def sample(executor, guider, sigmas, extra_args, callback, noise, latent_image=None, denoise_mask=None,
           *arguments, **more):
    """Wraps ComfyUI's Sampler.sample: selects how PipeFusion or displaced patches run it, and shows its time at the
    end."""
    remote = getattr(guider.inner_model, "remote", None)
    if remote is None:                                         # another loader's model, of a guider with several
        return executor(guider, sigmas, extra_args, callback, noise, latent_image, denoise_mask, *arguments, **more)
    lend_layers(guider)
    started_s, num_steps, before = time.perf_counter(), len(sigmas) - 1, _backend_counts(remote)
    digest = functools.partial(run_digest, remote, guider, executor.class_obj, sigmas, extra_args, noise, denoise_mask)
    remote.estimates.work = digest(_compiled(remote, extra_args["model_options"], digest, num_steps))
    try:
        with (GROUPS.runs.sampling(remote, num_steps) as run,
              _sampler_context(remote, executor.class_obj, guider, extra_args["model_options"]) if remote.uses_cache
              else nullcontext()):
            result = executor(guider, sigmas, extra_args, GROUPS.counting(run, callback), noise, latent_image,
                              denoise_mask, *arguments, **more)
            run.backends = describe_backends(_backend_counts(remote) - before)
    except BaseException:
        show_text(GROUPS.runs.last.describe_end)                # replaces the estimated time left
        raise
    elapsed_s = time.perf_counter() - started_s
    if num_steps > 0 and remote.how is not None:
        steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
        compared = remote.estimates.compare(remote.how, elapsed_s)
        by = "" if run.backends in ("", SDPA) else f", attention by {run.backends}"
        a_step_s = run.seconds_per_step or elapsed_s / num_steps                # as in the panel
        faster = remote.estimates.describe_speedup(run.seconds_per_step)
        remote.estimates.record(run.seconds_per_step)
        remote.compiling.record(run)
        show_text(f"{steps} in {elapsed_s:.1f} s, {a_step_s:.2f} s a step, {remote.how}{by}{faster}{compared}")
    return result


def _compiled(remote, model_options, digest, num_steps):
    """torch.compile's backend for the blocks of a run; "": not compiled. Decides it for compile auto."""
    requested = (model_options.get("torch_compile_kwargs") or {}).get("backend")
    requested = requested if requested in BACKENDS else ""
    is_chosen = remote.compiling.begin(remote, digest("auto"), num_steps, bool(requested))
    return requested or remote.config.forward_options.compile_backend or (BACKEND if is_chosen else "")


def _backend_counts(remote):
    """Counter of the attention calls that a RemoteModel's workers have computed so far, by backend."""
    client = GROUPS.client_if(remote.devices)
    return collections.Counter() if client is None else client.backend_counts


def _sampler_context(remote, sampler, guider, model_options):
    """Context for the sampler: the patchwise sampler, if the model has stages and Parallel Sampler requests it."""
    from . import patchwise_sampler
    options = model_options["transformer_options"]
    synchronous = why_synchronous_run(sampler, guider)
    if synchronous is not None:
        options[SYNCHRONOUS] = synchronous
    patchwise = remote.spec.stages is not None and options.get(PATCHWISE)
    if not patchwise or any(why_synchronous([conds], model_options) for conds in guider.conds.values()):
        return nullcontext()
    drained = why_drained(sampler, guider.conds.values(), guider.inner_model, model_options)
    if drained is not None:
        options[DRAINED] = drained
        return nullcontext()
    return patchwise_sampler.patchwise(sampler, remote)
