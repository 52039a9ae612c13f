"""A real worker group answers like the model in this process, on the real launcher."""

import time

import psutil
import pytest
import torch

from tests.support.model_zoo import FOLDERS, example, takes
from tests.support.tolerances import within
from tests.unit.host.conftest import call_of, decode, decoded, layout
from xdit_backend.host.client import Client
from xdit_backend.models import FAMILIES
from xdit_backend.protocol.errors import WorkerDiedError, WorkerFailedError

CHANNELS = 4


def predict(client, spec, calls, num_channels=CHANNELS, **degrees):
    return client.predict(spec, layout(**degrees), num_channels, calls)


METHODS = [{"cfg": 2}, {"data": 2}, {"ulysses": 2}, {"ring": 2}]
TOLD = [name for name in FOLDERS if not FAMILIES[name].detection.settings]               # which a folder does not say


def methods_of(name):
    """One, in turn; of one family all. What a family makes of each is for tests/unit/parallel,
    and this for its tensors on their way."""
    possible = [degrees for degrees in METHODS if takes(FAMILIES[name], degrees)]
    return possible if name == "SD3" else [possible[TOLD.index(name) % len(possible)]]


@pytest.mark.parametrize("name, degrees", [(name, degrees) for name in TOLD for degrees in methods_of(name)], ids=str)
def test_predictions_equal_the_model(client, spec_of, name, degrees):
    """float64 in the workers; predictions come back in float32."""
    positive, negative = example(name, batch=3), example(name, batch=3, num_text_tokens=9)

    results = predict(client, spec_of(name), [call_of(positive), call_of(negative)],
                      positive.family.num_channels(positive.config), **degrees)

    for result, one in zip(results, (positive, negative)):
        within((result - one.run()).abs().max(), 1e-6)
    assert (results[0] - results[1]).abs().max() > 2e-5


def test_a_branch_sends_nothing_between_ranks(client, spec_of):
    one = example("SD3")

    def sent_bytes():
        return [client.totals()[rank].get("sent_bytes", 0) for rank in (0, 1)]

    before = sent_bytes()
    predict(client, spec_of("SD3"), [call_of(one), call_of(one)], cfg=2)
    assert sent_bytes() == before

    predict(client, spec_of("SD3"), [call_of(one)], ring=2)
    assert all(now > then for now, then in zip(sent_bytes(), before))


def test_conditioning_is_sent_once_a_run(client, spec_of, monkeypatch):
    client.end_run()
    one, sent = example("SD3"), []
    share = type(client.group.segments).share
    monkeypatch.setattr(type(client.group.segments), "share", lambda store, tensor: sent.append(tensor.shape)
                        or share(store, tensor))

    for step in range(3):
        call = call_of(example("SD3"))                         # tensors made anew, as ComfyUI does
        call.latent.add_(step)
        predict(client, spec_of("SD3"), [call], ring=2)
    client.end_run()

    assert sent.count(one.conditioning["context"].shape) == 1
    assert sent.count(one.latent.shape) == 3


def test_changed_conditioning_is_noticed(client, spec_of):
    """Some nodes change the prompt's tensors during a run."""
    one = example("SD3")
    first, = predict(client, spec_of("SD3"), [call_of(one)], ring=2)
    one.conditioning["context"][0, 0, 0] += 1

    second, = predict(client, spec_of("SD3"), [call_of(one)], ring=2)

    within((second - one.run()).abs().max(), 1e-6)
    assert (second - first).abs().max() > 1e-6


def test_conditioning_with_nan_keeps_its_name_and_runs_share_none(client, spec_of):
    """NaN is unequal to itself; a new name at every step would mean new keys and values at every step."""
    client.end_run()
    tensors = {"context": torch.full((1, 4, 8), float("nan"))}
    name = client.name_conditioning(tensors, run="one")

    assert client.name_conditioning({"context": tensors["context"].clone()}, run="one") == name
    assert client.name_conditioning(tensors, run="other") != name
    tensors["context"][0, 0, 0] = 0
    assert client.name_conditioning(tensors, run="one") != name
    client.end_run("one")
    client.end_run("other")
    assert all(numbers["num_conditionings"] == 0 for numbers in client.report_memory().values())


