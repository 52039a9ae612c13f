"""A stand-in of the pack ComfyUI_IPAdapter_plus: its classes' names, attributes and signatures, in arithmetic of our
own, picture by picture and head by head; and adapters of random weights for tiny U-Nets.

# B batch, T tokens, C channels
"""

import importlib.util
from types import SimpleNamespace

import torch
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

from xdit_backend.vocabulary.unet import publishers_names

PACK = '''
import torch
import torch.nn.functional as F


def attention(query, key, value, heads):
    """(T, C) of one image"""
    out = []
    for q, k, v in zip(*(tensor.chunk(heads, -1) for tensor in (query, key, value))):
        out.append(((q @ k.T) / q.shape[1] ** 0.5).softmax(-1) @ v)
    return torch.cat(out, -1)


def nth(tensor, index):
    return tensor[min(index, len(tensor) - 1)]


class Attn2Replace:
    def __init__(self, callback=None, **kwargs):
        self.callback, self.kwargs = [callback], [kwargs]

    def add(self, callback, **kwargs):
        self.callback += [callback]
        self.kwargs += [kwargs]
        vars(self).update(kwargs)

    def __call__(self, q, k, v, extra_options):
        sigma = float(extra_options["sigmas"][0])
        found = torch.stack([attention(*each, extra_options["n_heads"]) for each in zip(q, k, v)])
        for called, given in zip(self.callback, self.kwargs):
            if given["sigma_end"] <= sigma <= given["sigma_start"]:
                found = found + called(found, q, k, v, extra_options, **given)
        return found


def factor(kind, where, share):
    if kind == "ease in":
        return 0.05 + 0.95 * (1 - share)
    if kind == "ease out":
        return 0.05 + 0.95 * share
    if kind == "ease in-out":
        return 0.05 + 0.95 * (1 - abs(share - 0.5) / 0.5)
    if kind == "reverse in-out":
        return 0.05 + 0.95 * abs(share - 0.5) / 0.5
    weak = {"weak input": ["input"], "weak middle": ["middle"], "weak output": ["output"],
            "strong middle": ["input", "output"]}
    return 0.2 if where in weak.get(kind, []) else 1.0


def ipadapter_attention(out, q, k, v, extra_options, module_key="", ipadapter=None, weight=1.0, cond=None,
                        cond_alt=None, uncond=None, weight_type="linear", mask=None, sigma_start=0.0, sigma_end=1.0,
                        unfold_batch=False, embeds_scaling="V only", **kwargs):
    layers, where = ipadapter.ip_layers.to_kvs, extra_options["block"][0]
    index, branches = extra_options["transformer_index"], extra_options["cond_or_uncond"]
    is_xl = "101_to_k_ip" in layers
    if isinstance(weight, dict):
        if index not in weight:
            return 0
        is_composition = index == 3 if is_xl else index in (4, 5)
        if (weight_type == "style transfer precise" and is_composition
                or weight_type == "composition precise" and not is_composition):
            cond, uncond = 0 * cond, cond
        weight = weight[index]
        if cond_alt is not None and index in cond_alt:
            cond = cond_alt[index]
    else:
        weight = weight * factor(weight_type, where, index / (11 if is_xl else 16))
    images = len(q) // len(branches)
    weights = torch.stack([nth(weight, image).reshape(()) for image in range(images)]) if torch.is_tensor(
        weight) else torch.tensor([float(weight)] * images)
    if not weights.any():
        return 0
    added = []
    for row, query in enumerate(q):
        branch, image = row // images, row % images
        pictures = (cond, uncond)[branches[branch]]
        pictures = [nth(pictures, image)] if unfold_batch else list(pictures)
        keys = [layers[module_key + "_to_k_ip"](picture) for picture in pictures]
        values = [layers[module_key + "_to_v_ip"](picture) for picture in pictures]
        strength = weights[image]
        if "penalty" in embeds_scaling:
            strength = strength * query.shape[1] / 1280
        if embeds_scaling != "V only":
            keys = [key * strength for key in keys]
        if "mean(V)" in embeds_scaling:
            means = [value.mean(0) for value in values]
            values = [value - mean + mean * strength for value, mean in zip(values, means)]
        elif embeds_scaling != "V only":
            values = [value * strength for value in values]
        found = attention(query, torch.cat(keys), torch.cat(values), extra_options["n_heads"])
        found = found * strength if embeds_scaling == "V only" else found
        if mask is not None:
            _, _, height, width = extra_options["original_shape"]
            exact = height / (height * width / len(query)) ** 0.5
            rows = int(exact) if len(query) % int(exact) == 0 else int(exact) + 1
            shown = F.interpolate(nth(mask, image)[None, None], size=(rows, len(query) // rows), mode="bilinear")
            covered = torch.zeros(len(query))
            before = (len(query) - shown.numel()) // 2
            covered[before:before + shown.numel()] = shown.flatten()
            found = found * covered[:, None]
        added.append(found)
    return torch.stack(added)
'''
OLD = '''
class CrossAttentionPatch:
    def __call__(self, q, k, v, extra_options):
        return q
'''


