"""Model files that are hostile, or larger than any that is published, are refused before anything is computed from
them; the largest within the limits are read at once."""

import os
import resource
import time
from contextlib import contextmanager

import pytest

from tests.programs.headers import HOSTILE, empty_tensors, save_header, save_hostile
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.header_limits import MAX_CONFIG_BYTES, MAX_TENSORS
from xdit_backend.checkpoints.memory_map import map_tensors
from xdit_backend.protocol.errors import CheckpointError, XDiTError
from xdit_backend.protocol.shared_memory import SegmentStore
from xdit_backend.tools.dry_run.published_models import PUBLISHED

# of HOSTILE, what is within the limits: it is read, and then found to be no model
LARGEST = ("most tensors", "empty tensors of a model", "U-Net of as many blocks", "text of the whole header",
           "GGUF: most tensors", "GGUF: a vocabulary")
REFUSED_S, READ_S = 0.5, 1.0
TRIES = 3                                  # of which the fastest counts: other processes take part of a core's time


def seconds(run):
    """CPU seconds of the fastest of a few runs."""
    taken = []
    for _ in range(TRIES):
        started_s = time.process_time()
        run()
        taken.append(time.process_time() - started_s)
        if taken[-1] < REFUSED_S / 2:
            break
    return min(taken)


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in LARGEST])
def test_a_hostile_header_is_refused_at_once(tmp_path, name):
    path = save_hostile(name, tmp_path)

    def refused():
        with pytest.raises(CheckpointError) as raised:
            open_checkpoint(path)
        assert len(str(raised.value)) < 500 and path.name in str(raised.value) and str(raised.value).isprintable()
    took_s = seconds(refused)
    print(f"{name}: {took_s:.2f} s")
    assert took_s < REFUSED_S


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_header_is_read_at_once(tmp_path, name):
    path = save_hostile(name, tmp_path)
    took_s = seconds(lambda: open_checkpoint(path))
    with pytest.raises(CheckpointError, match="is not a diffusion model that xDiT runs|a U-Net of a kind"):
        _ = open_checkpoint(path).family
    print(f"{name}: {took_s:.2f} s")
    assert took_s < READ_S


@pytest.mark.parametrize("tensor", ["double_blocks.{}.img_attn.norm.key_norm.scale", "input_blocks.{}.0.op.weight"])
def test_a_model_of_more_blocks_than_any_is_refused_before_they_are_built(tmp_path, tensor):
    """Thousands of blocks take minutes to build, each of which is a tensor of no bytes in the file."""
    from tests.unit.checkpoints.test_header import FLUX_DEV, write_header
    path = tmp_path / "model.safetensors"
    write_header(path, {**FLUX_DEV, **dict.fromkeys(empty_tensors(5000, tensor), (0,))})

    def refused():
        with pytest.raises(CheckpointError, match="model.safetensors"):
            open_checkpoint(path).meta_model()
    assert seconds(refused) < 2 * READ_S


def test_limits_leave_room_for_the_largest_published_model():
    """LTX-2 has the most tensors; quantised to NVFP4 each matrix has four more."""
    from xdit_backend.checkpoints.build_transformer import build_empty
    from xdit_backend.models import FAMILIES
    largest = PUBLISHED["ltx-2"]
    tensors = build_empty(FAMILIES[largest.family], largest.config).state_dict().values()

    assert len(tensors) + 4 * sum(tensor.ndim == 2 for tensor in tensors) < 0.6 * MAX_TENSORS


@pytest.mark.parametrize("config", ["[" * 100_000, '{"a": ' + "9" * 4000 + "}", " " * (MAX_CONFIG_BYTES + 1),
                                    '{"_class_name": 7, "architectures": 7}', '{"architectures": 7}',
                                    '{"_class_name": ["PixArtTransformer2DModel"]}',
                                    '{"_class_name": "PixArtTransformer2DModel", "num_layers": 1000000000}',
                                    '{"_class_name": "SD3Transformer2DModel", "num_layers": "28"}',
                                    '{"_class_name": "UNet2DConditionModel", "block_out_channels": 3}'],
                         ids=lambda config: config[:50])
def test_a_folder_with_a_hostile_config_is_refused_at_once(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    save_header(tmp_path / "a.safetensors", empty_tensors(2))

    def refused():
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path).meta_model()
    refused()                                                  # which imports diffusers' class
    assert seconds(refused) < REFUSED_S


def test_the_files_of_a_folder_have_one_limit_together(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for number in range(1, 4):
        tensors = empty_tensors(MAX_TENSORS // 2, f"{number}.{{}}")
        save_header(tmp_path / f"a-0000{number}-of-00003.safetensors", tensors)

    with pytest.raises(CheckpointError, match="more than 16,384 tensors"):
        open_checkpoint(tmp_path)


@contextmanager
def no_more_files():
    """Every file that this process may have open is open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)


def test_running_out_of_files_is_said_in_words(tmp_path):
    """Not as the system's raw error: of a header, of weights and of shared memory."""
    save_header(tmp_path / "model.safetensors", empty_tensors(1))
    store, words = SegmentStore(), "no more files can be opened.*Too many open files"
    import torch
    try:
        with no_more_files():
            for run in (lambda: open_checkpoint(tmp_path / "model.safetensors"),
                        lambda: map_tensors(tmp_path / "model.safetensors"),
                        lambda: store.create((1024,), torch.float32)):
                with pytest.raises(XDiTError, match=words):
                    run()
    finally:
        store.close()


def test_a_file_that_is_gone_or_not_ours_is_said_in_words(tmp_path):
    with pytest.raises(CheckpointError, match="Check that absent.safetensors is there.*No such file"):
        open_checkpoint(tmp_path / "absent.safetensors")
    (tmp_path / "empty.safetensors").touch()
    with pytest.raises(CheckpointError, match="empty.safetensors again: it is empty"):
        open_checkpoint(tmp_path / "empty.safetensors")
    with pytest.raises(CheckpointError, match="empty.safetensors.*cannot be opened"):
        map_tensors(tmp_path / "empty.safetensors")
