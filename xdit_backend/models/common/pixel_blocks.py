"""What families of PixelDiT's kin do beside ComfyUI's class: its two kinds of blocks over some of a picture's tokens,
and the names of its files. For Family.amend, Family.convert and the rules of a config.

# B batch, T tokens, P pixels of a patch, C channels of a pixel's own token
"""

import functools
from types import MethodType

import torch

PREFIX, MARK = "core.", ".adaLN_modulation.0."
SIDE = 16                                  # of a patch, in pixels


def of_file(name, dim):
    """The rule for one size of a tensor, which files may have under "core."."""
    return lambda shapes: shapes[(PREFIX if f"{PREFIX}y_pos_embedding" in shapes else "") + name][dim]


def under_core(rule):
    """A rule over names without "core."."""
    return lambda shapes: rule({name.removeprefix(PREFIX): shape for name, shape in shapes.items()})


def convert(tensors, config):
    """What modulates pixels is of six kinds in turn, for each pixel of a patch; ComfyUI's class has three and three."""
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


def adapt_model(model, config):
    """A token of the second list is the patch's token of the first, and its pixels after that: (B, T, hidden + C * P).
    Blocks know which tokens of the whole picture they have."""
    embedder, tokens = model.pixel_embedder, []
    embed, condition = embedder.forward, model._pre_pixel_blocks

    def conditioned(s, **given):
        tokens[:] = [condition(s, **given)]
        return tokens[0]

    def embedded(inputs, patch_size):
        own = tokens.pop()
        return torch.cat([own, embedder.pixels(inputs, patch_size)], 2)

    model._pre_pixel_blocks, embedder.forward = conditioned, embedded
    embedder.pixels = lambda inputs, patch_size: embed(inputs, patch_size).flatten(1).unflatten(0, (len(inputs), -1))
    for block in model.patch_blocks:
        block.forward = MethodType(with_places, block)
    for block in model.pixel_blocks:
        block._rope_fn = functools.partial(_places_alone, block._rope_fn)
        block.forward = MethodType(draw, block)
    model.final_layer.forward = MethodType(_of_pixels, model.final_layer)


def with_places(self, x, y, c, pos_img, pos_txt=None, places=None, transformer_options={}):
    """ComfyUI's forward gives no mask, in the place of `places`."""
    return type(self).forward(self, x, y, c, pos_img, pos_txt, None, transformer_options)


def draw(self, x, s_cond, image_height, image_width, patch_size, places=None, **given):
    """A block over tokens that are not all of a picture: as of one row, each with the place that it has."""
    condition, pixels = x.split([self.context_dim, x.shape[2] - self.context_dim], 2)
    size, options = (image_height, image_width), given["transformer_options"]
    if places is not None:
        (own, num_tokens), columns = places, image_width // patch_size
        options = options | {"rope_options": options.get("rope_options", {})
                             | {"own": own, "whole": (num_tokens // columns, columns)}}
        size = patch_size, len(own) * patch_size
    drawn = type(self).forward(self, pixels.reshape(-1, patch_size ** 2, self.pixel_dim), condition.flatten(0, 1),
                               *size, patch_size, None, options)
    return torch.cat([condition, drawn.view_as(pixels)], 2)


def _places_alone(positions, head_size, height, width, own=None, whole=None, **options):
    return positions(head_size, height, width, **options) if own is None else positions(
        head_size, *whole, **options)[own]


def _of_pixels(self, tokens):
    width = self.norm.weight.shape[0]
    return type(self).forward(self, tokens[..., -SIDE ** 2 * width:].unflatten(2, (-1, width)).flatten(0, 1))


def pixels_of_patch(module, forward, rows, tokens, args, kwargs):
    """Pixels have their places in the whole picture, each row of which is as far from the next as in any other."""
    latent, patch_size = args
    whole = latent.new_zeros(*latent.shape[:2], rows.whole_rows, latent.shape[3])
    whole.narrow(2, rows.patch.start, latent.shape[2]).copy_(latent)
    return forward(whole, patch_size).narrow(1, rows.first_token, tokens.counts["image"])


def whole_rows(rows, args, kwargs):
    """Rows and columns of tokens of the whole picture."""
    return [rows.whole_token_rows, *args[1:]], kwargs
