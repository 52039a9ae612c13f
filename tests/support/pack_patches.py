"""Patches of the shapes that popular packs put on a MODEL, with the files and names by which they are known:
feed-forward layers in chunks, attention to the text guided away from a second text, perturbed or blurred
self-attention, self-attention multiplied by what frames see of each other, blocks that get their tokens in a random
order, attention to the text of a U-Net that is guided or has sparse weights, and a lowered frequency of the positions.
"""

import math

import torch

CHUNKS = """
import types

import torch


class Chunks:
    def __init__(self, owner, number, change):
        self.owner, self.number, self.change = owner, number, change

    def bound(self, module):
        def forward(module, tokens):
            parts = tokens.chunk(self.number, 1) if tokens.shape[1] > 4 else [tokens]
            return self.change(torch.cat([self.owner.forward(module, part) for part in parts], 1))
        return types.MethodType(forward, module)
"""
# a method with the name by which it is known
GUIDE = """
import types

import torch
from comfy.ldm.modules.attention import optimized_attention


class WanCrossAttentionPatch:
    def __init__(self, text, scale, alpha, tau, i2v, input_type):
        self.nag_context, self.nag_scale, self.nag_alpha, self.nag_tau = text, scale, alpha, tau
        self.i2v, self.input_type = i2v, input_type

    def __get__(self, module, owner=None):
        def wrapped_attention(module, x, context, context_img_len=None, transformer_options={{}}):
            words, of_image = context, 0
            if self.i2v:
                image, words = context[:, :context_img_len], context[:, context_img_len:]
                query = module.norm_q(module.q(x))
                of_image = optimized_attention(query, module.norm_k_img(module.k_img(image)), module.v_img(image),
                                               heads=module.num_heads)
            every = self.input_type == "batch" and not self.i2v or len(x) == 1
            count = len(x) if every else len(x) // 2
            query = module.norm_q(module.q(x))
            out = optimized_attention(query, module.norm_k(module.k(words)), module.v(words), heads=module.num_heads)
            text = self.nag_context.repeat(count, 1, 1)
            against = optimized_attention(query[:count], module.norm_k(module.k(text)), module.v(text),
                                          heads=module.num_heads)
            positive = out[:count]
            far = self.nag_scale * positive - (self.nag_scale - 1) * against
            ratio = far.norm(p=1, dim=-1, keepdim=True) / positive.norm(p=1, dim=-1, keepdim=True)
            far = torch.where(ratio > self.nag_tau, self.nag_tau / ratio, 1.0) * far
            out = torch.cat([self.nag_alpha * far + (1 - self.nag_alpha) * positive, out[count:]])
            return module.o({result} + of_image)
        return types.MethodType(wrapped_attention, module)
"""
# an object with the settings by which it is known
ENHANCE = """
import types

import torch
from comfy.ldm.flux.math import apply_rope1
from comfy.ldm.lightricks.model import apply_rotary_emb
from comfy.ldm.modules.attention import optimized_attention


class Louder:
    def __init__(self, num_frames, enhance_weight):
        self.num_frames, self.enhance_weight = num_frames, enhance_weight

    def factor(self, q, k, heads):
        q, k = (each.unflatten(2, (heads, -1)).unflatten(1, (self.num_frames, -1)).transpose(1, 2) for each in (q, k))
        seen = torch.einsum("bsfnc,bsgnc->bsnfg", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
        count = self.num_frames
        of_others = (1 - torch.diagonal(seen, dim1=-2, dim2=-1)).mean() / (count - 1)
        return torch.clamp({factor}, min=1)

    def of_wan(self, module):
        def forward(module, x, freqs, transformer_options={{}}):
            heads, size = module.num_heads, module.head_dim
            q, k = (apply_rope1(norm(linear(x)).unflatten(2, (heads, size)), freqs).flatten(2)
                    for norm, linear in ((module.norm_q, module.q), (module.norm_k, module.k)))
            out = optimized_attention(q, k, module.v(x), heads=heads, transformer_options=transformer_options)
            return {result} * self.factor(q, k, heads)
        return types.MethodType(forward, module)

    def of_ltx(self, module):
        def forward(module, x, context=None, mask=None, pe=None, k_pe=None, transformer_options={{}}):
            q, k = module.q_norm(module.to_q(x)), module.k_norm(module.to_k(x))
            if pe is not None:
                q, k = apply_rotary_emb(q, pe), apply_rotary_emb(k, pe)
            out = optimized_attention(q, k, module.to_v(x), module.heads, transformer_options=transformer_options)
            return module.to_out(out) * self.factor(q, k, module.heads)
        return types.MethodType(forward, module)
"""
SELF_ATTENTION = """
import math

import torch
from comfy.ldm.modules.attention import optimized_attention


def perturbed_attention(q, k, v, extra_options, mask=None):
    return {values}


def seg_attention_wrapper(attention, blur_sigma):
    def seg_attention(q, k, v, extra_options, mask=None):
        rows, columns = extra_options["original_shape"][2:4]
        height = round((q.shape[1] * rows / columns) ** 0.5)
        image = q.transpose(1, 2).unflatten(2, (height, -1))
        q = blur(image, blur_sigma).flatten(2).transpose(1, 2)
        return attention({queries}, k, v, heads=extra_options["n_heads"])
    return seg_attention
"""
RIFLEX = """
import math

import torch
from comfy.ldm.flux.layers import EmbedND


class EmbedND_RifleX(torch.nn.Module):
    def __init__(self, own, k, num_frames):
        super().__init__()
        self.own, self.k, self.num_frames = EmbedND(own.dim, own.theta, own.axes_dim), k, num_frames

    def forward(self, ids):
        table = self.own(ids).clone()
        angles = ids[..., 0] * {part} * 2 * math.pi / self.num_frames
        turned = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1)
        table[:, 0, :, self.k - 1] = turned.unflatten(-1, (2, 2))
        return table
"""


