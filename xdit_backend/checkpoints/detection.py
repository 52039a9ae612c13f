"""Detection of a checkpoint's family by its tensors or by a folder's config.json; for other files, of the kind of
file."""

from ..models import FAMILIES
from ..models.common.family import Family
from ..protocol.bounded_json import MAX_SHOWN
from ..protocol.errors import CheckpointError
from .build_transformer import settings_in
from .closest_family import NOT_THERE, nearest


def article(name):
    """"a" or "an", as a model's name is pronounced."""
    return "an" if name.startswith(("A", "E", "I", "O", "SD", "LTX")) else "a"


# substrings of tensor names -> kind of file. Some of these files also have the names of the model they extend
WITH_A_MODEL = ((("control_model.", "controlnet_", "zero_convs."),
                   "a ControlNet: load it with Load ControlNet Model"),)
# tried in this order for files of no known family. "^." marks the start of a name
OTHERS = (
    ((".lora_", ".lora.", "_lora.", ".lokr_", ".hada_", ".diff_b"), "a LoRA: load it with a LoRA node"),
    ((".backbone.stem.", ".detector.backbone.", ".refinenet1."),
     "a detection or depth model, which generates no images"),
    (("down_blocks.0.attentions.", "down_blocks.1.attentions."),
     "part of a U-Net under diffusers' names, or a quantised one, which xDiT does not read"),
    (("input_blocks.",), "a U-Net of a kind that xDiT does not run"),
    (("transformer.text_model.", "text_model.encoder.", "encoder.block.0.layer.", "shared.weight",
      "^.embed_tokens.", ".model.embed_tokens.", "^.model.language_model.embed_tokens.", ".encoder.embed_tokens.",
      "token_embedding."),
     "a text encoder: load it with Load CLIP"),
    (("vision_model.encoder.",), "a CLIP vision model: load it with Load CLIP Vision"),
    (("blk.0.", "token_embd.", "enc.blk."), "a text encoder or a language model in GGUF"),
    (("decoder.conv_in.", "decoder.up.", "encoder.down.", "decoder.conv1.", "quant_conv.", "per_channel_statistics.",
      "taesd_decoder."),
     "a VAE: load it with Load VAE"))
LISTED = "docs/reference/models.md lists what xDiT runs."
ELSEWHERE = "For a model that ComfyUI itself knows use its own loader and KSampler, on one GPU."
OF_DIFFUSERS = ((("single_transformer_blocks.0.attn.", "transformer_blocks.0.attn", "blocks.0.attn1."),
                 "a model under diffusers' names: put it into models/diffusers, in a folder with its config.json"),)

# by their norm_type
CLASSES = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}


def recognise(checkpoint) -> Family:
    """The family of a Checkpoint. Raises CheckpointError if no supported family matches, with the supported ones."""
    name = checkpoint.name
    if checkpoint.folder_config is not None:
        return _family_of_folder(name, checkpoint.folder)
    _refuse_others(name, checkpoint.shapes, WITH_A_MODEL)
    for family in FAMILIES.values():
        if _apply_rule(family.detection.recognise, checkpoint.shapes) and _is_described(family, checkpoint):
            # if a tensor that the rule reads is missing, meta_model() names it
            reason = _apply_rule(family.detection.refuse, checkpoint.shapes)
            if reason:
                raise CheckpointError(f"{name} is {article(family.name)} {family.name} model, but {reason}.")
            return family
    if checkpoint.folder is not None:
        raise CheckpointError(f"{name} is the folder of a U-Net of a kind that xDiT does not run. {LISTED}")
    _refuse_others(name, checkpoint.shapes, OTHERS)
    near = nearest(checkpoint.shapes)
    if near:
        raise CheckpointError(f"{name} is nearly {article(near[0].name)} {near[0].name} model, but {near[1]}. Download "
                              f"it again, or choose another file. {LISTED}")
    _refuse_others(name, checkpoint.shapes, OF_DIFFUSERS)
    raise CheckpointError(f"{name} is not a diffusion model that xDiT runs. {ELSEWHERE} {LISTED}")


def _is_described(family, checkpoint):
    return not family.detection.described or family.detection.described.items() <= settings_in(
        checkpoint.metadata, checkpoint.name).items()


def _apply_rule(rule, *arguments):
    """The result of a family's rule for a file; None if the file lacks a tensor that the rule reads."""
    try:
        return rule(*arguments)
    except NOT_THERE:
        return None


def _refuse_others(name, shapes, others):
    names = "\n".join(f"^.{key}" for key in shapes)
    for marks, what in others:
        if any(mark in names for mark in marks):
            raise CheckpointError(f"{name} is {what}." if ": " in what
                                  else f"{name} is {what}. {ELSEWHERE} {LISTED}")


def _family_of_folder(name, folder):
    """The family of the class in config.json. Of several families with the same class and different fixed settings: the
    one that config.json contradicts least, then the one that it agrees with most."""
    config = folder.config
    class_arguments = [family for family in FAMILIES.values() if class_name(config) == family.transformer]
    of_files = [family.name for family in FAMILIES.values() if family.transformer.endswith(f":{class_name(config)}")]
    if of_files:
        raise CheckpointError(f"Load a file of {of_files[0]} in ComfyUI's format: {name} is a folder of it, and xDiT "
                              "runs it as ComfyUI's own module, which takes files.")
    if not class_arguments:
        raise CheckpointError(f"{name} is {_describe_class(class_name(config))}. {LISTED}")
    return max(class_arguments, key=lambda family: _agreement(family, folder))


def _agreement(family, folder):
    """(minus the number of settings of config.json that contradict the family's fixed ones, the number that agree plus
    the extra components that both have). A setting missing from config.json agrees."""
    fixed = {key: plain(value) for key, value in family.detection.config.rules.items()
             if not callable(value) and key not in family.detection.config_from_tensors}
    agreeing = sum(plain(folder.config.get(key, value)) == value for key, value in fixed.items())
    return agreeing - len(fixed), agreeing + len(folder.extra_parts.keys() & family.detection.folder.extra_parts.keys())


def plain(value):
    """A config value as JSON stores it, with tuples as lists."""
    return list(value) if isinstance(value, (tuple, list)) else value


def class_name(config):
    """The class of a folder's config.json; older ones name the class that DiT's and PixArt's were split from. "" if
    there is none."""
    name = config.get("_class_name") or config.get("architectures")            # the second is of text encoders
    name = name[0] if isinstance(name, list) and name else name
    if not isinstance(name, str):
        return ""
    return CLASSES.get(str(config.get("norm_type")), name) if name == "Transformer2DModel" else name


def _describe_class(class_name):
    """Text for a model class that no family has."""
    if not class_name:
        return "a folder whose config.json does not say which model it is (_class_name), as diffusers' do"
    text = "which is a text encoder: load a file of it with Load CLIP"
    kinds = {"Autoencoder": "which is a VAE: load a file of it with Load VAE", "Text": text, "Encoder": text,
             "ControlNet": "which is a ControlNet: load a file of it with Load ControlNet Model"}
    what = next((text for mark, text in kinds.items() if mark in class_name), "which xDiT does not run")
    return f"a {class_name[:MAX_SHOWN]}, {what}"
