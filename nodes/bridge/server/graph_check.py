"""Check of a graph before the page converts it: the messages with which a run on the workers would reject it.

Messages come from the functions that reject a run. Files are read by their headers, but upscale models are
loaded. A node of ComfyUI's own that only patches the MODEL is executed on a model without weights, whose patches are
then checked as those of a run are.
"""

import collections
import functools
import inspect

import folder_paths

from ....xdit_backend.protocol.errors import XDiTError
from ..model.model_check import CheckedModel, message_of, refusal_of_input, refusal_of_node
from ..model.model_paths import FOLDERS, model_names, path_of
from .upscaler_check import refused_upscaler
from .vae_check import PIXELS, VAE_FOLDERS, refused_vae

ANY = "*", "COMFY_MATCHTYPE_V3"            # types of outputs that pass on an input
WITH_MODEL = "MODEL", "GUIDER"             # types that carry the model to its sampler
CARRIED = *WITH_MODEL, "CONDITIONING", "VAE", "SAMPLER", "GLIGEN", "PULIDFLUX"     # types that are followed
MODEL_SUFFIXES = (".safetensors", ".sft", ".gguf", ".ckpt", ".pt", ".pth", ".bin")
# nodes that run a model of another kind, or make conditioning for it -> its name; they identify it without its file
OTHER_MODELS = {"RTDETR_detect": "RT-DETR", "SAM3_Detect": "SAM 3", "SAM3_VideoTrack": "SAM 3",
                "SDPoseKeypointExtractor": "SDPose"}
COPIES = ("TrainLoraNode",)                # nodes that copy the model
LORAS = "LoraLoader", "LoraLoaderModelOnly"
AR_VIDEO = "SamplerARVideo"
UPSCALER_LOADER, UPSCALER_FOLDER = "UpscaleModelLoader", "upscale_models"


def check_graph(prompt, classes, models=()):
    """Return what a run of a graph on the workers would say, as plain values for JSON.

    prompt: {id: {"class_type": str, "inputs": dict}}, ComfyUI's API format. classes: ComfyUI's NODE_CLASS_MAPPINGS.
    models: further model files, of loaders whose output is another type than MODEL (raylight's).
    Result: "models", "vaes" and "upscalers": {file: reason for which Load xDiT Model, the distributed VAE nodes or
    Distributed Upscale Image would reject it}. "absent": files of these that are not on
    this machine, and so were not read. "missing": other models that are not, so that ComfyUI would reject the graph.
    "nodes": {id: {"verdict", "by", "reason"}}; verdict "refused": a loader whose model cannot run on the
    workers because of the node `by`, for this reason; "no_effect": a node that changes nothing of the MODEL it gets;
    "unchanged": one that works on the workers' MODEL.
    """
    graph = Graph(prompt, classes)
    found = {"models": {}, "vaes": {}, "upscalers": {}, "absent": [], "missing": graph.missing_files(), "nodes": {}}
    for loader in graph.loaders("MODEL"):
        name = graph.file_of(loader)
        model, reason = _opened(graph.path_of(name), graph.values(loader).get("weight_dtype", "default"))
        if reason:
            found["models"][name] = reason
        users = [] if reason else graph.users(loader)
        by, reason = next(filter(None, (_refusal(graph, user, model) for user in users)), (None, None))
        if reason:
            found["nodes"][loader] = {"verdict": "refused", "by": by, "reason": reason}
        else:
            found["nodes"] |= {user: {"verdict": _effect(graph, user, model), "by": user, "reason": ""}
                               for user in users if "MODEL" in graph.output_types(user)}
        found["absent"] += [name] if graph.path_of(name) is None else []
    for name in models:
        path = graph.path_of(name)
        if reason := _opened(path, "default")[1]:
            found["models"][name] = reason
        found["absent"] += [name] if path is None else []
    for loader in graph.loaders("VAE"):
        name = graph.file_of(loader)
        path = name and next(filter(None, (folder_paths.get_full_path(folder, name) for folder in VAE_FOLDERS)), None)
        reason = refused_vae(name, path)
        if reason:
            found["vaes"][name] = reason
        found["absent"] += [name] if path is None and not reason else []
    for loader in graph.loaders("UPSCALE_MODEL"):
        name = graph.file_of(loader)
        if graph.class_type(loader) != UPSCALER_LOADER or name is None:
            continue
        is_here = folder_paths.get_full_path(UPSCALER_FOLDER, name) is not None
        reason = refused_upscaler(graph.class_of(loader), name) if is_here else None
        if reason:
            found["upscalers"][name] = reason
        found["absent"] += [] if is_here else [name]
    found["absent"] = list(dict.fromkeys(filter(None, found["absent"])))
    found["missing"] = [name for name in found["missing"] if name not in found["absent"]]
    return found


