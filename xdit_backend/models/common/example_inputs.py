"""Random inputs for a small model of a family: its latent, and its conditioning as workers and as ComfyUI's class take
it."""

from dataclasses import dataclass
from typing import Any

import torch

VISION_TOKENS = 5                          # of a CLIP vision model, and of further text encoders
TIME_TOKEN = 151673                        # HiDream-O1's token for the timestep
# families whose class in ComfyUI has positions for a minimum of 66 rows and columns together
MIN_SIDES = {"PixArt-Sigma": 66, "PixArt-Alpha": 66}
SIDES, UNET_SIDES = (4, 6), (16, 24)        # of a latent; a U-Net normalises over several pixels in each level
SIDES_OF = {"WanDancer": (7, 8)}           # whose class cuts the tokens of all frames into eight
NUM_TOKENS, NUM_AUDIO = 9, 6               # of the text; length of an audio latent
SIGMA, AUDIO_SIGMA = 0.7, 0.56


@dataclass(frozen=True)
class ExampleCall:
    """A call of ComfyUI's class.

    latent: a tensor, or a list of them for families with components. timestep: (B,), or one for each component.
    arguments: conditioning. options: transformer_options.
    """

    latent: Any
    timestep: Any
    arguments: dict
    options: dict


def example_call(family, config, generator):
    """A small random call of a family's class. config: of the model."""
    batch = family.testing.frames if family.has_frames_as_batch else 1
    size = latent_size(family, *SIDES_OF.get(family.name, UNET_SIDES if family.plan.is_unet else SIDES))
    latent = torch.randn(batch, family.taken_channels(config), *size, generator=generator)
    conditioning = conditioning_of(family, config, generator, {"context": NUM_TOKENS}, batch, size)
    conditioning.pop("face_pixel_values", None)                # of 512 x 512 pixels
    found = as_comfyui(conditioning, family)
    options = options_of(family, found)
    found |= {name: len(found[name]) for name in family.inputs.counts if torch.is_tensor(found.get(name))}
    if "num_tokens" in (*family.inputs.ignored, *family.inputs.conditioning):
        found["num_tokens"] = NUM_TOKENS
    if "lyrics_strength" in found:
        found["lyrics_strength"] = 0.7
    if "frame_lasts" in found:
        found["fps"] = 30 / found.pop("frame_lasts")
    if "num_tokens" in family.inputs.conditioning and "attention_mask" in family.inputs.conditioning:
        found["attention_mask"] = torch.ones(batch, NUM_TOKENS, dtype=torch.long)
    elif "frame_rate" in (*family.inputs.conditioning, *family.inputs.ignored):
        found["attention_mask"] = None
    timestep = torch.full((batch,), SIGMA * family.inputs.time_scale)
    if family.inputs.components.names:
        name, *_ = family.inputs.components.names
        component = torch.randn(family.inputs.components.shapes(config, latent.shape, NUM_AUDIO)[name],
                                generator=generator)
        latent = [family.inputs.components.first(latent), component]
        if "audio_times" in family.inputs.components.shapes(config, latent[0].shape, NUM_AUDIO):
            timestep = timestep, torch.full((batch,), AUDIO_SIGMA * family.inputs.time_scale)
    return ExampleCall(latent, timestep, found, options)


def latent_size(family, rows, columns, frames=None):
    """Dims of a latent after its channels. rows, columns: of a latent that the model cuts into tokens of 1 x 1 or
    2 x 2; more for models of pixels, so that the number of tokens is the same. frames: of a video; None: as the test
    config."""
    scale = pixels_a_side(family)
    rows, columns = rows * scale, columns * scale
    columns = max(columns, MIN_SIDES.get(family.name, 0) - rows)
    if family.testing.rows is not None:
        return family.testing.rows, rows * columns + 1
    return {1: (rows * columns + 1,), 2: (rows, columns),
            3: (frames or family.testing.frames, rows, columns)}[len(family.inputs.latent.patch)]


