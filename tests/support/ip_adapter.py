"""Stand-ins of the packs ComfyUI_IPAdapter_plus, ComfyUI_InstantID and PuLID_ComfyUI: their classes' names, attributes
and signatures, in arithmetic of our own, picture by picture and head by head; and adapters of random weights for tiny
U-Nets.

# B batch, T tokens, C channels
"""

import importlib.util
from types import SimpleNamespace

import torch
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

from xdit_backend.models.common.unet import publishers_names

COMMON = '''
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


def covered(mask, image, extra_options, tokens):
    _, _, height, width = extra_options["original_shape"]
    exact = height / (height * width / tokens) ** 0.5
    rows = int(exact) if tokens % int(exact) == 0 else int(exact) + 1
    shown = F.interpolate(nth(mask, image)[None, None], size=(rows, tokens // rows), mode="bilinear")
    found = torch.zeros(tokens)
    before = (tokens - shown.numel()) // 2
    found[before:before + shown.numel()] = shown.flatten()
    return found[:, None]
'''
HOLDER = '''

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
'''
# which ComfyUI asks for copies on other devices
OF_DEVICES = '''
    def to(self, device, *args, **kwargs):
        return self
'''
ATTENTION = '''

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
    ipadapter = ipadapter.get_multigpu_clone(q.device)
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
        added.append(found if mask is None else found * covered(mask, image, extra_options, len(query)))
    return torch.stack(added)
'''
FACES = '''

def pulid_attention(out, q, k, v, extra_options, module_key="", pulid=None, cond=None, uncond=None, weight=1.0,
                    ortho=False, ortho_v2=False, mask=None, **kwargs):
    layers, branches = pulid.ip_layers.to_kvs, extra_options["cond_or_uncond"]
    images = len(q) // len(branches)
    added = []
    for row, (query, before) in enumerate(zip(q, out)):
        picture, = (cond, uncond)[branches[row // images]]
        keys, values = (layers[module_key + kind](picture) for kind in ("_to_k_ip", "_to_v_ip"))
        found = attention(query, keys, values, extra_options["n_heads"])
        if ortho or ortho_v2:
            faithful = 0.0 if ortho else sum((query @ keys.T).softmax(1).mean(0)[:5].tolist())
            direction = before / before.norm(dim=0)
            found = found - (1 - faithful) * direction * (direction * found).sum(0)
        found = found * weight
        added.append(found if mask is None else found * covered(mask, row % images, extra_options, len(query)))
    return torch.stack(added)
'''
PACK = COMMON + HOLDER.replace("], [kwargs]", "], [kwargs]\n        self.multigpu_kwargs = {}") + OF_DEVICES + ATTENTION
INSTANTID = COMMON + HOLDER + ATTENTION.replace("ipadapter_attention", "instantid_attention").replace(
    "    ipadapter = ipadapter.get_multigpu_clone(q.device)\n", "")
PULID = COMMON + HOLDER + FACES
OLD = '''
class CrossAttentionPatch:
    def __call__(self, q, k, v, extra_options):
        return q
'''
OLD_INSTANTID = OLD.replace("CrossAttentionPatch", "CrossAttentionPatchIID")


def import_pack(folder, text=PACK, old=""):
    """A stand-in as a module, in a file that is called as the pack's. Its `called` is what it puts into objects."""
    folder.mkdir(exist_ok=True)
    path = folder / ("pulid.py" if "pulid_attention" in text else "CrossAttentionPatch.py")
    path.write_text(text + old, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("ip_adapter_stand_in", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.called, = (function for name, function in vars(module).items() if name.endswith("_attention"))
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


def adapter_of(net, seed=1, images=1, tokens=4, width=24, is_xl=False, loud=1.0):
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
    cond, uncond = (torch.randn(images, tokens, width, generator=generator) for _ in range(2))
    adapter = SimpleNamespace(ip_layers=SimpleNamespace(to_kvs=layers))
    adapter.get_multigpu_clone = lambda device: adapter
    return {"ipadapter": adapter, "cond": cond, "uncond": uncond}


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
    own = {"sigma_start": 999999999.9, "sigma_end": 0.0}       # all that every pack gives
    if pack.called.__name__ == "ipadapter_attention":
        own |= {"weight": 1.0, "cond_alt": None, "weight_type": "linear", "mask": None, "unfold_batch": False,
                "embeds_scaling": "V only"}
    elif pack.called.__name__ == "pulid_attention":
        own |= {"weight": 1.0, "mask": None, "ortho": False, "ortho_v2": False, "pulid": given["ipadapter"]}
        given = {name: value for name, value in given.items() if name != "ipadapter"}
    for number, (block, index, _) in enumerate(places):
        key = (*block, index) if deep else block
        all_given = {"module_key": str(2 * number + 1), **own, **given, **settings}
        # the packs add to the object itself, which other MODELs have too
        before = replaced.get(key)
        calls = [*(zip(before.callback, before.kwargs) if before else ()), (pack.called, all_given)]
        replaced[key] = (type(before) if before else pack.Attn2Replace)(calls[0][0], **calls[0][1])
        for callback, other in calls[1:]:
            replaced[key].add(callback, **other)
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


def show_images(model, layers, tokens, weight, mask=None):
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
