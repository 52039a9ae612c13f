"""A real ComfyUI in this process, with the pack loaded by ComfyUI's own loader of custom nodes."""

import gc
import importlib
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.comfyui_server import ROOT, comfyui_folder, run_async
from tests.support.tiny_checkpoints import detect_thin, families, import_comfyui, save, thin_class
from xdit_backend.checkpoints.checkpoint import open_checkpoint
from xdit_backend.models.common.example_inputs import conditioning_of, pixels_a_side
from xdit_backend.system import trim_heap

LATENT_SIZES = {"flux": (16, 16), "flux-schnell": (16, 16), "flux-fill": (16, 16), "flux-canny": (16, 16),
                "pixart": (34, 36),
                "pixart-alpha": (34, 36), "flux2": (8, 10), "flux2-klein": (8, 10), "mage-flow": (8, 10),
                "ltx-video": (8, 9), "ltx-video-causal": (8, 9),
                **dict.fromkeys(("ltx-2", "ltx-2-plain", "ltx-2.3"), (4, 5)),
                "minimax-h3": (6, 9), "minimax-h3-curve": (6, 9)}
DEGREES = ("cfg", "data", "pipefusion", "displaced", "ring", "ulysses", "tensor")


def in_pixels(kind, size):
    """Rows and columns of a latent, larger where it is a picture's pixels, so that they come to as many tokens."""
    return tuple(side * pixels_a_side(families()[kind]) for side in size)


def in_dims(family, size):
    """The dims of a latent after its channels, for rows and columns; of sound its length, an odd one."""
    if family.testing.rows is not None:
        return family.testing.rows, 2 * size[0] * size[-1] + 1
    sizes = {1: (2 * size[0] * size[-1] + 1,), 2: size, 3: (family.testing.frames, *size)}
    return sizes[len(family.inputs.latent.patch)]


def in_parts(*parts):
    """A latent of several parts, as ComfyUI's nodes make it."""
    from comfy.nested_tensor import NestedTensor
    return NestedTensor(parts)