def test_a_run_whose_conditioning_changes_at_every_step_keeps_a_bounded_number(client):
    client.end_run()
    names = [client.name_conditioning({"context": torch.full((1, 1), float(step))}, run="long") for step in range(70)]

    held = client.report_memory()[0]["num_conditionings"]
    assert client.name_conditioning({"context": torch.full((1, 1), 69.0)}, run="long") == names[-1]
    assert client.name_conditioning({"context": torch.full((1, 1), 0.0)}, run="long") not in names
    client.end_run("long")
    assert held == 64


def test_a_failure_is_named_and_the_next_prediction_runs(client, spec_of):
    one = example("SD3")
    broken = call_of(one)
    broken.conditioning.pop("y")
    pids = worker_pids(client)

    with pytest.raises(WorkerFailedError, match=r"Worker rank 0 \(cpu\) failed with \w+Error"):
        predict(client, spec_of("SD3"), [broken], ring=2)

    result, = predict(client, spec_of("SD3"), [call_of(example("SD3"))], ring=2)
    within((result - example("SD3").run()).abs().max(), 1e-6)
    assert worker_pids(client) == pids


def test_an_abandoned_prediction_leaves_nothing_for_the_next(client, spec_of):
    """Cancel: the host stops waiting, the workers finish, and what they were using is removed then."""
    one = example("SD3")
    predict(client, spec_of("SD3"), [call_of(one)], ring=2)
    pids = worker_pids(client)

    def cancel():
        raise KeyboardInterrupt
    client.workers.check = cancel
    with pytest.raises(KeyboardInterrupt):
        predict(client, spec_of("SD3"), [call_of(one)], ring=2)
    client.workers.check = lambda: None
    client.end_run()
    other = example("SD3", rows=8, columns=6)
    result, = predict(client, spec_of("SD3"), [call_of(other)], ulysses=2)
    client.end_run()

    within((result - other.run()).abs().max(), 1e-6)
    memory = client.report_memory()
    assert [numbers["num_conditionings"] for numbers in memory.values()] == [0, 0]
    assert worker_pids(client) == pids
    assert client.group.segments.names() == []


@pytest.mark.slow
def test_measuring_goes_on_after_a_cancel_and_is_not_begun_anew(client):
    """The cancel waits for nothing; who asks next takes what was measured meanwhile."""
    group = client.group
    posted, post = [], group.post

    def cancel():
        raise KeyboardInterrupt
    group.post = lambda make_command, *given, **named: posted.append(make_command(0)) or post(make_command, *given,
                                                                                                **named)
    client.workers.check = cancel
    with pytest.raises(KeyboardInterrupt):
        client.probe("float32")
    client.workers.check = lambda: None
    began_s = time.monotonic()
    during = client.catch_up(5.0)
    waited_s = time.monotonic() - began_s
    first = client.probe("float32")
    probes = [type(command).__name__ for command in posted].count("Probe")
    client.probe("float32")
    group.post = post

    assert during == {} and waited_s < 0.1
    assert probes == 1 and set(first) == {0, 1} and first[0]["matrix_s"] > 0
    assert [type(command).__name__ for command in posted].count("Probe") == 2
    assert client.workers.state == "idle" and not list(group._requests)


def test_dropping_a_model_gives_its_memory_back(client, spec_of):
    one, spec = example("PixArt-Sigma"), spec_of("PixArt-Sigma")
    before = client.report_memory()[0]["weight_bytes"] if client.holds(spec.name) else None
    client.drop(spec.name)
    without = client.report_memory()[0]["weight_bytes"]

    predict(client, spec, [call_of(one)], ring=2)

    held = client.report_memory()[0]["weight_bytes"]
    assert held == without + sum(p.numel() * p.element_size() for p in (*one.model.parameters(), *one.model.buffers()))
    assert before in (None, held)
    client.forget(spec.name)                                   # the same, of a MODEL that nobody has
    assert not client.holds(spec.name) and client.report_memory()[0]["weight_bytes"] == without


