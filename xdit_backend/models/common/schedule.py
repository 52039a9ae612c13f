"""What models that are told of the next step's time read of ComfyUI's options: where this step is in its schedule."""


def sigma_after(timestep, options):
    """For Family.per_call_inputs: {"sigma_after": the noise level that this step goes to, (B,)}.

    {} where a sampler asks for a level between those of its schedule: ComfyUI's models are then told none.
    """
    schedule, sigmas = options.get("sample_sigmas"), options.get("sigmas")
    if schedule is None or sigmas is None:
        return {}
    step = (schedule == sigmas[0].to(schedule)).nonzero().flatten()[:1].tolist()
    if not step or step[0] + 1 == len(schedule):
        return {}
    return {"sigma_after": schedule[step[0] + 1].to(timestep).expand(len(timestep))}