def blur(image, sigma):
    """A Gaussian blur as a matrix for each side, with the image mirrored at its edges."""
    if sigma < 0:
        return image.mean((2, 3), keepdim=True).expand_as(image)
    width = image.shape[3]
    reach = min(math.ceil(6 * sigma) // 2 * 2 + 1, width + 1 - width % 2) // 2
    for dim in (2, 3):
        size = image.shape[dim]
        weights = torch.zeros(size, size)
        for here in range(size):
            for offset in range(-reach, reach + 1):
                there = abs(here + offset)
                there = there if there < size else 2 * (size - 1) - there
                weights[here, there] += math.exp(-0.5 * (offset / sigma) ** 2)
        weights /= weights.sum(1, keepdim=True)
        image = torch.einsum("rs,bcsw->bcrw" if dim == 2 else "rs,bchs->bchr", weights, image)
    return image


def _written(source, file):
    names = {"__name__": "a_pack", "blur": blur, "entmax": entmax}
    exec(compile(source, file, "exec"), names)
    return names


def chunked(model, path, number=2, change=lambda out: out):
    """The MODEL with these modules of its blocks in chunks. path: as "blocks.{}.ffn". change: of the result."""
    model, chunks, index = model.clone(), _written(CHUNKS, "a_pack.py")["Chunks"], 0
    inside = model.get_model_object("diffusion_model")
    for index in range(len(inside.get_submodule(path.partition(".")[0]))):
        module = inside.get_submodule(path.format(index))
        model.add_object_patch(f"diffusion_model.{path.format(index)}.forward",
                               chunks(type(module), number, change).bound(module))
    return model


def guided(model, conditioning, scale=11.0, alpha=0.25, tau=2.5, input_type="default", result="out", blocks=None):
    """The MODEL with attention to the text guided away from this conditioning. result: source of what the attention
    returns. blocks: numbers of those that are changed; None: all."""
    model = model.clone()
    inside = model.get_model_object("diffusion_model")
    inside.text_embedding.to("cpu")
    text = inside.text_embedding(conditioning[0][0])
    patch = _written(GUIDE.format(result=result), "model_optimization_nodes.py")["WanCrossAttentionPatch"]
    for index, block in enumerate(inside.blocks):
        if blocks is None or index in blocks:
            module = block.cross_attn
            model.add_object_patch(f"diffusion_model.blocks.{index}.cross_attn.forward",
                                   patch(text, scale, alpha, tau, hasattr(module, "k_img"), input_type).__get__(module))
    return model


def enhanced(model, frames=3, weight=4.0, factor="of_others * (count + self.enhance_weight)", result="module.o(out)",
             num_blocks=None):
    """The MODEL with self-attention multiplied by a factor, as Enhance-A-Video does. factor, result: source of what is
    computed. num_blocks: of the first blocks alone; None: all."""
    model = model.clone()
    inside = model.get_model_object("diffusion_model")
    louder = _written(ENHANCE.format(factor=factor, result=result), "a_pack.py")["Louder"]
    blocks, name, bound = (("blocks", "self_attn", "of_wan") if hasattr(inside, "blocks")
                           else ("transformer_blocks", "attn1", "of_ltx"))
    for index, block in enumerate(getattr(inside, blocks)[:num_blocks]):
        model.add_object_patch(f"diffusion_model.{blocks}.{index}.{name}.forward",
                               getattr(louder(frames, weight), bound)(getattr(block, name)))
    return model


# a function that closes over the module's own forward
SHUFFLE = """
import torch


def shuffling(forward):
    @torch.no_grad()
    def shuffled(x, context=None, transformer_options={{}}):
        if transformer_options.get("a_pack_shuffles"):
            order = torch.randperm(x.shape[1], device=x.device)
            x = {tokens}
        return forward(x, context=context, transformer_options=transformer_options)
    return shuffled
"""


def shuffled(model, blocks=None, tokens="x[:, order]"):
    """The MODEL with a third prediction in each step, for which blocks get their tokens in a random order. blocks:
    beginnings of their paths; None: all. tokens: source of what a block gets then."""
    import comfy.samplers
    from comfy.ldm.modules.attention import BasicTransformerBlock
    shuffling = _written(SHUFFLE.format(tokens=tokens), "a_pack.py")["shuffling"]
    model = model.clone()
    for name, module in model.get_model_object("diffusion_model").named_modules():
        if isinstance(module, BasicTransformerBlock) and (blocks is None or name.startswith(blocks)):
            model.add_object_patch(f"diffusion_model.{name}.forward", shuffling(module.forward))

    def after(given):
        options = given["model_options"] | {"transformer_options": {
            **given["model_options"]["transformer_options"], "a_pack_shuffles": True}}
        third, = comfy.samplers.calc_cond_batch(given["model"], [given["cond"]], given["input"], given["sigma"],
                                                options)
        return given["denoised"] + 3.0 * (given["cond_denoised"] - third)
    model.set_model_sampler_post_cfg_function(after)
    return model


# functions with the variables by which they are known
OF_TEXT = """
import torch
from comfy.ldm.modules.attention import optimized_attention


def guide(nag_scale, tau, alpha, sigma_start, sigma_end, k_neg, v_neg, prev_attn2_replace=None):
    def guided(q, k, v, extra_options):
        heads, prompts = extra_options["n_heads"], extra_options["cond_or_uncond"]
        if prev_attn2_replace is None:
            out = optimized_attention(q, k, v, heads)
        else:
            out = prev_attn2_replace(q, k, v, extra_options)
        if 0 not in prompts or not sigma_end < extra_options["sigmas"][0] <= sigma_start:
            return out
        start = len(q) // len(prompts) * prompts.index(0)
        others, positive, query = out[:start], out[start:], q[start:]
        against = optimized_attention(query, *(each.expand(len(query), -1, -1) for each in (k_neg, v_neg)), heads)
        far = positive + nag_scale * (positive - against)
        ratio = torch.linalg.vector_norm(far, 1, -1, True) / torch.linalg.vector_norm(positive, 1, -1, True)
        far = far * torch.clamp(tau / ratio, max=1)
        return torch.cat([others, {result}])
    return guided


def sparse(pladis_scale, sparse_func):
    def attend(q, k, v, extra_options):
        heads = extra_options["n_heads"]
        q, k, v = (each.unflatten(2, (heads, -1)).transpose(1, 2) for each in (q, k, v))
        logits = torch.einsum("bnqc,bnkc->bnqk", q, k).div(q.shape[-1] ** 0.5)
        weights = {weights}
        return (weights @ v).transpose(1, 2).flatten(2)
    return attend
"""


def entmax(logits, power):
    """Entmax (power 2) or sparsemax (power 1) of the last dim, by Newton's method from below."""
    logits = (logits.double() - logits.amax(-1, keepdim=True)) / power
    threshold = torch.full_like(logits[..., :1], -1.0)
    for _ in range(60):
        above = (logits - threshold).clamp_min(0)
        slope = (above > 0).sum(-1, keepdim=True) if power == 1 else 2 * above.sum(-1, keepdim=True)
        threshold = threshold + ((above ** power).sum(-1, keepdim=True) - 1) / slope
    return ((logits - threshold).clamp_min(0) ** power).float()


def _text_attentions(model, blocks):
    """(side, number, index, module) of the attentions to the text of a U-Net. blocks: as of `shuffled`."""
    for name, module in model.get_model_object("diffusion_model").named_modules():
        if name.endswith(".attn2") and (blocks is None or name.startswith(blocks)):
            side, number, *_, index, _ = name.split(".")
            yield side.split("_")[0], int(number) - (side == "middle_block"), int(index), module


def text_guided(model, conditioning, scale=2.0, tau=1.1, alpha=0.5, start=1e9, end=-1.0, blocks=None,
                result="alpha * far + (1 - alpha) * positive", source=None):
    """The MODEL with the attention to the text of a U-Net guided away from this conditioning. result: source of the
    positive prompt's output. source: MODEL whose layers compute keys and values; None: this one."""
    guide = _written(OF_TEXT.format(result=result, weights="0"), "a_pack.py")["guide"]
    model = model.clone()
    for side, number, index, module in [*_text_attentions(source or model, blocks)]:
        replaced = model.model_options["transformer_options"].get("patches_replace", {}).get("attn2", {})
        text = conditioning[0][0]
        model.set_model_attn2_replace(guide(scale, tau, alpha, start, end, module.to_k(text), module.to_v(text),
                                            replaced.get((side, number, index))), side, number, index)
    return model


def sparsified(model, scale=2.0, kind="entmax", blocks=None,
               weights="pladis_scale * entmax(logits, sparse_func) + (1 - pladis_scale) * logits.softmax(-1)"):
    """The MODEL with attention to the text of a U-Net extrapolated towards sparse weights. kind: "entmax" or
    "sparsemax". weights: source of the attention's weights."""
    sparse = _written(OF_TEXT.format(result="positive", weights=weights), "a_pack.py")["sparse"](
        scale, 2 if kind == "entmax" else 1)
    model = model.clone()
    for side, number, index, _ in [*_text_attentions(model, blocks)]:
        model.set_model_attn2_replace(sparse, side, number, index)
    return model


def perturbed(model, blocks, sigma=None, values="v", queries="q"):
    """The MODEL with a third prediction in each step, of perturbed self-attention, or with blurred queries if sigma is
    a number. blocks: keys of ComfyUI's patches. values, queries: source of what the attention returns or attends with.
    """
    import comfy.model_patcher
    import comfy.samplers
    from comfy.ldm.modules.attention import optimized_attention
    written = _written(SELF_ATTENTION.format(values=values, queries=queries), "guidance_utils.py")
    function = (written["perturbed_attention"] if sigma is None
                else written["seg_attention_wrapper"](optimized_attention, sigma))

    def after(given):
        options = given["model_options"].copy()
        for block in blocks:
            options = comfy.model_patcher.set_model_options_patch_replace(options, function, "attn1", *block)
        third, = comfy.samplers.calc_cond_batch(given["model"], [given["cond"]], given["input"], given["sigma"],
                                                options)
        return given["denoised"] + 3.0 * (given["cond_denoised"] - third)
    model = model.clone()
    model.set_model_sampler_post_cfg_function(after)
    return model


def slowed(model, k=3, num_frames=3, part=0.9):
    """The MODEL with a frequency of its positions along frames lowered to `part` of a period in num_frames."""
    model = model.clone()
    inside = model.get_model_object("diffusion_model")
    name = next(name for name in ("rope_embedder", "pe_embedder") if hasattr(inside, name))
    own = getattr(inside, name)
    class_ = _written(RIFLEX.format(part=part), "nodes.py")["EmbedND_RifleX"]
    model.add_object_patch(f"diffusion_model.{name}", class_(getattr(own, "own", own), k, num_frames))
    return model