@pytest.mark.slow
def test_all_ranks_share_one_copy_of_the_file(client, tmp_path):
    """Weights in the file's dtype stay maps of the file: no worker has a private copy."""
    from diffusers import SD3Transformer2DModel

    from xdit_backend.checkpoints.checkpoint import open_checkpoint
    from xdit_backend.models import FAMILIES
    config = {**FAMILIES["SD3"].testing.config, "num_layers": 4, "num_attention_heads": 8, "attention_head_dim": 64,
              "caption_projection_dim": 512}
    specs = []
    for name, num_layers in (("small", 1), ("large", 4)):
        SD3Transformer2DModel(**{**config, "num_layers": num_layers}).save_pretrained(tmp_path / name / "transformer")
        header = open_checkpoint(tmp_path / name)
        specs.append(header.spec("float32", "float32"))
    file_bytes = sum(file.stat().st_size for file in (tmp_path / "large" / "transformer").glob("*.safetensors"))
    client.models.load(specs[0])                                # a worker imports diffusers' model with its first
    before = [psutil.Process(pid).memory_full_info().uss for pid in worker_pids(client)]
    client.models.load(specs[1])
    after = [psutil.Process(pid).memory_full_info().uss for pid in worker_pids(client)]
    for spec in specs:
        client.drop(spec.name)

    assert file_bytes > 100e6
    assert max(b - a for a, b in zip(before, after)) < 0.5 * file_bytes


def worker_pids(client):
    return sorted(int(numbers["pid"]) for numbers in client.report_memory().values())


def test_workers_say_what_they_did_and_when(client, spec_of):
    """Each rank its step of each call, in order, within the time that the host has seen pass; and nothing of before."""
    one = example("SD3")
    predict(client, spec_of("SD3"), [call_of(one)], ring=2)
    began_s = time.perf_counter()
    for time_of_step in (900.0, 700.0):
        call = call_of(one)
        call.timestep.fill_(time_of_step)
        predict(client, spec_of("SD3"), [call], ring=2)
    ended_s = time.perf_counter()

    done = client.catch_up(10, began_s)

    for rank in (0, 1):
        steps = [span for span in done[rank].spans if span.kind == "whole"]
        assert [span.time for span in steps] == [900.0, 700.0]
        assert began_s <= steps[0].start_s < steps[0].end_s <= steps[1].start_s < steps[1].end_s <= ended_s
        for span in done[rank].spans:
            assert (span.kind in ("whole", "exchange")
                    and any(step.start_s <= span.start_s and span.end_s <= step.end_s for step in steps))
    assert client.memory[0]["reserved_bytes"] > 0 and client.workers.state == "idle"
    assert client.report_if_idle() is not None and client.report_if_idle()[0].spans == []


@pytest.mark.slow
def test_workers_that_end_once_something_is_loaded_are_an_error(spec_of, monkeypatch, supervisor):
    """And no others are started in their place there, which would hold nothing; the next call starts some."""
    client, one = Client(("cpu",), supervisor=supervisor), example("SD3")

    def draw():
        return decode(client), decoded()

    def predict():
        return client.predict(spec_of("SD3"), layout(), 4, [call_of(one)])[0], one.run()
    try:
        for holder, run in ((client.autoencoders, draw), (client.models, predict)):
            load = holder.load

            def loads_and_ends(*arguments, load=load):
                load(*arguments)
                torchrun = client.group._resources.processes
                torchrun.kill()
                assert torchrun.wait_ended(30)
            with monkeypatch.context() as patch:
                patch.setattr(holder, "load", loads_and_ends)
                with pytest.raises(WorkerDiedError, match="Queue the prompt again"):
                    run()
            got, wanted = run()
            within((got - wanted).abs().max(), 1e-5)
    finally:
        client.close()