class Graph:
    """Links of a prompt, with the types that they carry."""

    def __init__(self, prompt, classes):
        self._nodes, self._classes, self._models = prompt, classes, set(model_names())
        self._inputs = {target: [(name, str(value[0]), value[1]) for name, value in node["inputs"].items()
                                 if _is_link(value) and str(value[0]) in prompt] for target, node in prompt.items()}
        self._outputs, self._types = collections.defaultdict(list), {}
        for target, links in self._inputs.items():
            for _, origin, slot in links:
                self._outputs[origin].append((target, slot))

    def class_type(self, node):
        return self._nodes[node]["class_type"]

    def class_of(self, node):
        """ComfyUI's class of a node; None if no installed pack has it."""
        return self._classes.get(self.class_type(node))

    def values(self, node):
        """{name: value} of the inputs that are not linked."""
        return {name: value for name, value in self._nodes[node]["inputs"].items() if not _is_link(value)}

    def linked(self, node):
        """{name: (origin, type that the link carries)} of the linked inputs."""
        return {name: (origin, self._carried(origin, slot)) for name, origin, slot in self._inputs[node]}

    def output_types(self, node):
        class_ = self.class_of(node)
        return () if class_ is None else tuple(class_.RETURN_TYPES)

    def loaders(self, type_):
        """Nodes that have a used output of this type and no linked input of it."""
        origins = {origin for origin, links in self._outputs.items()
                   if any(self._carried(origin, slot) == type_ for _, slot in links)}
        return [node for node in self._nodes if node in origins and type_ in self.output_types(node)
                and all(carried != type_ for _, carried in self.linked(node).values())]

    def file_of(self, node):
        """The file or folder that a loader's widgets name; None without one."""
        texts = [value for value in self.values(node).values() if isinstance(value, str)]
        return next((text for text in texts if _is_file(text) or text == PIXELS or text in self._models), None)

    def path_of(self, name):
        """Path of a model that a loader names; None if it is not in ComfyUI's folders."""
        if name is None or name in self._models:
            return name and path_of(name)
        return next(filter(None, (folder_paths.get_full_path(folder, name) for folder in FOLDERS)), None)

    def missing_files(self):
        """Files that widgets name and do not list."""
        found = []
        for node in self._nodes:
            class_, values = self.class_of(node), self.values(node)
            files = {name: value for name, value in values.items() if isinstance(value, str) and _is_file(value)}
            inputs = class_.INPUT_TYPES() if class_ is not None and files else {}
            for kind in ("required", "optional"):
                found += [files[name] for name, spec in inputs.get(kind, {}).items() if name in files
                          and (listed := _choices(spec)) is not None and files[name] not in listed]
        return list(dict.fromkeys(found))

    def users(self, loader):
        """The nodes that get this loader's MODEL, in order of distance."""
        found = {loader: None}                                 # in order, without repeats
        pending = collections.deque(found)
        while pending:
            node = pending.popleft()
            new = {target: None for target, slot in self._outputs[node]
                   if target not in found and self._carried(node, slot) in WITH_MODEL}
            found |= new
            pending += new
        return [*found][1:]

    def before(self, node, type_):
        """The nodes from which inputs of this type come, through any number of nodes that pass it on."""
        found, pending = {}, collections.deque([node])
        while pending:
            new = {origin: None for origin, carried in self.linked(pending.popleft()).values()
                   if carried == type_ and origin not in found}
            found |= new
            pending += new
        return [*found]

    def _carried(self, node, slot):
        """The type of an output; of one that passes on an input, the first of CARRIED that reaches it."""
        if (node, slot) not in self._types:
            found, pending, seen = [], [(node, slot)], set()
            while pending:
                output = pending.pop()
                types, number = self.output_types(output[0]), output[1]
                found.append(types[number] if 0 <= number < len(types) else None)
                if found[-1] in ANY and output[0] not in seen:
                    seen.add(output[0])
                    pending += [(origin, slot) for _, origin, slot in self._inputs[output[0]]]
            known = [type_ for type_ in found if type_ not in ANY]
            self._types[node, slot] = min(
                known, key=lambda type_: CARRIED.index(type_) if type_ in CARRIED else len(CARRIED), default=found[0])
        return self._types[node, slot]


