"""xDiT Class Label: a class label as conditioning, for class-conditional models without a text encoder."""

import difflib
import os

import torch

from comfy_api.latest import io

from ..xdit_backend.protocol.bounded_json import parse_json
from ..xdit_backend.protocol.errors import CheckpointError, ConfigError
from .bridge.compatibility.input_checks import check_links

NUM_NAMED, MAX_SHOWN = 5, 60               # class names in a message; characters of the label in a message
MAX_BYTES, MAX_VALUES = 2 ** 20, 2 ** 16   # limits for model_index.json, which has 42,000 bytes for ImageNet
MAX_DIGITS = 18                            # longer labels are not read as numbers


class XDiTClassLabel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTClassLabel",
            display_name="xDiT Class Label",
            category="xDiT",
            description="Encodes the prompt of a class-conditional model such as DiT: one of the classes it was "
                        "trained on, or none.",
            search_aliases=["dit", "imagenet", "class", "prompt"],
            inputs=[
                io.Model.Input("model", tooltip="A class-conditional model loaded by Load xDiT Model from a folder in "
                                                "models/diffusers."),
                io.String.Input("label", default="207",
                                tooltip="Class number, or a class name from the folder's model_index.json: 207 or "
                                "golden retriever. Empty: no class, for the negative prompt."),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, model, label) -> io.NodeOutput:
        check_links(model=model, label=label)
        remote = getattr(model.model, "remote", None)
        num_classes = remote and remote.setup.num_classes
        if not num_classes:
            raise ConfigError("Use the CLIP that belongs to this MODEL, or load a DiT folder in Load xDiT Model: "
                              "this model is not class-conditional.")
        number = class_of(label, num_classes, _names(remote.spec.path))
        one_hot = torch.zeros(1, 1, num_classes)
        if number is not None:
            one_hot[..., number] = 1
        return io.NodeOutput([[one_hot, {}]])


def class_of(label, num_classes, names):
    """Return the class number for a label, or None for an empty label.

    names: {lower-case name: numbers of the classes with this name}.
    """
    label = label.strip()
    if not label:
        return None
    is_number = label.removeprefix("-").isdecimal() and len(label) <= MAX_DIGITS
    numbers = {int(label)} if is_number else names.get(label.lower(), set())
    if len(numbers) == 1 and numbers <= set(range(num_classes)):
        return numbers.pop()
    if len(numbers) > 1:
        same = " and ".join(map(str, sorted(numbers)))
        raise ConfigError(f"Use one of the numbers {same}: several classes have the name {label}.")
    label = label[:MAX_SHOWN]
    near = difflib.get_close_matches(label.lower(), names, NUM_NAMED)
    hint = (f", or a name such as {', '.join(near or sorted(names)[:NUM_NAMED])}"
            if names else " (the model's folder has no class names)")
    raise ConfigError(f"Use a number from 0 to {num_classes - 1}{hint}: {label} is not a class of this model.")


def _names(folder):
    """Read class names from a folder's model_index.json; a class may have several names, separated by commas."""
    path, names = os.path.join(folder, "model_index.json"), {}
    if os.path.isfile(path):
        try:
            with open(path, "rb") as file:
                labels = parse_json(file.read(MAX_BYTES + 1), MAX_BYTES, MAX_VALUES).get("id2label") or {}
            for number, class_names in labels.items():
                for name in class_names.split(","):
                    names.setdefault(name.strip().lower(), set()).add(int(number))
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"Download {path} again, or remove it and use class numbers: its class names "
                                  f"cannot be read ({error}).") from error
    return names
