"""Several groups at once: of two hosts on one machine, and of one host, one decoding while the other computes steps."""

import concurrent.futures
import subprocess
import sys
import threading

import pytest

from tests.conftest import ROOT, left_behind, still_there
from tests.support.model_zoo import example
from tests.support.tolerances import within
from tests.unit.host.conftest import call_of, decode, decoded, layout
from xdit_backend.host.client import Client
from xdit_backend.protocol.shared_memory import SegmentStore

OTHER_HOST = """
import sys
from tests.programs.faults import Host
host = Host(sys.argv[1], 2)
wanted = host.run("ring")
print("ready", flush=True)
for _ in sys.stdin:
    print((host.run("ring") - wanted).abs().max().item(), flush=True)
host.client.close()
"""


@pytest.mark.slow
def test_two_hosts_have_workers_at_the_same_time_and_one_that_ends_takes_nothing_of_the_other(
    tmp_path, client, spec_of, supervisor):
    """They start in the same seconds, and what one removes of hosts that have ended is none of the other's."""
    before, one = set(left_behind()), example("SD3")
    other = subprocess.Popen([sys.executable, "-c", OTHER_HOST, str(tmp_path)], cwd=ROOT, stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    second = Client(("cpu", "cpu"), supervisor=supervisor)
    try:
        result, = second.predict(spec_of("SD3"), layout(ulysses=2), 4, [call_of(one)])
        assert other.stdout.readline() == "ready\n"
        SegmentStore().close()                                 # which sweeps
        within((result - one.run()).abs().max(), 1e-6)
        second.close()

        other.stdin.write("again\n")
        other.stdin.flush()
        assert float(other.stdout.readline()) < 1e-9
    finally:
        second.close()
        other.communicate(timeout=600)
    assert other.returncode == 0 and not still_there(before)


@pytest.mark.slow
def test_one_group_decodes_while_another_computes_steps(client, spec_of, supervisor):
    one, decoder, both = example("SD3"), Client(("cpu",), supervisor=supervisor), threading.Barrier(2)

    def sample():
        both.wait()
        return [client.predict(spec_of("SD3"), layout(ring=2), 4, [call_of(one)])[0] for _ in range(5)]

    def draw():
        both.wait()
        return [decode(decoder) for _ in range(5)]

    try:
        assert client.group.alive and decoder.group.alive
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            predictions, images = pool.submit(sample), pool.submit(draw)
            assert len(predictions.result()) == len(images.result()) == 5
    finally:
        decoder.close()

    for result in predictions.result():
        within((result - one.run()).abs().max(), 1e-6)
    for image in images.result():
        within((image - decoded()).abs().max(), 1e-6)
