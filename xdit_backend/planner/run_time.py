"""Seconds of a run under a layout by cause: compute, link, launch and warm-up. Arithmetic only."""

from dataclasses import replace

from .cost_model import DEVICES_PER_NODE, Run, Tokens, block_time


def run_seconds(dims, job, degrees, device, links, equivalent_devices=0.0):
    """Estimated {cause: seconds} of a run. "compute"; "link": communication; "launch": the device waits for its host;
    "warm-up": the cost of synchronous steps and empty pipeline slots of PipeFusion and DistriFusion beyond an even
    split. equivalent_devices: the stages' total speed as a number of such devices, if devices are heterogeneous and
    blocks are split by speed; 0: the number of stages."""
    run = Run(dims, job, degrees, device, links)
    if degrees.displaced > 1:
        return _displaced_seconds(run)
    all_blocks = block_time(run, _tokens(run)).times(dims.blocks)
    if degrees.pipefusion == 1:
        return causes(job, all_blocks.times(job.steps))
    return _pipefusion_seconds(run, all_blocks, equivalent_devices or degrees.pipefusion)


def synchronous_steps(num_steps, warmup_steps):
    """Number of DistriFusion's synchronous steps: the warm-up, and always the first, which has no stale tensors."""
    return min(num_steps, max(1, warmup_steps))


def causes(job, time, link=0.0, warmup=0.0):
    """{cause: seconds} of a run from its blocks' BlockTime, with additional communication and warm-up seconds."""
    waits = max(0.0, time.seconds - time.compute - time.link)
    return {"compute": job.fixed_s + time.compute, "link": time.link + link, "launch": waits, "warm-up": warmup}


def _tokens(run):
    """A rank's tokens in a synchronous step."""
    sequence, text = run.degrees.sequence, run.text
    return Tokens(run.degrees.batch(run.job), run.job.tokens / sequence,
                  text / sequence if run.dims.shards_text else text)


def _displaced_seconds(run):
    dims, job, displaced = run.dims, run.job, run.degrees.displaced
    tokens = Tokens(run.degrees.batch(job), job.tokens / displaced, run.text)
    block = block_time(replace(run, degrees=replace(run.degrees, displaced=1)), tokens)
    gather_bytes = 2 * tokens.batch * job.tokens / displaced * dims.width * dims.element_bytes * (displaced - 1)
    gather = gather_bytes / run.links.rate("gather", displaced)
    synchronous = synchronous_steps(job.steps, run.degrees.warmup_steps)
    hidden = max(0.0, gather - block.seconds)
    return causes(job, block.times(dims.blocks * job.steps), dims.blocks * (job.steps - synchronous) * hidden,
                  dims.blocks * synchronous * gather)


def _pipefusion_seconds(run, all_blocks, equivalent_devices):
    """all_blocks: BlockTime of all blocks in a synchronous step. equivalent_devices: as in run_seconds."""
    dims, job, degrees, slot_launch_s = run.dims, run.job, run.degrees, run.device.slot_launch_s
    stages, num_patches = degrees.pipefusion, degrees.num_patches or degrees.pipefusion
    warmup_steps = min(job.steps, degrees.warmup_steps)
    patched = job.steps - warmup_steps
    # stages are balanced by cost, so that none takes much longer
    blocks = dims.blocks / equivalent_devices
    part = block_time(run, _patch_tokens(run, num_patches)).times(blocks)
    patch_hop = _hop_s(run, num_patches)
    # time a stage waits for earlier blocks' outputs
    skips = blocks * patch_hop if dims.skips else 0.0
    slot = max(part.seconds + skips, patch_hop) + slot_launch_s
    slots = (patched - 1) * max(num_patches, stages) + num_patches + stages - 1 if patched else 0
    busy = patched * num_patches                               # slots in which a stage computes
    even = warmup_steps * all_blocks.seconds / equivalent_devices
    if degrees.warmup_by_sequence:
        placement = replace(run, degrees=replace(degrees, ring=degrees.ring * stages, pipefusion=1))
        warm = warmup_steps * dims.blocks * block_time(placement, _tokens(placement)).seconds
    else:
        warm = stages * even + warmup_steps * stages * _hop_s(run, 1)      # one stage after the other
    return {"compute": job.fixed_s + even + busy * part.compute,
            "link": busy * (part.link + skips + max(0.0, patch_hop - part.seconds - skips)),
            "launch": busy * (slot_launch_s + max(0.0, part.launch - part.compute - part.link)),
            "warm-up": max(0.0, warm - even) + (slots - busy) * slot}


def _patch_tokens(run, num_patches):
    """A rank's tokens with a patch; text runs with every patch, or with one of them, averaged over patches."""
    tokens = _tokens(run)
    return Tokens(tokens.batch, tokens.image / num_patches,
                  tokens.text / num_patches if run.dims.text_once else tokens.text)


def _hop_s(run, num_patches):
    """Seconds in which a patch's hidden states travel from one stage to the next."""
    dims, degrees, links, stages = run.dims, run.degrees, run.links, run.degrees.pipefusion
    hidden_bytes = degrees.batch(run.job) * run.job.tokens / degrees.sequence * dims.width * dims.element_bytes
    stage_ranks, alone = degrees.sequence * degrees.tensor, degrees.devices <= DEVICES_PER_NODE
    by_network = links.crosses(stages * stage_ranks)               # between some stages, whose ranks share the network
    span = stages * stage_ranks if by_network else 2 * stage_ranks
    sharing = stage_ranks if by_network else degrees.sequence if degrees.sequence * stages > DEVICES_PER_NODE else 1
    rate = links.rate("hop", span if alone else 2 * DEVICES_PER_NODE) / sharing
    return hidden_bytes / num_patches / rate + links.latency("hop", span)
