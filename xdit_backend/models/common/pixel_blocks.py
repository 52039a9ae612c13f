"""Shared code of PixelDiT's families, which run as ComfyUI's class: its two kinds of blocks over some of an image's
tokens, tensor names and config rules.

# B batch, T tokens, P pixels of a patch, C channels of a pixel's own token
"""

import functools
from types import MethodType

import torch

PREFIX, MARK = "core.", ".adaLN_modulation.0."
SIDE = 16                                  # of a patch in pixels


def of_file(name, dim):
    """Config rule: size of one dim of a tensor, whose name in a file may begin with "core."."""
    return lambda shapes: shapes[(PREFIX if f"{PREFIX}y_pos_embedding" in shapes else "") + name][dim]


def under_core(rule):
    """Wrap a rule for names without "core."."""
    return lambda shapes: rule({name.removeprefix(PREFIX): shape for name, shape in shapes.items()})


def convert(tensors, config):
    """Split the modulation of pixels, which a file interleaves in six kinds for each pixel of a patch, into
    ComfyUI's two modules of three kinds."""
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(PREFIX)
        if name.startswith(("_repa_projector", "net_ema.")):
            continue
        if MARK not in name or not name.startswith("pixel_blocks."):
            found[name] = tensor
            continue
        kinds = tensor.unflatten(0, (-1, 6, config["pixel_hidden_size"]))
        for number, part in enumerate(("msa", "mlp")):
            found[name.replace(MARK, f".adaLN_modulation_{part}.")] = kinds[:, 3 * number:3 * number + 3].flatten(0, 2)
    return found


def in_file(tensors, prefix=PREFIX):
    """The inverse of `convert`: tensors of ComfyUI's class as a file has them."""
    found, width = {}, tensors["pixel_embedder.proj.weight"].shape[0]
    for name, tensor in tensors.items():
        if ".adaLN_modulation_mlp." in name:
            continue
        if ".adaLN_modulation_msa." in name:
            kinds = [each.unflatten(0, (-1, 3, width)) for each in (tensor, tensors[name.replace("_msa.", "_mlp.")])]
            name, tensor = name.replace("_msa.", ".0."), torch.cat(kinds, 1).flatten(0, 2)
        found[prefix + name] = tensor
    return found


def adapt_model(model, config):
    """Carry pixels with their patch's token: a token of the second block list is the patch's token of the first,
    followed by its pixels, (B, T, hidden + C * P). Blocks receive the indices of their tokens in the full image."""
    embedder, tokens = model.pixel_embedder, []
    embed, condition = embedder.forward, model._pre_pixel_blocks

    def conditioned(s, **others):
        tokens[:] = [condition(s, **others)]
        return tokens[0]

    def embedded(inputs, patch_size):
        own = tokens.pop()
        return torch.cat([own, embedder.pixels(inputs, patch_size)], 2)

    model._pre_pixel_blocks, embedder.forward = conditioned, embedded
    embedder.pixels = lambda inputs, patch_size: embed(inputs, patch_size).flatten(1).unflatten(0, (len(inputs), -1))
    for block in model.patch_blocks:
        block.forward = MethodType(with_token_indices, block)
    for block in model.pixel_blocks:
        block._rope_fn = functools.partial(_own_positions, block._rope_fn)
        block.forward = MethodType(run_pixel_block, block)
    model.final_layer.forward = MethodType(_of_pixels, model.final_layer)


def with_token_indices(self, x, y, c, pos_img, pos_txt=None, token_indices=None, transformer_options={}):
    """The block's forward; `token_indices` takes the position of the mask, which ComfyUI's forward never passes."""
    return type(self).forward(self, x, y, c, pos_img, pos_txt, None, transformer_options)


def run_pixel_block(self, x, s_cond, image_height, image_width, patch_size, token_indices=None, **others):
    """A block over some tokens of an image: they are passed as an image of one token row, with their own positions."""
    condition, pixels = x.split([self.context_dim, x.shape[2] - self.context_dim], 2)
    size, options = (image_height, image_width), others["transformer_options"]
    if token_indices is not None:
        (own, num_tokens), columns = token_indices, image_width // patch_size
        options = options | {"rope_options": options.get("rope_options", {})
                             | {"own": own, "full_size": (num_tokens // columns, columns)}}
        size = patch_size, len(own) * patch_size
    output = type(self).forward(self, pixels.reshape(-1, patch_size ** 2, self.pixel_dim), condition.flatten(0, 1),
                                *size, patch_size, None, options)
    return torch.cat([condition, output.view_as(pixels)], 2)


def _own_positions(positions, head_size, height, width, own=None, full_size=None, **options):
    return positions(head_size, height, width, **options) if own is None else positions(
        head_size, *full_size, **options)[own]


def _of_pixels(self, tokens):
    width = self.norm.weight.shape[0]
    return type(self).forward(self, tokens[..., -SIDE ** 2 * width:].unflatten(2, (-1, width)).flatten(0, 1))


def pixels_of_patch(module, forward, rows, tokens, args, kwargs):
    """Embed the pixels of a patch at their positions in the full image. Positions depend on the image's height, not
    its content."""
    latent, patch_size = args
    full = latent.new_zeros(*latent.shape[:2], rows.whole_rows, latent.shape[3])
    full.narrow(2, rows.patch.start, latent.shape[2]).copy_(latent)
    return forward(full, patch_size).narrow(1, rows.first_token, tokens.counts["image"])


def full_rows(rows, args, kwargs):
    """The call's arguments with the number of token rows of the full image."""
    return [rows.whole_token_rows, *args[1:]], kwargs
