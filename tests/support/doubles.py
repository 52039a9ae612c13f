"""Nodes in the place of ComfyUI's that load what no template's test can have: models of gigabytes are tiny ones, text
encoders say random numbers for each text, images, videos and audio are random. Used by
tests/programs/stock_templates.py."""

import zlib
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import torch

from tests.integration.lora.test_lora import Loras
from tests.support import seedvr2_doubles, triposplat_doubles
from tests.support.control_zoo import save_controlnet
from tests.support.model_patch_zoo import save_model_patch, thin_classes
from tests.support.tiny_checkpoints import thin_class

# what text encoders say beside the text itself; other conditioning is what a workflow's nodes make
OF_TEXT = {"pooled_output", "attention_mask", "conditioning_llama3", "t5xxl_ids", "t5xxl_weights",
           "conditioning_mt5xl", "attention_mask_mt5xl", "unprocessed_ltxav_embeds", "conditioning_lyrics",
           "audio_codes", "text_input_ids"}
CLIP_LOADERS = ("CLIPLoader", "DualCLIPLoader", "TripleCLIPLoader", "QuadrupleCLIPLoader", "LTXAVTextEncoderLoader")
VAES = {"sd3": "vae-sd3", "wan": "vae-wan", "wan22-ti2v": "vae-wan22", "flux2": "vae-flux2", "lens": "vae-flux2",
        "ltx-video": "vae-ltx", "ltx-2": "vae-ltx2", "ltx-2.3": "vae-ltx2", "cosmos-predict1": "vae-cosmos",
        "mochi": "vae-mochi", "cogvideox": "vae-cogvideox", "cogvideox-1.5": "vae-cogvideox",
        "hunyuanvideo": "vae-hunyuan", "hunyuanvideo-1.5": "vae-hunyuan15", "hunyuanimage": "vae-hunyuanimage",
        "ernie-image": "vae-flux2", "ideogram-4": "vae-flux2", "triposplat": "vae-flux2",
        "kandinsky-5": "vae-hunyuan", "kandinsky-5-image": "vae-flux",
        "cosmos-predict2": "vae-wan", "anima": "vae-wan", "qwen-image": "vae-wan", "krea-2": "vae-wan",
        "joyimage": "vae-wan", "minimax-h3": "vae-minimax", "svd": "vae-svd"}
# tokens and width of what a model is told of an image
SEEN = {"hunyuan3d-2.1": (4, 1024), "hunyuan3d-2": (4, 24), "wan-flf": (4, 1280), "wan": (257, 1280),
        "hunyuanvideo-1.5": (729, 1152)}
# layers and width of audio features
AUDIO_FEATURES = {"wan-s2v": (25, 1024), "wan-i2v": (13, 768)}
AUDIO_KINDS = "ace-step-1.0", "stable-audio-open", "stable-audio-3", "minimax-music-3"
EMBEDDED = {"svd": 1024, "sv3d-u": 1024, "sv3d-p": 1024, "stable-zero123": 768}         # numbers that say all of it
LARGE = 256 * 256                          # pixels; nodes that are told no size make a million
CONTROL = {"sd15": "sd15", "sdxl": "sdxl", "qwen-image": "qwen-instantx", "sd3": "sd3-instantx",
           "sd35-large": "sd35-stability", "flux": "flux-instantx"}


def vae_of(kind):
    """The kind of VAE of a kind of model."""
    for name in (kind, kind.rpartition("-")[0], kind.partition("-")[0]):
        if name in VAES:
            return VAES[name]
    if kind.startswith(("sd1", "sd2", "sd-x4", "sdxl", "sv3d", "stable-zero123")):
        return "vae-sd"
    return "vae-wan" if kind.startswith("wan") else "vae-flux"


def _encode_small(encode, pixels):
    while pixels.shape[-3] * pixels.shape[-2] > LARGE:
        pixels = pixels[..., ::2, ::2, :]
    return encode(pixels)


