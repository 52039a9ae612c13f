"""How block-sparse attention changes images of the demo model at 512 x 512 pixels: PSNR against dense attention.
`python -m tests.programs.sparse_quality`. One CPU worker; every step is sparse. docs/benchmarks.md has the results.
"""

import argparse
import dataclasses
import statistics

import torch

from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.demo_model.autoencoder import CHANNELS
from xdit_backend.demo_model.transformer import shifted_sigmas
from xdit_backend.host.calls import Call
from xdit_backend.protocol.specs import METHODS_OF_SPARSE, Layout, SparseOptions
from xdit_backend.tools.bench.quality import DEMO, conditioning_of, decode
from xdit_backend.tools.bench.sampler import Method, Model, Sampling, sample
from xdit_backend.tools.bench.worker_groups import start_clients

SIDE = 64                                  # of a latent; the model was trained with 16
PROMPTS = ["red apple", "grinning face", "blue heart", "house with garden", "sun", "dog face", "rocket", "green salad"]
# fraction of the blocks left out -> threshold of sol-attn that leaves out as many of normally distributed scores
TAUS = {50: 0.0, 75: 0.6745, 90: 1.2816}


def options_of(method, sparsity):
    given = {"tau": TAUS[sparsity]} if method == "sol-attn" else {"keep_percent": 100.0 - sparsity}
    return SparseOptions(method, min_tokens=0, start_percent=0.0, **given)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--methods", nargs="+", choices=METHODS_OF_SPARSE, default=METHODS_OF_SPARSE)
    options = parser.parse_args()
    checkpoint, prompts = open_checkpoint(str(DEMO)), PROMPTS[:options.prompts]
    model = Model(checkpoint.spec("float32", "float32"), CHANNELS, checkpoint.family.inputs.time_scale)
    noise = torch.stack([torch.randn(CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(number))
                         for number in range(len(prompts))])
    call = Call(noise, torch.zeros(1), conditioning_of(checkpoint.family, prompts))
    sampling = Sampling(shifted_sigmas(options.steps).tolist(), 3.0)
    client = start_clients({1}, 0)[1]
    try:
        def images(sparse):
            of = dataclasses.replace(call, options=dataclasses.replace(call.options, sparse=sparse))
            latent = sample(client, model, of, sampling, Method(Layout()))
            client.end_run()
            return decode(latent)

        dense = images(None)
        print("| method | 50 % | 75 % | 90 % |\n| --- | --- | --- | --- |")
        for method in options.methods:
            found = []
            for sparsity in TAUS:
                error = ((images(options_of(method, sparsity)) - dense) / 2).square().mean((1, 2, 3)).clamp(min=1e-10)
                found.append(f"{statistics.mean((-10 * error.log10()).tolist()):.1f} dB")
            print(f"| {method} | {' | '.join(found)} |", flush=True)
    finally:
        client.close()


if __name__ == "__main__":
    main()
