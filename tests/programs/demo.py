"""The demo: a real ComfyUI draws a prompt on two workers, then times one worker and two on a larger model. Called by
start.py.

    XDIT_COMFYUI=FOLDER python -m tests.programs.demo [--prompt TEXT] [--keep] [--port N]
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.comfyui_server import PACK, ROOT, Host, HostError, comfyui_folder, make_base

BASE = ROOT / ".host" / "demo"
MODEL, VAE = "xdit_demo.safetensors", "xdit_demo_vae.safetensors"     # they come with the pack
TIMED_MODEL = "random_sd3.safetensors"
TIMED_SIZE, TIMED_STEPS = 384, 8  # pixels; 576 image tokens
TOLERANCE = 1e-3  # of the latents' largest value; float32 on both sides


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="cat face on a blue background")
    parser.add_argument("--keep", action="store_true", help="leave ComfyUI running until Ctrl-C")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    comfyui = comfyui_folder()
    if comfyui is None:
        sys.exit("There is no ComfyUI: run start.py, or name its folder in XDIT_COMFYUI.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)              # start.py passes it on
    try:
        run(comfyui, options)
    except HostError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("Stopped.")


def run(comfyui, options):
    num_gpus = count_gpus()
    one, two = ("cuda:0", "cuda:0,cuda:1") if num_gpus > 1 else ("cpu", "cpu,cpu")
    num_threads = max(1, (os.cpu_count() or 1) // 2)
    environment = {} if num_gpus > 1 else {"OMP_NUM_THREADS": str(num_threads)}
    if num_gpus > 1:
        print("One GPU is compared with two.", flush=True)
    else:
        print(f"This machine has {'one GPU' if num_gpus else 'no GPU'}: CPU workers stand in for GPUs, each on "
              f"{num_threads} of its {os.cpu_count()} cores.", flush=True)
    make_base(BASE, extra_packs=[ROOT / "tests" / "support" / "host_nodes", ROOT / "tests" / "support" / "demo_page"])
    make_checkpoint("sd3", BASE / "models" / "diffusion_models" / TIMED_MODEL)

    print("Starting ComfyUI", flush=True)
    with Host(comfyui, BASE, cpu=num_gpus == 0, port=options.port, environment=environment) as host:
        print(f"ComfyUI answers at {host.url}\nDrawing \"{options.prompt}\" on {two}", flush=True)
        image, image_s = draw(host, two, options.prompt)
        print(f"Picture       {image}", flush=True)
        latent_one, one_s = measure(host, one)
        latent_two, two_s = measure(host, two)
        difference = compare(latent_one, latent_two)
        print(f"""
Picture       {image}
              "{options.prompt}", drawn by two workers in {image_s:.1f} s, their start and loading included.
One worker    {one_s:6.2f} s for {TIMED_STEPS} steps ({one}) of a larger model with random weights
Two workers   {two_s:6.2f} s for {TIMED_STEPS} steps ({two}): {one_s / two_s:.2f} times as fast
Same result   largest difference between the two latents: {difference:.1e} of their largest value
Log           {host.log}
""", flush=True)
        if difference > TOLERANCE:
            raise HostError(f"The two results differ by more than {TOLERANCE:.0e}: that is a fault.")
        if options.keep:
            print(f"Open {host.url} for the graph of this picture; there are others at Templates > Extensions > "
                  f"{PACK}.\nComfyUI runs until you press Ctrl-C here.", flush=True)
            wait_for_end(host)
        else:
            print("To open the page and try the graph yourself: python3 start.py --keep", flush=True)
    print("ComfyUI has ended.", flush=True)


def draw(host, devices, prompt):
    """The prompt's picture by the demo model: (path, seconds)."""
    graph = {
        "parallel": parallel_config(devices),
        "model": node("XDiTLoadModel", model_name=MODEL, weight_dtype="default", parallel=["parallel", 0]),
        "positive": node("XDiTDemoPrompt", text=prompt),
        "negative": node("XDiTDemoPrompt", text=""),
        "latent": node("EmptySD3LatentImage", width=128, height=128, batch_size=1),
        "sampler": sampler(seed=1, steps=20, cfg=3.0),
        "vae": node("VAELoader", vae_name=VAE),
        "decode": node("XDiTVAEDecode", samples=["sampler", 0], vae=["vae", 0], parallel=["parallel", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="xdit_demo"),
    }
    outputs, elapsed_s = host.run(graph)
    return output_path(outputs, "images"), elapsed_s


def measure(host, devices):
    """Time sampling on these devices, after a warm-up. Returns (latent's path, seconds)."""
    print(f"Workers on {devices}: starting them and running once to warm up", flush=True)
    host.run(timed_workflow(devices, seed=1, steps=1))
    print(f"Workers on {devices}: the timed run", flush=True)
    outputs, elapsed_s = host.run(timed_workflow(devices, seed=2, steps=TIMED_STEPS))
    return output_path(outputs, "latents"), elapsed_s


def timed_workflow(devices, seed, steps):
    """The graph in ComfyUI's API format. Nothing but the sampler takes time in it."""
    return {
        "parallel": parallel_config(devices),
        "model": node("XDiTLoadModel", model_name=TIMED_MODEL, weight_dtype="fp32", parallel=["parallel", 0]),
        "positive": node("XDiTTestConditioning", seed=1, tokens=77, family="sd3"),
        "negative": node("XDiTTestConditioning", seed=2, tokens=77, family="sd3"),
        "latent": node("EmptySD3LatentImage", width=TIMED_SIZE, height=TIMED_SIZE, batch_size=1),
        "sampler": sampler(seed, steps, cfg=4.0),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="xdit_demo"),
    }


def parallel_config(devices):
    return node("XDiTParallelConfig", devices=devices, mode="auto", cfg_degree=1, data_degree=1, pipefusion_degree=1,
                ring_degree=1, ulysses_degree=1, tensor_degree=1, num_patches=0, warmup_steps=1)


def sampler(seed, steps, cfg):
    return node("XDiTParallelSampler", model=["model", 0], seed=seed, steps=steps, cfg=cfg, sampler_name="euler",
                scheduler="simple", positive=["positive", 0], negative=["negative", 0], latent_image=["latent", 0],
                denoise=1.0)


def node(class_type, **inputs):
    return {"class_type": class_type, "inputs": inputs}


def output_path(outputs, kind):
    [file] = outputs["save"][kind]
    return BASE / file["type"] / file["subfolder"] / file["filename"]


def compare(path, other_path):
    """Largest difference of two saved latents, relative to their largest value."""
    from safetensors.numpy import load_file
    latent, other = (load_file(path)["latent_tensor"] for path in (path, other_path))
    return float(abs(latent - other).max() / abs(latent).max())


def count_gpus():
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              check=True).stdout.split()[-1])


def make_checkpoint(kind, path):
    """A small random checkpoint in ComfyUI's own file format; made once."""
    maker = Path(__file__).parent.parent / "support" / "tiny_checkpoints.py"
    if path.is_file() and path.stat().st_mtime > maker.stat().st_mtime:
        return
    print(f"Making a small random checkpoint: {path}", flush=True)
    done = subprocess.run([sys.executable, "-m", "tests.support.tiny_checkpoints", kind, str(path), "--size", "demo"],
                          cwd=ROOT,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    if done.returncode:
        raise HostError(f"Making {path.name} failed:\n{done.stdout}")


def wait_for_end(host):
    try:
        while host.process.poll() is None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        print("Stopping ComfyUI", flush=True)


if __name__ == "__main__":
    main()