def pixels_a_side(family):
    """Rows of a model of pixels for each row of a latent of other models."""
    return max(1, family.inputs.latent.patch[-1] // 2)


def conditioning_of(family, config, generator, lengths, batch=1, size=()):
    """Random conditioning as workers receive it, without masks.

    lengths: {name: number of tokens} of texts; "context" is needed. size: latent_size.
    """
    found = {}
    for name, width in family.inputs.conditioning.items():
        if name == "lyric_token_idx":
            found[name] = torch.randint(0, config["lyric_encoder_vocab_size"], (batch, lengths["context"] + 2),
                                        generator=generator)
        elif name in ("input_ids", "position_ids"):
            own = 1 if name == "position_ids" else batch       # ComfyUI makes one for all images
            shape = family.testing.input_shapes[name](config, (own, 0, *size), lengths["context"])
            found[name] = torch.randint(0, 50, shape, generator=generator)
            if name == "input_ids":
                found[name][:, -1] = TIME_TOKEN
            found[name] = found[name].expand(batch, *shape[1:])
        elif name in family.testing.input_shapes:
            found[name] = torch.randn(family.testing.input_shapes[name](config, (batch, 0, *size),
                                                                       lengths["context"]),
                                      generator=generator)
        elif name == "y" and config.get("num_class_embeds"):   # a class
            found[name] = torch.randint(0, config["num_class_embeds"], (batch,), generator=generator)
        elif name == "vace_context":
            found[name] = torch.randn(batch, 1, config["vace_in_channels"], *size, generator=generator)
        elif name == "vace_strength":
            found[f"{name}.0"] = torch.tensor([0.7])
        elif name == "encoder_hidden_states_llama3":           # of each layer
            layers = max(config["llama_layers"]) + 1
            found[name] = torch.randn(batch, layers, VISION_TOKENS, config[width], generator=generator)
        elif name == "encoder_hidden_states_t5":               # longer than the model reads, and partly masked
            found[name] = torch.randn(batch, config["text_len_t5"] + 2, config[width], generator=generator)
        elif name.startswith("text_embedding_mask"):
            length = config["text_len_t5"] + 2 if name.endswith("t5") else lengths["context"]
            found[name] = torch.randint(0, 2, (batch, length), generator=generator)
        elif name == "t5xxl_ids":                              # shorter than the length that the model pads to
            found[name] = torch.randint(0, config["_conditioner"]["target_vocab_size"], (batch, 9),
                                        generator=generator)
        elif name == "t5xxl_weights":
            found[name] = 1 + 0.2 * torch.randn(batch, 9, 1, generator=generator)
        elif name == "ofs" and config.get("ofs_embed_dim"):
            found[name] = torch.tensor([2.0])
        elif width == "num_embeds_ada_norm":                   # a class, or none
            marks = torch.eye(config[width] + 1, config[width])
            found[name] = marks[(torch.randint(0, len(marks), (batch, 1), generator=generator)
                                 + lengths["context"]) % len(marks)]
        elif name == "guidance":
            found[name] = torch.full((batch,), 3.5)
        elif width is not None and config.get(width) is not None:
            length = ((lengths[name],) if name in lengths else (VISION_TOKENS,) if name in ("clip_fea", "txt_byt5")
                      else ())
            found[name] = torch.randn(batch, *length, config[width], generator=generator)
    return found


def as_comfyui(conditioning, family):
    """Convert conditioning_of's result to arguments of ComfyUI's class: lists of numbers instead of numbered keys."""
    found: dict = {}
    if "disable_time_r" in family.inputs.ignored:
        found["disable_time_r"] = "sigma_after" not in conditioning
    if "reference_image" in conditioning:                      # ComfyUI's class reads the first of a list
        found["ref_latents"] = [conditioning["reference_image"]]
        conditioning = {name: tensor for name, tensor in conditioning.items() if name != "reference_image"}
    for name, tensor in conditioning.items():
        base, dot, _ = name.partition(".")
        found.setdefault(base, [] if dot else tensor.sum().item() if base == "lyrics_strength" else tensor)
        if dot:
            found[base].append(tensor.item())
    return found


def options_of(family, conditioning):
    """The transformer_options of a call that ComfyUI's sampler and BaseModel set for one branch."""
    scaling = family.inputs.rope_options(conditioning)
    options = {"cond_or_uncond": [0]} | ({"rope_options": scaling} if scaling else {})
    if "sigma_after" in conditioning:                          # of a schedule whose next step it is
        options |= {"sigmas": torch.tensor([0.9]), "sample_sigmas": torch.tensor([0.9, *conditioning["sigma_after"]])}
    return options