def import_pack(folder, text=PACK, old=""):
    """The stand-in as a module, in a file that is called as the pack's."""
    folder.mkdir(exist_ok=True)
    path = folder / "CrossAttentionPatch.py"
    path.write_text(text + old, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("ip_adapter_stand_in", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attentions(net):
    """[(ComfyUI's block, index in it, channels)] of a ComfyUI U-Net's attentions to the text, in their order."""
    found = []
    for side, blocks in (("input", net.input_blocks), ("middle", [net.middle_block]), ("output", net.output_blocks)):
        for number, block in enumerate(blocks):
            for layer in block or ():
                for index, inner in enumerate(getattr(layer, "transformer_blocks", ())):
                    found.append(((side, number), index, inner.attn2.to_q.weight.shape[0]))
    return found


def adapter_of(net, seed=1, pictures=1, tokens=4, width=24, is_xl=False, loud=1.0):
    """What the pack gives each layer of an adapter for this U-Net: {"ipadapter", "cond", "uncond"}; its layers are
    numbered in the order of the U-Net's."""
    generator = torch.Generator().manual_seed(seed)
    layers = torch.nn.ModuleDict()
    for number, (_, _, channels) in enumerate(attentions(net)):
        for kind in "kv":
            linear = torch.nn.Linear(width, channels, bias=False)
            linear.weight.data = loud * torch.randn(channels, width, generator=generator) / width ** 0.5
            layers[f"{2 * number + 1}_to_{kind}_ip"] = linear.requires_grad_(False)
    if is_xl:
        layers["101_to_k_ip"] = torch.nn.Linear(1, 1)
    cond, uncond = (torch.randn(pictures, tokens, width, generator=generator) for _ in range(2))
    return {"ipadapter": SimpleNamespace(ip_layers=SimpleNamespace(to_kvs=layers)), "cond": cond, "uncond": uncond}


def apply(pack, model, net, given, **settings):
    """A MODEL with this adapter in every layer of its U-Net, as the pack's nodes put it there: by block where each has
    one layer, else by block and layer. settings: what the pack's function takes."""
    changed = model.clone()
    options = changed.model_options["transformer_options"].copy()
    options["patches_replace"] = {**options.get("patches_replace", {})}
    replaced = options["patches_replace"]["attn2"] = {**options["patches_replace"].get("attn2", {})}
    changed.model_options["transformer_options"] = options
    places = attentions(net)
    deep = any(index for _, index, _ in places)
    for number, (block, index, _) in enumerate(places):
        all_given = {"module_key": str(2 * number + 1), "weight": 1.0, "cond_alt": None, "weight_type": "linear",
                     "mask": None, "sigma_start": 999999999.9, "sigma_end": 0.0, "unfold_batch": False,
                     "embeds_scaling": "V only", **given, **settings}
        key = (*block, index) if deep else block
        # the pack adds to the object itself, which other MODELs have too
        first, *others = [*(replaced[key].kwargs if key in replaced else ()), all_given]
        replaced[key] = pack.Attn2Replace(pack.ipadapter_attention, **first)
        for other in others:
            replaced[key].add(pack.ipadapter_attention, **other)
    return changed


def places_of(model):
    """{path of an attention to the text of diffusers' U-Net: what ComfyUI calls its block: "input.4.0"}, by the names
    that its file has."""
    found = {}
    for name, own in publishers_names([name for name, _ in model.named_modules()]).items():
        if name.endswith(".attn2"):
            side, *numbers = own.replace("middle_block", "middle_blocks.0").split(".")
            found[name] = f"{side.removesuffix('_blocks')}.{numbers[0]}.{numbers[-2]}"
    return found


def show_pictures(model, layers, tokens, weight, mask=None):
    """Have diffusers' U-Net attend to pictures, by diffusers' own IP-Adapter. layers: {place: weights of its keys and
    values}. tokens: (B, T, C). mask: (1, 1, rows, columns)."""
    for name, place in places_of(model).items():
        module = model.get_submodule(name)
        with torch.inference_mode(False):
            processor = IPAdapterAttnProcessor2_0(module.inner_dim, module.cross_attention_dim, (tokens.shape[1],),
                                                  weight)
        for linear, matrix in zip((processor.to_k_ip[0], processor.to_v_ip[0]), layers[place]):
            linear.weight.data = matrix

        def attend(hidden_states, encoder_hidden_states, module=module, processor=processor, **given):
            shown, masks = (tokens, None) if mask is None else (tokens[:, None], [mask])
            return processor(module, hidden_states, (encoder_hidden_states, [shown]), ip_adapter_masks=masks)
        module.forward = attend
