"""What `start.py test` runs and what it leaves to `--all`:
of a matrix that takes minutes, all that has every family meet every method."""

from collections import Counter, defaultdict

import pytest

from tests.support import ordering

# Of each structure one: two streams, two kinds of blocks, one stream, video, a U-Net; and their tiny files.
FEW_FAMILIES = {"SD3", "Flux.1", "PixArt-Sigma", "Wan", "SDXL", "sd3", "flux", "pixart", "wan", "sdxl"}
FEW_VAES = {"sd", "wan", "vae-sd", "vae-wan"}
# folders of tests whose families take long
RUN_WORKERS = {f"unit/{name}" for name in ("attention", "distributed", "hooks", "parallel", "host")} | {
    f"integration/{name}" for name in ("sampling", "lora", "vae", "failures", "models", "workers")}
LEFT_OUT = pytest.StashKey[int]()


def by_default(chosen, values):
    """Parameters for all of `values`; those that are not chosen are left to --all.
    chosen: (value) -> bool, or the values."""
    is_chosen = chosen if callable(chosen) else lambda value: value in chosen
    return [value if is_chosen(value) else pytest.param(value, marks=pytest.mark.slow) for value in values]


def is_marked(item, name):
    """Has the test this mark? Its keywords have more names in them, such as that of the folder of the checkout."""
    return item.get_closest_marker(name) is not None


def mark(items):
    """Leave the tests of most families to --all, but for those that are marked `everyone`."""
    from tests.support.tiny_checkpoints import AUTOENCODERS, families
    from tests.support.vae_zoo import KINDS
    from xdit_backend.models import FAMILIES
    others = {*FAMILIES, *families(), *AUTOENCODERS, *KINDS} - FEW_FAMILIES - FEW_VAES
    for item in items:
        if (not is_marked(item, "everyone") and "/".join(item.path.parts[-3:-1]) in RUN_WORKERS
            and hasattr(item, "callspec")
                and any(
                        isinstance(value, str) and value in others for value in item.callspec.params.values())):
            item.add_marker(pytest.mark.slow)


def skip_lacking(items):
    """Skip tests of families that run as a module that this ComfyUI does not have."""
    from tests.support.model_zoo import lacks_module
    from tests.support.tiny_checkpoints import families
    from xdit_backend.models import FAMILIES
    from xdit_backend.tools.dry_run.published_models import PUBLISHED
    published = {name: FAMILIES[model.family] for name, model in PUBLISHED.items()}
    lacking = {name: family.transformer for name, family in (FAMILIES | families() | published).items()
               if lacks_module(family)}
    for item in items if lacking else ():
        found = [lacking[value] for value in getattr(item, "callspec", None) and item.callspec.params.values() or ()
                 if isinstance(value, str) and value in lacking]
        if found:
            item.add_marker(pytest.mark.skip(reason=f"this ComfyUI has no {found[0]}"))


def count_left_out(config, items):
    """Count what the default tier leaves out."""
    is_left = config.option.markexpr.startswith("not slow")
    config.stash[LEFT_OUT] = sum(is_marked(item, "slow") and not is_marked(item, "drawn")
                                 for item in items) if is_left else 0


def give_count(config, output):
    """In a process of pytest-xdist: to the first process."""
    output["left_out"] = config.stash.get(LEFT_OUT, 0)


def take_count(config, output):
    config.stash[LEFT_OUT] = max(config.stash.get(LEFT_OUT, 0), output.get("left_out", 0))


def summary(reporter, config):
    """One line: how many tests ran, and how to run the others."""
    num_run = sum(len(reporter.stats.get(outcome, ()))
                  for outcome in ("passed", "failed", "error", "xfailed", "xpassed"))
    skipped = reporter.stats.get("skipped", ())
    left_out = config.stash.get(LEFT_OUT, 0)
    late = sum(ordering.NO_TIME in str(report.longrepr) for report in skipped)
    why = f", {late} of them for want of time" if late else ""
    more = f"{left_out} were left out, which `python3 start.py test --all` runs too." if left_out else ""
    return f"{num_run} tests ran, {len(skipped)} were skipped{why}. {more}".strip()


def dearest_files(reporter, count=20):
    """Lines: the files whose tests took longest together, with what started and ended for them."""
    seconds, tests = Counter(), defaultdict(set)
    for report in (report for reports in reporter.stats.values() for report in reports if hasattr(report, "duration")):
        file = report.nodeid.partition("::")[0]
        seconds[file] += report.duration
        tests[file].add(report.nodeid)
    return [f"{total:8.1f} s {len(tests[file]):5} tests {file}" for file, total in seconds.most_common(count)]