def _is_link(value):
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], (str, int)) and type(value[1]) is int


def _is_file(text):
    return text.lower().endswith(MODEL_SUFFIXES)


def _choices(spec):
    """The choices of a widget, of ComfyUI's older or newer nodes; None for another kind of widget."""
    kind, options = spec[0], spec[1] if len(spec) > 1 else {}
    return kind if isinstance(kind, list) else options.get("options") if kind == "COMBO" else None


def _opened(path, weight_dtype):
    """(CheckedModel, None) of a file, or (None, reason for which Load xDiT Model would reject it). path: None for a
    file that is not here."""
    try:
        return CheckedModel(path, weight_dtype), None
    except XDiTError as error:
        return None, str(error)


# --- nodes ---

def _refusal(graph, user, model):
    """(node, reason) for which a run on the workers would be rejected because of this user of the MODEL, or None."""
    reason = _why_refused(graph, user) or _patch_message(graph, user, model)
    if reason:
        return user, reason
    for other in graph.before(user, "CONDITIONING"):
        if reason := _why_refused(graph, other):
            return other, reason
    if any(graph.class_type(other) == AR_VIDEO for other in graph.before(user, "SAMPLER")):
        return user, model.refusal_of_options({"ar_state": {}})


def _why_refused(graph, node):
    """Reason for which a node cannot be in a graph that runs on the workers, or None."""
    kind = graph.class_type(node)
    for other in (node, *(origin for origin, _ in graph.linked(node).values())):
        if graph.class_of(other) is None:
            return (f"Install the pack that has the node {graph.class_type(other)}, or update ComfyUI: this ComfyUI "
                    "does not have it.")
    if kind in OTHER_MODELS:
        return f"this node is for {OTHER_MODELS[kind]}, which xDiT does not support."
    return next(filter(None, (refusal_of_input(carried) for _, carried in graph.linked(node).values())), None)


def _patch_message(graph, node, model):
    """Message with which the checks of a run reject what this node does to a MODEL, or None."""
    kind = graph.class_type(node)
    if reason := refusal_of_node(kind):
        return reason
    if kind in LORAS:
        values = graph.values(node)
        name = values.get("lora_name")
        return model.refusal_of_lora(name and folder_paths.get_full_path("loras", name), values.get("strength_model"))
    if kind in COPIES:
        return message_of(functools.partial(model.patcher().clone, force_deepcopy=True))
    patcher = _patched(graph, node, model)
    return patcher and model.refusal_of(patcher)


def _effect(graph, node, model):
    """Verdict on a node that a run does not reject: whether it changes the MODEL."""
    patcher = _patched(graph, node, model)
    return "unchanged" if patcher is None or model.is_changed(patcher) else "no_effect"


def _patched(graph, node, model):
    """The MODEL of a node of ComfyUI that only patches it; None for any other node, and for one of another pack, whose
    code runs in a run only."""
    class_, linked, values = graph.class_of(node), graph.linked(node), graph.values(node)
    is_own = getattr(class_, "RELATIVE_PYTHON_MODULE", class_.__module__).split(".")[0] in ("nodes", "comfy_extras")
    opens = any(isinstance(value, str) and _is_file(value) for value in values.values())
    if (not is_own or opens or graph.output_types(node) != ("MODEL",)
            or [carried for _, carried in linked.values()] != ["MODEL"]):
        return None
    function = getattr(class_(), class_.FUNCTION)
    return None if inspect.iscoroutinefunction(function) else model.patched_by(function, values, *linked)