def _as_minimax_encodes(audio):
    """Of audio, (1, T, channels) -> (1, 32, ...)."""
    return audio[:, ::960, :1].movedim(-1, 1)[:, None].repeat(1, 32, 2, 1)


def _has_file(vae):
    return type(vae.first_stage_model).__name__ != "PixelspaceConversionVAE"


def _as_mage_encodes(pixels):
    """(B, H, W, 3) -> (B, 128, H / 16, W / 16)"""
    return pixels[:, 8::16, 8::16, :1].movedim(-1, 1).repeat(1, 128, 1, 1) - 0.5


def _audio_of(latent):
    """Of a latent of several parts, the last."""
    latent = latent.unbind()[-1] if latent.is_nested else latent
    return {"waveform": latent.flatten(1)[:, None], "sample_rate": 44100}


def _pixels_of(latent):
    return latent[:, :3].movedim(1, -1).flatten(0, 1)


def _found_in(image):
    """A mask of a thing in images (F, H, W, 3) -> (F, H, W)."""
    mask = torch.zeros(image.shape[:3])
    mask[:, image.shape[1] // 4:image.shape[1] // 2, image.shape[2] // 4:image.shape[2] // 2] = 1
    return mask


def _tracked_in(images, **_):
    """The same as SAM 3's track of it."""
    from comfy.ldm.sam3.tracker import pack_masks
    rows, columns = images.shape[1:3]
    masks = _found_in(images)[:, None, :, :columns // 8 * 8]
    return ({"packed_masks": pack_masks(masks), "orig_size": (rows, columns), "n_frames": len(images),
             "scores": [0.9]},)


def _noise_as_asked(width, height, length, batch_size, **_):
    """Noise, in the place of that which moves with a video, for VOID."""
    from comfy_extras.nodes_void import _valid_void_length
    frames = (_valid_void_length(length) - 1) // 4 + 1
    return ({"samples": torch.randn(batch_size, 16, frames, height // 8, width // 8,
                                    generator=torch.Generator().manual_seed(7))},)


def _twice(latent):
    samples = latent["samples"].repeat_interleave(2, -1).repeat_interleave(2, -2)
    return {name: value for name, value in latent.items() if name != "noise_mask"} | {"samples": samples}


class Tokens(dict):
    """What a text encoder is given; words that are not there are none."""

    def __missing__(self, name):
        return []

    @property
    def seed(self):
        return zlib.crc32(repr(sorted((key, str(value)) for key, value in self.items())).encode()) % 2 ** 31


class Clip:
    """A text encoder for a kind of model. moved_by: by how much, relatively, each number is another."""

    def __init__(self, comfyui, kind, moved_by=0.0):
        self.comfyui, self.kind, self.moved_by = comfyui, kind, moved_by
        self.cond_stage_model, self.patcher = torch.nn.Module(), SimpleNamespace(model_options={})
        self.layer_idx = None

    def clone(self, *_, **__):
        return self

    def add_patches(self, *_, **__):
        return []

    def clip_layer(self, *_):
        pass

    def set_tokenizer_option(self, *_):
        pass

    def tokenize(self, text="", *_, images=(), **more):
        told = {name: value for name, value in more.items() if isinstance(value, (str, int, float))}
        return Tokens(text=text, images=len(images or ()), **told)

    def generate(self, *_, **__):
        return [0]

    def decode(self, *_, **__):
        return "a red fox in the snow"

    def encode_from_tokens_scheduled(self, tokens, *_, add_dict=None, **__):
        [[text, options]] = self.comfyui.conditioning(self.kind, tokens.seed)
        generator = torch.Generator().manual_seed(0)
        text = text * (1 + self.moved_by * torch.randn(text.shape, generator=generator))
        return [[text, {name: value for name, value in options.items() if name in OF_TEXT} | (add_dict or {})]]

    def encode_from_tokens(self, tokens, return_pooled=False, return_dict=False):
        [[text, options]] = self.encode_from_tokens_scheduled(tokens)
        if return_dict:
            return {"cond": text, **options}
        return (text, options.get("pooled_output")) if return_pooled else text


class StandIns:
    """Puts them where ComfyUI's nodes are. kind_of(file): the kind of tiny model in the place of a file."""

    def __init__(self, comfyui, kind_of, config):
        self.comfyui, self.kind_of, self.config = comfyui, kind_of, config
        self.kind, self.moved_by, self.shown = None, 0.0, {}   # of the workflow that runs
        self.loras, self._vaes = Loras(comfyui), {}
        self._classes = comfyui.nodes.NODE_CLASS_MAPPINGS
        for folder in ("controlnet", "model_patches"):
            (comfyui.base / folder).mkdir(exist_ok=True)
            comfyui.folder_paths.add_model_folder_path(folder, str(comfyui.base / folder), is_default=True)
        self._put()

    def _put(self):
        generator = torch.Generator().manual_seed(3)
        image = torch.rand(1, 96, 128, 3, generator=generator)
        mask = torch.zeros(1, 96, 128)
        mask[:, 20:70, 30:90] = 1
        audio = {"waveform": torch.rand(1, 2, 16000, generator=generator) - 0.5, "sample_rate": 16000}
        for name, make in {
                **dict.fromkeys(CLIP_LOADERS, lambda **_: (self.clip(),)),
                "CheckpointLoaderSimple": self._checkpoint,
                "ImageOnlyCheckpointLoader": lambda ckpt_name, **_: (
                    self.native(ckpt_name),
                    SimpleNamespace(encode_image=partial(self._vision, kind=self.kind_of(ckpt_name))), self.vae()),
                "XDiTLoadClipVae": lambda **_: (self.clip(), self.vae()),
                "VAELoader": lambda vae_name, **_: (self.vae(vae_name),),
                "LTXVAudioVAELoader": lambda **_: (self._audio_vae(),),
                **dict.fromkeys(("VAEDecodeAudio", "VAEDecodeAudioTiled"),
                                lambda samples, **_: (_audio_of(samples["samples"]),)),
                "CLIPVisionLoader": lambda **_: (triposplat_doubles.vision() if self.kind == "triposplat"
                                                 else SimpleNamespace(encode_image=self._vision),),
                "LoadBackgroundRemovalModel": lambda **_: (SimpleNamespace(encode_image=_found_in),),
                "AudioEncoderLoader": lambda **_: (SimpleNamespace(encode_audio=self._encoded_audio),),
                "ControlNetLoader": self._control, "ModelPatchLoader": self._patch,
                "StyleModelLoader": lambda **_: (SimpleNamespace(get_cond=lambda _: self.clip().encode_from_tokens(
                    Tokens(text="style"))),),
                "UpscaleModelLoader": lambda **_: (None,), "LatentUpscaleModelLoader": lambda **_: (None,),
                "ImageUpscaleWithModel": lambda image, **_: (image.repeat_interleave(2, 1).repeat_interleave(2, 2),),
                "LTXVLatentUpsampler": lambda samples, **_: (_twice(samples),),
                # which makes a million pixels
                "FluxKontextImageScale": lambda image: (image[:, ::2, ::2],),
                "LoadImage": lambda **_: (image, mask), "LoadImageMask": lambda **_: (mask,),
                "LoadImageOutput": lambda **_: (image, mask), "Painter": lambda **_: (image, mask),
                "LoadDA3Model": lambda **_: (None,), "DA3Inference": lambda image, **_: (image,),
                "DA3Render": lambda da3_geometry, **_: (da3_geometry,),
                "LoadMoGeModel": lambda **_: (None,), "MoGeInference": lambda image, **_: (image,),
                "MoGeRender": lambda moge_geometry, **_: (moge_geometry,),
                "SAM3_Detect": lambda image, **_: (_found_in(image), []), "SAM3_VideoTrack": _tracked_in,
                "OpticalFlowLoader": lambda **_: (None,), "VOIDWarpedNoise": _noise_as_asked,
                "LoadVideo": lambda **_: (self._video(image, audio),),
                "LoadAudio": lambda **_: (audio,), "RecordAudio": lambda **_: (audio,)}.items():
            if name in self._classes:
                self._replace(name, make)
        triposplat_doubles.shorten(self._classes["TripoSplatConditioning"])
        decode = self._classes["XDiTVAEDecode"]
        self._replace("XDiTVAEDecode", lambda samples, vae, **more: (
            (vae.decode(samples["samples"]),) if isinstance(vae, SimpleNamespace) or not _has_file(vae)
            else decode.execute(samples, vae, **more).args))
        self._load_model = self._classes["XDiTLoadModel"]
        self._replace("XDiTLoadModel", lambda model_name, **_: (self.ours(model_name),))
        self._replace("UNETLoader", lambda unet_name, **_: (self.native(unet_name),))
        self._replace("LoraLoaderModelOnly", lambda model, strength_model, **_: (self._with_lora(
            model, strength_model),))
        self._replace("LoraLoader", lambda model, clip, strength_model, **_: (
            self._with_lora(model, strength_model), clip))
        for name, node in list(self._classes.items()):
            if getattr(node, "OUTPUT_NODE", False) and name != "PreviewAny":        # which gives on what it shows
                self._replace(name, None)

    def _replace(self, name, make):
        """make(**inputs): the outputs; None: what an output node shows is kept."""
        known = self._classes[name]

        def inputs(cls):
            given = known.INPUT_TYPES()
            return {"required": {}, "optional": {**given.get("required", {}), **given.get("optional", {})},
                    **({} if make else {"hidden": {"unique_id": "UNIQUE_ID"}})}

        def show(node, unique_id, **given):
            self.shown[unique_id] = given
            return {"ui": {}, "result": tuple(given.values())[:len(known.RETURN_TYPES)]}

        self._classes[name] = type(name, (), {
            "INPUT_TYPES": classmethod(inputs), "RETURN_TYPES": tuple(known.RETURN_TYPES), "FUNCTION": "make",
            "CATEGORY": "tests", "OUTPUT_NODE": make is None,
            "make": show if make is None else lambda node, **given: make(**given)})

    def clip(self):
        return Clip(self.comfyui, self.kind, self.moved_by)

    def vae(self, file=""):
        if "triposplat" in file:
            return triposplat_doubles.vae()
        if self.kind == "seedvr2":
            return seedvr2_doubles.vae()
        if file == "pixel_space" or self.kind == "hidream-o1":
            return self.comfyui.nodes.VAELoader().load_vae("pixel_space")[0]
        if self.kind.startswith("minimax") and "audio" in file:                # of which there is no tiny one
            return SimpleNamespace(encode=_as_minimax_encodes)
        if self.kind.startswith("mage"):                       # likewise
            return SimpleNamespace(encode=_as_mage_encodes, decode=_pixels_of)
        if self.kind in AUDIO_KINDS:                           # of which nothing is encoded but what is as long
            shape = self.comfyui.latent(self.kind)["samples"].shape
            return SimpleNamespace(encode=lambda audio: torch.randn(shape, generator=torch.Generator().manual_seed(9)))
        if self.kind.startswith("hunyuan3d"):                  # 64 channels of 8 tokens, as a cube
            return SimpleNamespace(decode=lambda latent, **_: latent[:, :, :8].reshape(-1, 8, 8, 8))
        kind = "vae-sd" if "ft-mse" in file else vae_of(self.kind)
        if kind not in self._vaes:
            name = self.comfyui.file(kind, "vae", encoder=True)
            with thin_class(kind):
                self._vaes[kind] = self.comfyui.nodes.VAELoader().load_vae(name)[0]
            self._vaes[kind].encode = partial(_encode_small, self._vaes[kind].encode)
        return self._vaes[kind]

    def native(self, file):
        if self.kind_of(file) == "beside":                     # whose nodes are stand-ins
            return SimpleNamespace()
        return self.comfyui.native(self.kind_of(file)).clone()

    def ours(self, file):
        return self._load_model.execute(self.comfyui.file(self.kind_of(file)), "default", self.config).args[0]

    def _checkpoint(self, ckpt_name, **_):
        return self.native(ckpt_name), self.clip(), self.vae()

    def _with_lora(self, model, strength):
        return self.loras.load(model, self.loras.file(self.kind, "publisher", "lora"), strength)

    def _control(self, **_):
        name, folder = CONTROL[self.kind], self.comfyui.base / "controlnet"
        if not (folder / f"{name}.safetensors").exists():
            save_controlnet(name, folder / f"{name}.safetensors")
        import comfy.controlnet
        return (comfy.controlnet.load_controlnet(str(folder / f"{name}.safetensors")),)

    def _patch(self, name, **_):
        patch = next(patch for mark, patch in (
            ("lllite", "lllite"), ("qwen", "qwen-blockwise"), ("z_image", "z-image-fun"), ("z-image", "z-image-fun"),
            ("uso", "uso"), ("uni3c", "uni3c"), ("infinite", "infinite-talk")) if mark in name.lower())
        loader, folder = self._classes["ModelPatchLoader_"], self.comfyui.base / "model_patches"
        with thin_classes(loader):
            if not (folder / f"{patch}.safetensors").exists():
                save_model_patch(patch, folder / f"{patch}.safetensors", loader)
            return loader().load_model_patch(f"{patch}.safetensors")

    def _vision(self, image, kind=None, **_):
        """kind: of the model that it stands beside in a file."""
        generator = torch.Generator().manual_seed(5)
        size = next((size for name, size in SEEN.items() if self.kind.startswith(name)), (4, 8))
        return SimpleNamespace(all_hidden_states=torch.randn(1, 27, *size, generator=generator),
                               image_embeds=torch.randn(1, EMBEDDED.get(kind or self.kind, 1280), generator=generator),
                               last_hidden_state=torch.randn(1, *size, generator=generator),
                               penultimate_hidden_states=torch.randn(1, *size, generator=generator))

    def _encoded_audio(self, waveform, sample_rate):
        generator = torch.Generator().manual_seed(6)
        count, width = AUDIO_FEATURES.get(self.kind, (33, 1280))
        layers = [torch.randn(1, 50, width, generator=generator) for _ in range(count)]
        return {"encoded_audio": layers[-1], "encoded_audio_all_layers": layers, "audio_samples": waveform.shape[-1]}

    def _audio_vae(self):
        """LTX-2's, of 8 channels and 16 bands."""
        made = lambda waveform: torch.randn(1, 8, 5, 16, generator=torch.Generator().manual_seed(8))  # noqa: E731
        return SimpleNamespace(
            audio_sample_rate=16000, output_sample_rate=16000, latent_channels=8, latent_frequency_bins=16,
            encode=made, decode=lambda latent: latent.flatten(1)[:, None].repeat(1, 2, 1),
            num_of_latents_from_frames=lambda frames, rate: 7, first_stage_model=SimpleNamespace(
                num_of_latents_from_frames=lambda frames, rate: 7, latent_channels=8, latent_frequency_bins=16,
                output_sample_rate=16000))

    def _video(self, image, audio):
        from comfy_api.latest import InputImpl, Types
        frames = image.repeat(9, 1, 1, 1) * torch.linspace(0.5, 1, 9)[:, None, None, None]
        return InputImpl.VideoFromComponents(Types.VideoComponents(images=frames, audio=audio,
                                                                   frame_rate=Fraction(8)))
