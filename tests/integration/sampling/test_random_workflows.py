"""Workflows drawn at random give what ComfyUI's own model gives, or the oracle where steps are stale; or are refused in
our words.

A failure names the number of the workflow; the same number draws the same workflow. `python -m
tests.programs.random_workflows` runs more.
"""

import pytest

from tests.programs.random_workflows import FAULTS, LAYOUTS, STALE, Runner, draw

NUM_WORKFLOWS = 1                          # of each layout
# so that a new one changes no draw
KINDS = ("sd3", "sd35", "flux", "flux-schnell", "wan", "qwen-image", "hunyuanvideo", "lumina-2")


@pytest.fixture(scope="module")
def runner(comfyui):
    return Runner(comfyui)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, *STALE])
def test_workflows_drawn_at_random_equal_native(comfyui, runner, layout):
    """What ComfyUI's own model cannot run (too few steps for a scheduler, say) or runs chaotically does not count."""
    number, words = 1000 * [*LAYOUTS, *STALE].index(layout), []
    while words.count("equal") < NUM_WORKFLOWS:
        drawn = draw(comfyui, number, [layout], KINDS)
        number += 1
        if "Adaptative" in str(drawn["sampler node"]):         # hundreds of calls, and has tests of its own
            continue
        word, text = runner.outcome(drawn)
        assert word not in FAULTS, f"{word} ({text}): {drawn}"
        words.append(word)
        assert len(words) < 10 * NUM_WORKFLOWS, words
