"""xDiT Class Label: a class to conditioning, for models that draw classes and read no text."""

import difflib
import os

import torch

from comfy_api.latest import io

from ..xdit_backend.protocol.bounded_json import parse_json
from ..xdit_backend.protocol.errors import CheckpointError, ConfigError
from .bridge.compatibility.input_checks import check_links

NUM_NAMED, MAX_SHOWN = 5, 60               # names that a message gives, and of a label, characters
MAX_BYTES, MAX_VALUES = 2 ** 20, 2 ** 16   # of model_index.json, which has 42,000 bytes with ImageNet's classes
MAX_DIGITS = 18                            # of a number; more are no class


class XDiTClassLabel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="XDiTClassLabel",
            display_name="xDiT Class Label",
            category="xDiT",
            description="The prompt of a class-conditional model such as DiT: one of the classes it was trained on, "
                        "or none.",
            search_aliases=["dit", "imagenet", "class", "prompt"],
            inputs=[
                io.Model.Input("model", tooltip="From Load xDiT Model: a class-conditional model, in a folder of "
                                                "models/diffusers."),
                io.String.Input("label", default="207",
                                tooltip="The number of a class, or a name that the folder's model_index.json has: "
                                "207 or golden retriever. Empty: no class, which is the negative prompt."),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, model, label) -> io.NodeOutput:
        check_links(model=model, label=label)
        remote = getattr(model.model, "remote", None)
        num_classes = remote and remote.setup.num_classes
        if not num_classes:
            raise ConfigError("Use the CLIP that belongs to this MODEL, or a folder of DiT in Load xDiT Model: this "
                              "one does not draw classes.")
        number = class_of(label, num_classes, _names(remote.spec.path))
        marks = torch.zeros(1, 1, num_classes)
        if number is not None:
            marks[..., number] = 1
        return io.NodeOutput([[marks, {}]])


def class_of(label, num_classes, names):
    """The number of a class, None for no class. names: {a name in lower case: the numbers of classes that have it}."""
    label = label.strip()
    if not label:
        return None
    is_number = label.removeprefix("-").isdecimal() and len(label) <= MAX_DIGITS
    numbers = {int(label)} if is_number else names.get(label.lower(), set())
    if len(numbers) == 1 and numbers <= set(range(num_classes)):
        return numbers.pop()
    if len(numbers) > 1:
        same = " and ".join(map(str, sorted(numbers)))
        raise ConfigError(f"Give one of the numbers {same}: the label {label} is the name of each of these classes.")
    label = label[:MAX_SHOWN]
    near = difflib.get_close_matches(label.lower(), names, NUM_NAMED)
    words = (f", or a name such as {', '.join(near or sorted(names)[:NUM_NAMED])}"
             if names else "; the model's folder has no names of them")
    raise ConfigError(f"Give a number from 0 to {num_classes - 1}{words}: the label {label} is no class of this "
                      "model.")


def _names(folder):
    """What a folder's model_index.json calls classes; a class may have several names, separated by commas."""
    path, names = os.path.join(folder, "model_index.json"), {}
    if os.path.isfile(path):
        try:
            with open(path, "rb") as file:
                said = parse_json(file.read(MAX_BYTES + 1), MAX_BYTES, MAX_VALUES).get("id2label") or {}
            for number, class_arguments in said.items():
                for name in class_arguments.split(","):
                    names.setdefault(name.strip().lower(), set()).add(int(number))
        except (ValueError, AttributeError) as error:
            raise CheckpointError(f"Download {path} again, or remove it and give numbers: it does not say what "
                                  f"classes are called ({error}).") from error
    return names
