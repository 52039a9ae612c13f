"""The table of a file's weights is what ranks load, to the byte, and the command prints it."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from tests.support.comfyui_server import ROOT
from tests.support.tiers import FEW_FAMILIES, by_default
from tests.support.tiny_checkpoints import VARIANTS, families
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.checkpoints.loader import load_transformer
from xdit_backend.protocol.errors import UnsupportedError
from xdit_backend.protocol.specs import Stages
from xdit_backend.tools.bench.size import parse_layout
from xdit_backend.tools.bench.weights import lines

CPU = torch.device("cpu")
KINDS = [kind for kind in families() if kind not in VARIANTS]
DTYPES = [("float32", "float32"), ("float8_e4m3fn", "bfloat16")]


def loaded_bytes(spec, blocks, tensor_rank):
    """{name: bytes} that a rank holds."""
    model = load_transformer(spec, CPU, choose_blocks=None if blocks is None else lambda table: blocks,
                             tensor_rank=tensor_rank).model
    return {name: tensor.nbytes for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if not tensor.is_meta}


def check(checkpoint, spec, blocks=None, tensor_rank=0):
    try:
        table = checkpoint.weight_table(spec)
    except UnsupportedError:                                   # the file's quantised blocks cannot be sharded
        assert spec.tensor_degree > 1
        return
    here = [weight for weight in table.weights
            if blocks is None or weight.block is None or weight.block in blocks]
    expected = {weight.name: table.num_bytes(weight, tensor_rank) for weight in here}
    found = loaded_bytes(spec, blocks, tensor_rank)
    not_here = expected.keys() - found.keys()                  # biases of the first rank
    assert expected == found | dict.fromkeys(not_here, 0)
    assert table.rank_bytes(blocks, tensor_rank) == sum(found.values())


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda dtypes: dtypes[0])
@pytest.mark.parametrize("kind", by_default(FEW_FAMILIES, KINDS))
def test_the_table_is_what_every_rank_loads(file_of, kind, dtypes):
    """Alone, as either rank of tensor parallelism, and as either stage."""
    checkpoint = open_checkpoint(file_of(kind))
    family, spec = checkpoint.family, checkpoint.spec(*dtypes)
    check(checkpoint, spec)
    if family.blocks and "tensor" not in family.refused:
        for rank in range(2):
            check(checkpoint, dataclasses.replace(spec, tensor_degree=2), tensor_rank=rank)
    if family.blocks and "pipefusion" not in family.refused:
        table = checkpoint.weight_table(spec)
        middle = len(table.block_sizes) // 2
        for blocks in (range(middle), range(middle, len(table.block_sizes))):
            check(checkpoint, dataclasses.replace(spec, stages=Stages(2)), blocks)


def test_a_weight_knows_its_tensor_in_the_file(file_of):
    table = open_checkpoint(file_of("sd3")).weight_table(open_checkpoint(file_of("sd3")).spec("float32", "float32"))
    sources = {weight.name: weight for weight in table.weights}

    # a third of a fused matrix, which is a region of it; and one of the file's own
    query = sources["transformer_blocks.0.attn.to_q.weight"]
    assert query.file_name.endswith("attn.qkv.weight") and query.is_mapped and query.block == 0
    assert sources["proj_out.weight"].block is None


def test_the_command_lists_ranks_blocks_and_weights(file_of):
    checkpoint, layout = open_checkpoint(file_of("sd3")), parse_layout("pipefusion2")
    table = checkpoint.weight_table(checkpoint.spec("float32", "float32", Stages(2)))
    said = list(lines(table, "SD3", layout, each=True))

    done = subprocess.run([sys.executable, "-m", "xdit_backend", "weights", str(file_of("sd3")), "--layout",
                           "pipefusion2", "--weight-dtype", "fp32", "--each"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ranks = said[2:4]
    assert [line.split()[0] for line in ranks] == ["0", "1"] and ranks[1].split()[-1].endswith(
        str(len(table.block_sizes) - 1))
    assert len(done.stdout.splitlines()) == len(said)
