"""Seconds of a run under a layout, and what limits them: compute, link, launch or warm-up. Pure arithmetic.
Asked by layout_search.py and the benches."""

from dataclasses import replace

from .cost_model import DEVICES_PER_NODE, Run, Tokens, block_parts


def run_seconds(dims, job, degrees, device, links, equivalent_devices=0.0):
    """{cause: seconds} of a run: "compute", "link", "launch" (what the device waits for its host) and "warm-up" (what
    PipeFusion's and DistriFusion's whole steps and empty slots take longer than an even share). equivalent_devices: how
    many such devices the stages are, where their devices differ and blocks are shared out by speed; 0: as many as
    stages."""
    run = Run(dims, job, degrees, device, links)
    if degrees.displaced > 1:
        return _displaced_seconds(run)
    whole = block_parts(run, _tokens(run)).times(dims.blocks)
    if degrees.pipefusion == 1:
        return causes(job, whole.times(job.steps))
    return _pipefusion_seconds(run, whole, equivalent_devices or degrees.pipefusion)


def synchronous_steps(num_steps, warmup_steps):
    """Steps of a run of DistriFusion in which everything is fresh:
    the warm-up, and the first in any case, which finds nothing stale."""
    return min(num_steps, max(1, warmup_steps))


def causes(job, parts, link=0.0, warmup=0.0):
    """{cause: seconds} of a run whose blocks take these Parts in all, and of what its ranks wait for beside them."""
    waits = max(0.0, parts.seconds - parts.compute - parts.link)
    return {"compute": job.fixed_s + parts.compute, "link": parts.link + link, "launch": waits, "warm-up": warmup}


def _tokens(run):
    """Tokens of a rank in a whole step."""
    sequence, text = run.degrees.sequence, run.text
    return Tokens(run.degrees.batch(run.job), run.job.tokens / sequence,
                  text / sequence if run.dims.shards_text else text)


def _displaced_seconds(run):
    dims, job, displaced = run.dims, run.job, run.degrees.displaced
    tokens = Tokens(run.degrees.batch(job), job.tokens / displaced, run.text)
    block = block_parts(replace(run, degrees=replace(run.degrees, displaced=1)), tokens)
    gather_bytes = 2 * tokens.batch * job.tokens / displaced * dims.width * dims.element_bytes * (displaced - 1)
    gather = gather_bytes / run.links.rate("gather", displaced)
    synchronous = synchronous_steps(job.steps, run.degrees.warmup_steps)
    hidden = max(0.0, gather - block.seconds)
    return causes(job, block.times(dims.blocks * job.steps), dims.blocks * (job.steps - synchronous) * hidden,
                  dims.blocks * synchronous * gather)


def _pipefusion_seconds(run, whole, equivalent_devices):
    """whole: Parts of all blocks in a whole step. equivalent_devices: how many such devices the stages are."""
    dims, job, degrees, slot_launch_s = run.dims, run.job, run.degrees, run.device.slot_launch_s
    stages, num_patches = degrees.pipefusion, degrees.num_patches or degrees.pipefusion
    warmup_steps = min(job.steps, degrees.warmup_steps)
    patched = job.steps - warmup_steps
    # stages are split by cost, so that none takes much longer
    blocks = dims.blocks / equivalent_devices
    part = block_parts(run, _patch_tokens(run, num_patches)).times(blocks)
    patch_hop = _hop_s(run, num_patches)
    # of the earlier blocks' outputs, which a stage waits for
    skips = blocks * patch_hop if dims.skips else 0.0
    slot = max(part.seconds + skips, patch_hop) + slot_launch_s
    slots = (patched - 1) * max(num_patches, stages) + num_patches + stages - 1 if patched else 0
    busy = patched * num_patches                               # slots in which a stage computes
    even = warmup_steps * whole.seconds / equivalent_devices
    if degrees.warmup_by_sequence:
        placement = replace(run, degrees=replace(degrees, ring=degrees.ring * stages, pipefusion=1))
        warm = warmup_steps * dims.blocks * block_parts(placement, _tokens(placement)).seconds
    else:
        warm = stages * even + warmup_steps * stages * _hop_s(run, 1)      # one stage after the other
    return {"compute": job.fixed_s + even + busy * part.compute,
            "link": busy * (part.link + skips + max(0.0, patch_hop - part.seconds - skips)),
            "launch": busy * (slot_launch_s + max(0.0, part.launch - part.compute - part.link)),
            "warm-up": max(0.0, warm - even) + (slots - busy) * slot}


def _patch_tokens(run, num_patches):
    """Tokens of a rank with a patch: the text's with every patch, or with one of them, on average that share."""
    whole = _tokens(run)
    return Tokens(whole.batch, whole.image / num_patches,
                  whole.text / num_patches if run.dims.text_once else whole.text)


def _hop_s(run, num_patches):
    """Seconds in which the hidden states of a patch go from one stage to the next."""
    dims, degrees, links, stages = run.dims, run.degrees, run.links, run.degrees.pipefusion
    hidden_bytes = degrees.batch(run.job) * run.job.tokens / degrees.sequence * dims.width * dims.element_bytes
    a_stage, alone = degrees.sequence * degrees.tensor, degrees.devices <= DEVICES_PER_NODE
    by_network = links.crosses(stages * a_stage)               # between some stages, whose ranks share it
    span = stages * a_stage if by_network else 2 * a_stage
    sharing = a_stage if by_network else degrees.sequence if degrees.sequence * stages > DEVICES_PER_NODE else 1
    rate = links.rate("hop", span if alone else 2 * DEVICES_PER_NODE) / sharing
    return hidden_bytes / num_patches / rate + links.latency("hop", span)
