"""What only a GPU shows. Skipped by name where there is none."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.model_zoo import BARE, example, having, takes
from tests.unit.host.conftest import call_of, folders, layout, spec_of  # noqa: F401
from tests.unit.host.test_client import TOLD
from tests.unit.host.test_pipefusion import oracle, sample, small
from xdit_backend.attention.backends import attention_with_lse
from xdit_backend.attention.log_sum_exp import merge_attention
from xdit_backend.distributed.collectives import Traffic
from xdit_backend.distributed.group_norm import group_norm_rows
from xdit_backend.distributed.spatial_ops import RowSplit
from xdit_backend.host.client import Client
from xdit_backend.protocol.specs import Layout, Stages

pytestmark = pytest.mark.gpu

TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}
# Chroma's sines are of angles up to 344,000: float32 has them to some 1e-2, and bfloat16 on a CPU is as far off
FURTHER = {"Chroma": 10}


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)],
                         ids=str)
@pytest.mark.parametrize("head_size", [64, 72, 128])
@pytest.mark.parametrize("num_keys", [33, 256])
def test_attention_backends_return_log_sum_exp(dtype, tolerance, head_size, num_keys):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 50, head_size, generator=generator).to("cuda", dtype)
    k, v = (torch.randn(2, 4, num_keys, head_size, generator=generator).to("cuda", dtype) for _ in range(2))

    first, second = attention_with_lse(q, k[:, :, :17], v[:, :, :17]), attention_with_lse(q, k[:, :, 17:], v[:, :, 17:])
    out, _ = merge_attention(first[0].float(), first[1].float(), second[0].float(), second[1].float())

    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert (out.double() - want).abs().max() < tolerance


@pytest.mark.parametrize("dtype, tolerance",
                         [(torch.bfloat16, 8 * 2 ** -8), (torch.float16, 8 * 2 ** -11), (torch.float32, 1e-5)],
                         ids=str)
@pytest.mark.parametrize("shape", [(2, 64, 40, 24), (1, 64, 3, 20, 24), (1, 64, 480)], ids=str)
def test_norms_by_rows_are_torchs_norm(dtype, tolerance, shape):
    """Values are up to 8, and a half precision rounds each once."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=generator) + 1).to("cuda", dtype)
    weight, bias = torch.randn(2, 64, generator=generator).to("cuda", dtype)

    out = group_norm_rows(x, 8, weight, bias, 1e-6, RowSplit((0, shape[-2]), None, Traffic()))

    assert out.dtype == dtype
    assert (out.double() - F.group_norm(x.double(), 8, weight.double(), bias.double(), 1e-6)).abs().max() < tolerance


def test_one_worker_equals_the_native_ksampler_in_half_precision(tmp_path):
    """A real ComfyUI on the GPU: its own nodes and ours on the same bf16 file."""
    from safetensors.torch import load_file

    from tests.integration.failures.test_server import workflow
    from tests.support.comfyui_server import ROOT, Host, comfyui_folder, make_base
    from tests.support.tiny_checkpoints import import_comfyui, save
    if comfyui_folder() is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`, or name one in XDIT_COMFYUI")
    make_base(tmp_path, extra_packs=[ROOT / "tests" / "support" / "host_nodes"])
    import_comfyui(comfyui_folder())
    save("sd3", tmp_path / "models" / "diffusion_models" / "sd3.safetensors", dtype=torch.bfloat16)
    save("vae-sd3", tmp_path / "models" / "vae" / "vae.safetensors")
    latents = []
    with Host(comfyui_folder(), tmp_path, cpu=False) as host:
        for parallel in (False, True):
            graph = workflow(parallel, devices="cuda:0")
            graph["save"] = {"class_type": "SaveLatent",
                             "inputs": {"samples": ["sampler", 0], "filename_prefix": "latent"}}
            del graph["decode"], graph["vae"]
            entry = host.run(graph)[0]["save"]["latents"][0]
            latents.append(load_file(tmp_path / "output" / entry["subfolder"]
                                     / entry["filename"])["latent_tensor"].float())

    assert (latents[1] - latents[0]).norm() / latents[0].norm() < 3e-2


@pytest.fixture(scope="module", params=[("cuda:0",), ("cuda:0", "cuda:0")], ids=["one rank", "two ranks on one GPU"])
def gpu_client(request):
    """Two ranks on one GPU talk over gloo, as NCCL refuses them. Convolutions of float32 are of float32, as CPUs'."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        client = Client(request.param)
        yield client
        client.close()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", TOLD)
def test_predictions_equal_the_model_on_the_cpu(gpu_client, spec_of, name, dtype):  # noqa: F811
    one = example(name, torch.float32, rows=16, columns=12)
    several = [degrees for degrees in ({"ulysses": 2}, {"ring": 2}, {"cfg": 2}) if takes(one.family, degrees)]
    for degrees in several if len(gpu_client.devices) == 2 else [{}]:
        result, = gpu_client.predict(spec_of(name, dtype), layout(**degrees), one.family.num_channels(one.config),
                                     [call_of(one)])

        error = (result - one.run()).norm() / one.run().norm()
        assert error < TOLERANCES[dtype] * FURTHER.get(name, 1), (degrees, error)


@pytest.mark.parametrize("name", having("pipefusion", BARE))
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("gpu_client", [("cuda:0", "cuda:0")], ids=["two ranks on one GPU"], indirect=True)
def test_stale_patches_on_one_gpu_equal_the_oracle(gpu_client, name, offload, spec_of):  # noqa: F811
    """Two stages on one GPU over gloo; with offload, keys and values stay in page-locked host memory."""
    one = small(name)

    result = sample(gpu_client, spec_of(name, "float32", Stages(2, offload=offload)), one, Layout(pipefusion_degree=2),
                    4, 1)

    want = oracle(one, 4, 1)
    assert (result - want).norm() / want.norm() < 1e-4 * FURTHER.get(name, 1)
