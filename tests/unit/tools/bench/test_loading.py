"""bench loading writes, reads and loads a file of each kind, and leaves none."""

import argparse
import re

import pytest
import torch

from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.tools.bench import loading


@pytest.mark.slow
def test_every_kind_of_file_is_loaded_and_none_is_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loading, "WIDTH", 256)                 # two heads
    held = []
    print_speeds = loading.print_speeds
    monkeypatch.setattr(loading, "print_speeds", lambda path, *rest: (held.append(len(open_checkpoint(path).quantised)),
                                                                      print_speeds(path, *rest)))
    parser = argparse.ArgumentParser()
    loading.add_arguments(parser)

    loading.main(parser.parse_args(["--gigabytes", "0.01", "--folder", str(tmp_path), "--rounds", "1", "--device",
                                    "cpu", "--threads", str(torch.get_num_threads())]))

    lines = capsys.readouterr().out.splitlines()[2:]
    assert [re.split(r"\s{2,}", line)[0] for line in lines] == list(loading.TYPES)
    assert all(len(re.findall(r"\d+\.\d\d", line)) == 5 for line in lines)
    assert held[0] == 0 and all(held[1:]) and not list(tmp_path.iterdir())