class ComfyUI:
    """ComfyUI's modules and this pack's nodes, and short ways to use them as a workflow would."""

    def __init__(self, folder, base):
        import_comfyui(folder)
        detect_thin()
        self.folder_paths, self.base = importlib.import_module("folder_paths"), Path(base)
        for name in ("diffusion_models", "checkpoints", "vae"):
            (self.base / name).mkdir()
            self.folder_paths.add_model_folder_path(name, str(self.base / name), is_default=True)
        # what whoever uses this ComfyUI has set and measured is theirs
        for name in ("user", "output", "temp"):
            (self.base / name).mkdir()
            getattr(self.folder_paths, f"set_{name}_directory")(str(self.base / name))
        self.nodes, self.samplers = importlib.import_module("nodes"), importlib.import_module("comfy.samplers")
        self.management = importlib.import_module("comfy.model_management")
        assert run_async(self.nodes.load_custom_node(str(ROOT))), "ComfyUI could not load the pack"
        classes = self.nodes.NODE_CLASS_MAPPINGS
        self.pack = sys.modules[classes["XDiTLoadModel"].__module__.rpartition(".nodes.")[0]]
        self.load_model, self.parallel_config = classes["XDiTLoadModel"], classes["XDiTParallelConfig"]
        self.parallel_sampler = classes["XDiTParallelSampler"]
        self.vae_decode, self.vae_encode = classes["XDiTVAEDecode"], classes["XDiTVAEEncode"]
        groups = importlib.import_module(f"{self.pack.__name__}.nodes.bridge.workers.worker_groups")
        # which take long to start: tests take turns with one, two and four workers
        self.groups, groups.MAX_SHARING = groups.GROUPS, 3
        self.proxy = importlib.import_module(f"{self.pack.__name__}.nodes.bridge.model.proxy_model")
        self.detection = importlib.import_module(f"{self.pack.__name__}.nodes.bridge.model.detection")
        self.errors = importlib.import_module(f"{self.pack.__name__}.xdit_backend.protocol.errors")
        self._native, self._references = {}, {}

    def file(self, kind, folder="diffusion_models", **options):
        """The name of a tiny checkpoint, made when it is first asked for."""
        name = (f"{kind}-{'-'.join(str(value) for value in options.values())}.safetensors"
                if options else f"{kind}.safetensors")
        if not (self.base / folder / name).exists():
            save(kind, self.base / folder / name, **options)
        return name

    def native(self, kind, **options):
        """The MODEL of ComfyUI's own loader, in float32."""
        name = self.file(kind, **options)
        if name not in self._native:
            self._native[name] = self.nodes.UNETLoader().load_unet(name, "default")[0]
        # HiDream-O1's module keeps keys and values of a prompt, also those of another LoRA
        getattr(self._native[name].model.diffusion_model, "clear_kv_cache", int)()
        return self._native[name]

    def module(self, kind, **options):
        """ComfyUI's own module, to be called by itself: the weights are the file's,
        whatever nodes have changed of them in place."""
        model = self.native(kind, **options)
        self.management.load_models_gpu([model])
        return model.model.diffusion_model

    def config(self, devices="cpu", **degrees):
        """XDIT_PARALLEL: auto mode, or manual where degrees are given, as cfg=2. Other settings by their names."""
        values = {"devices": devices, "mode": "manual" if degrees else "auto", "num_patches": 0, "warmup_steps": 1,
                  "warmup": "whole"} | {name: value for name, value in degrees.items() if name not in DEGREES}
        return self.parallel_config.execute(**values,
                                            **{f"{name}_degree": degrees.get(name, 1) for name in DEGREES}).args[0]

    def native_checkpoint(self, name):
        """The MODEL that ComfyUI's own loader takes out of an all-in-one checkpoint."""
        path = str(self.base / "checkpoints" / name)
        return importlib.import_module("comfy.sd").load_checkpoint_guess_config(
            path, output_vae=False, output_clip=False)[0]

    def ours(self, kind, config, weight_dtype="fp32", **options):
        return self.load_model.execute(self.file(kind, **options), weight_dtype, config).args[0]

    def all_in_one(self, kind):
        """The name of an all-in-one checkpoint: the diffusion model, a VAE, and some of a text encoder."""
        return self.file(kind, folder="checkpoints", prefix="model.diffusion_model.", vae="vae-sd3")

    def transformer_config(self, kind):
        """The arguments of diffusers' class for the tiny checkpoint."""
        shapes = open_checkpoint(self.base / "diffusion_models" / self.file(kind)).shapes
        return families()[kind].detection.config(shapes)

    def conditioning(self, kind, seed, tokens=20):
        generator = torch.Generator().manual_seed(seed)
        tokens += 7 * seed if kind == "seedvr2" else 0         # of one length, its class mixes branches in a batch
        size = in_pixels(kind, LATENT_SIZES.get(kind, (16, 18)))
        made = conditioning_of(families()[kind], self.transformer_config(kind), generator, {"context": tokens},
                               size=in_dims(families()[kind], size) if families()[kind].is_comfyuis else ())
        pooled = made.get("y", made.get("clip_text_pooled"))
        if pooled is not None and families()[kind].plan.is_unet:    # the rest of it ComfyUI makes of the picture's size
            pooled = pooled[:, :1280] if pooled.ndim > 1 and not families()[kind].has_frames_as_batch else None
        options = {} if pooled is None else {"pooled_output": pooled}
        if families()[kind].has_frames_as_batch:               # of which ComfyUI makes the vector
            options |= {"motion_bucket_id": 100 + seed, "fps": 9, "augmentation_level": 0.1 * seed,
                        "concat_latent_image": torch.randn(1, 4, *size, generator=generator),
                        "elevation": [5.0, 10.0, 15.0], "azimuth": [0.0, 90.0, 200.0 + seed]}
        if kind == "sd-x4-upscaler":                           # of which ComfyUI makes what stands beside the latent
            options |= {"concat_image": torch.randn(1, 3, *size, generator=generator), "noise_augmentation": 0.3}
        if kind == "hunyuanimage-refiner":                     # the picture that it mends
            options |= {"concat_latent_image": torch.randn(1, 32, 1, *size, generator=generator),
                        "noise_augmentation": 0.1 * seed}
        if "encoder_hidden_states_llama3" in made:
            options["conditioning_llama3"] = made["encoder_hidden_states_llama3"]
        if "t5xxl_ids" in made:                                # the text encoder says them of one text
            options |= {"t5xxl_ids": made["t5xxl_ids"][0, :7 + seed % 2],
                        "t5xxl_weights": made["t5xxl_weights"][0, :7 + seed % 2, 0]}
        if "text_embedding_mask" in made:
            options |= {"attention_mask": made["text_embedding_mask"],
                        "conditioning_mt5xl": made["encoder_hidden_states_t5"],
                        "attention_mask_mt5xl": made["text_embedding_mask_t5"]}
        if "y" in families()[kind].inputs.ignored:                    # which ComfyUI asks for, and its model leaves out
            options["pooled_output"] = torch.zeros(1, 8)
        if kind.startswith("ltx-2"):                           # as its text encoder gives it, for ComfyUI to prepare
            made["context"] = made["context"].chunk(2, -1)[0] if kind != "ltx-2.3" else made["context"]
            options["unprocessed_ltxav_embeds"] = True
        if "reference_image" in made:
            options["reference_latents"] = [made["reference_image"]]
        if "num_tokens" in made:
            options["attention_mask"] = torch.ones(1, tokens).long()
        options |= {name: made[name] for name in (
            "lq_latent", "degrade_sigma", "camera_conditions", "audio_embed", "control_video", "reference_motion",
            "audio_inject_scale", "condition", "conditioning_scale") if name in made}
        for name, of_image in (("reference_latent", "reference_latents"), ("pose_latents", "pose_video_latent")):
            if name in made:                                   # of SCAIL's, ComfyUI adds channels of ones
                latent = made[name][:, :families()[kind].num_channels(self.transformer_config(kind))]
                latent = latent if latent.ndim == 5 else latent[:, :, None]        # of Fun's, ComfyUI takes one frame
                options[of_image] = [latent] if name == "reference_latent" else latent
        if "context_pose" in made:
            options |= {"cross_attn_pose": made["context_pose"], **{name: made[name].item() for name in (
                "pose_strength", "reference_strength")}, **{f"clip_vision_output{of}": SimpleNamespace(
                    penultimate_hidden_states=made[f"clip_fea{of}"]) for of in ("", "_pose")}}
        options |= {f"{of}_mask_28ch": made[name].movedim(2, 1)
                    for name, of in (("ref_mask_latents", "ref"), ("sam_latents", "driving")) if name in made}
        if "lyric_embed" in made:                              # and sound to sing like, or none
            options["conditioning_lyrics"] = made["lyric_embed"]
            options |= {"reference_audio_timbre_latents": [made["refer_audio"]]} if seed % 2 else {}
        if "lyric_token_idx" in made:
            options |= {"conditioning_lyrics": made["lyric_token_idx"], "lyrics_strength": 0.6 + 0.1 * (seed % 3)}
        options |= {"fps": 30 / len(made["frame_lasts"])} if "frame_lasts" in made else {}
        if "ref_mask_flag" in made:
            options["ref_mask_flag"] = bool(len(made["ref_mask_flag"]))
        # their text encoders say which tokens are real
        if families()[kind].name in ("LTX-Video", "Mochi", "Cosmos-Predict1"):
            options["attention_mask"] = (torch.arange(tokens) < 13 - 3 * seed % 7)[None].long()
        if "clip_text" in made:                                # and of some a picture, as a vision model says it
            seen = SimpleNamespace(image_embeds=made["clip_img"][:, 0])
            images = {"unclip_conditioning": [{"strength": 0.7, "clip_vision_output": seen}]} if seed % 2 else {}
            return [[made["clip_text"], {"pooled_output": made["clip_text_pooled"]} | images]]
        if "input_ids" in made:                                # which its own model encodes
            return [[made["input_ids"][..., None].float(), {"text_input_ids": made["input_ids"]}]]
        if "effnet" in made:                                   # whose model reads no text but the pooled one
            return [[made["clip"][:, None], {"pooled_output": made["clip"], "stable_cascade_prior": made["effnet"]}]]
        return [[made["context"], options]]

    def latent(self, kind, batch=1, size=None, audio=7):
        family, size = families()[kind], in_pixels(kind, size or LATENT_SIZES.get(kind, (16, 18)))
        size = in_dims(family, size)
        config = self.transformer_config(kind)
        video = torch.zeros(batch, family.num_channels(config), *size)
        if not family.inputs.components.names:
            return {"samples": video}
        [beside] = family.inputs.components.names
        return {"samples": in_parts(family.inputs.components.first(video),
                                    torch.zeros(family.inputs.components.shapes(config, video.shape, audio)[beside]))}

    @contextmanager
    def cancelled_amid(self, text):
        """What is done in here on two CPUs is cancelled in the middle of this phase, and ends so."""
        workers, phases = self.groups.client(("cpu", "cpu")).workers, []
        on_phase, check = workers.on_phase, workers.check

        def told(phase):
            phases.append(phase)
            on_phase(phase)

        def cancel():
            if any(phase.text == text and 0 < phase.done < phase.total for phase in phases):
                raise self.management.InterruptProcessingException

        workers.on_phase, workers.check = told, cancel
        try:
            with pytest.raises(self.management.InterruptProcessingException):
                yield
        finally:
            workers.on_phase, workers.check = on_phase, check

    def unload_all(self):
        """Have ComfyUI unload its models. It forgets those that are gone first:
        its own loop over them fails at one that it still lists."""
        gc.collect()
        self.management.cleanup_models()
        self.management.unload_all_models()

    def sample_dual(self, model, other, seeds=(1, 2)):
        """Euler steps with ComfyUI's DualModelGuider: `model` for the positive prompt, `other` for the negative one."""
        from comfy_extras.nodes_custom_sampler import DualModelGuider
        positive, negative = (self.conditioning("sd3", seed) for seed in seeds)
        guider = DualModelGuider.execute(model, positive, 4.0, other, negative).args[0]
        sigmas = self.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 4)
        noise = torch.randn(1, 16, 16, 18, generator=torch.Generator().manual_seed(3))
        with torch.inference_mode():
            return guider.sample(noise, torch.zeros_like(noise), self.samplers.sampler_object("euler"), sigmas, seed=3)

    def sample(self, model, kind, sampler="euler", scheduler="simple", steps=3, cfg=4.0, positive=None, negative=None,
               latent=None, denoise=1.0, seed=7):
        """Latents, through Parallel Sampler for our MODEL and KSampler for a native one."""
        positive, negative = positive or self.conditioning(kind, 1), negative or self.conditioning(kind, 2)
        latent = latent or self.latent(kind)
        arguments = (model, seed, steps, cfg, sampler, scheduler, positive, negative, latent)
        with torch.inference_mode():
            if isinstance(model, self.proxy.ProxyPatcher):
                return self.parallel_sampler.execute(*arguments, denoise).args[0]["samples"]
            return self.nodes.KSampler().sample(*arguments, denoise)[0]["samples"]

    def reference(self, kind, **arguments):
        """The native KSampler's latents, computed once for the same arguments (which must be hashable)."""
        key = (kind, *sorted(arguments.items()))
        if key not in self._references:
            self._references[key] = self.sample(self.native(kind), kind, **arguments)
        return self._references[key]


@pytest.fixture(scope="package")
def comfyui(tmp_path_factory):
    folder = comfyui_folder()
    if folder is None:
        pytest.skip("no ComfyUI: run `python3 start.py test`, or name one in XDIT_COMFYUI")
    host = ComfyUI(folder, tmp_path_factory.mktemp("models"))
    gc.collect()
    gc.freeze()                            # ComfyUI's objects too, as in tests/conftest.py
    yield host
    host.groups.close()
    host.management.current_loaded_models.clear()              # gigabytes by now, which later tests need
    gc.collect()
    trim_heap()


@pytest.fixture(autouse=True)
def runs_end(request):
    """No test leaves conditioning with the workers that other tests share, nor a MODEL that is gone in ComfyUI's list,
    at which it fails where a ControlNet asks for all that are loaded."""
    if "comfyui" in request.fixturenames:
        listed = request.getfixturevalue("comfyui").management.current_loaded_models
        listed[:] = [loaded for loaded in listed if loaded.model is not None]
    yield
    if "comfyui" in request.fixturenames:
        assert not any(client.num_runs
                       for client in request.getfixturevalue("comfyui").groups.clients), "a run has not ended"


@pytest.fixture(scope="package")
def vae_of(comfyui):
    """vae_of(kind, encoder=False): ComfyUI's VAE object of a tiny checkpoint."""
    vaes = {}

    def load(kind, **options):
        name = comfyui.file(kind, "vae", **options)
        if name not in vaes:
            with thin_class(kind):
                vaes[name] = comfyui.nodes.VAELoader().load_vae(name)[0]
        return vaes[name]
    return load


@pytest.fixture
def said(comfyui, monkeypatch):
    """What the node tells a person about the run."""
    texts = []
    for module in ("sampling.remote_model", "sampling.sampler_wrappers", "vae.distributed_vae"):
        monkeypatch.setattr(sys.modules[f"{comfyui.pack.__name__}.nodes.bridge.{module}"], "show_text", texts.append)
    return texts
