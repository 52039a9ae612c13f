"""Z-Image-Omni: Z-Image with reference images, each a latent, SigLIP features and a text of its own. Texts, images
and features are refined separately, then processed as one sequence."""

import dataclasses

import torch
import torch.nn.functional as F

from ..protocol.errors import ConfigError
from .common.family import SmallConfig
from .common.inputs import config_of, from_conditioning, size, timestep
from .common.plan import BlockList, TokenArgument
from .common.reference_latents import listed, references
from .common.rope_scaling import scales_and_shifts
from .common.z_image import EMBEDDER, GROUP, LATENT, embed_times, first_row, is_z_image, num_pads, padded, rotations_of
from .z_image import Z_IMAGE

IMAGES = ("reference", "image", "pad")
ALL = ("text", *IMAGES, "siglip")


def _adapt(model, config):
    """Use ComfyUI's positions and padding. A patch has its rows' positions, and the full latent's padding."""
    forward, rotations = model.forward, rotations_of(model)
    embed_times(model, config)

    def with_position(*, x, reference_images, contexts, siglip, t, return_dict=True, **position):
        output, = forward([[*reference_images, x]], t, contexts, siglip_feats=siglip, image_noise_mask=position,
                          return_dict=False)
        return (torch.stack(output).squeeze(2),)

    def arranged(latents, contexts, siglip, patch_size, f_patch_size, position):
        return _arranged(model, latents[0], contexts, siglip, **position)

    def prepared(tokens, positions, is_pad, pad_token, is_noisy=None, device=None):
        tokens = torch.stack(tokens)
        tokens = torch.where(is_pad[:, None], pad_token.to(tokens), tokens)
        return tokens, rotations(positions)[None], None, None, is_noisy

    def joined(*entries):                                        # (tokens, rotations, lengths, noise mask) of each
        images, texts, siglip = entries[:4], entries[4:8], entries[8:12]
        tokens, freqs, _, is_noisy = zip(*([texts, images, siglip] if siglip[2] else [texts, images]))
        return torch.cat(tokens, 1), torch.cat(freqs, 1), None, torch.cat(is_noisy, 1)
    model.forward, model.patchify_and_embed_omni = with_position, arranged
    model._prepare_sequence, model._build_unified_sequence = prepared, joined


def _arranged(model, latents, contexts, siglip, *, first_row, num_pads, rope_scales):
    """Replacement of the class's patchify_and_embed_omni.

    latents: (B, C, rows, columns) each; the last is the generated image's. contexts: (B, T, C) for each, and texts
    after them. siglip: (B, rows, columns, C) for each, or [].
    """
    start, texts, images, seen = 0, [], [], []                 # (tokens, positions, is noisy) of each
    for number, context in enumerate(contexts):
        is_noisy, length = number >= len(latents) - 1, context.shape[1]
        line = torch.arange(start + 1, start + 1 + padded(length), device=context.device)
        texts.append((context, F.pad(line[:, None], (0, 2)), is_noisy))
        if number >= len(latents):
            start += length
            continue
        end = start + (length if siglip else len(line)) + 1
        row, pads = (first_row, num_pads) if is_noisy else (0, -LATENT.num_tokens(latents[number].shape) % GROUP)
        images.append((*_image_tokens(model, latents[number], end, row, pads, rope_scales), is_noisy))
        seen += [(*_siglip_tokens(each, end + 1), False) for each in siglip[number:number + 1]]
        start = end + 1
    batch_size = len(context)
    (image, text, siglip), positions, is_pad, is_noisy = zip(*(
        _joined(entries) if entries else ([None] * batch_size, None, None, None) for entries in (images, texts, seen)))
    offset = len(text[0]), len(text[0]) + len(image[0])
    sizes = [(1, *latent.shape[2:]) for latent in latents]
    return image, text, siglip, [sizes] * batch_size, *positions, *is_pad, [offset] * batch_size, *is_noisy


def _joined(entries):
    """Join entries: ([tokens of each image], positions (T, 3), padding mask (T,), noise mask (1, T))."""
    found, positions, _ = zip(*entries)
    device = positions[0].device
    tokens = torch.cat([F.pad(each, (0, 0, 0, len(own) - each.shape[1])) for each, own in zip(found, positions)], 1)
    is_pad = torch.cat([torch.arange(len(own), device=device) >= each.shape[1] for each, own in zip(found, positions)])
    is_noisy = torch.cat([torch.full((1, len(own)), noisy, device=device) for _, own, noisy in entries], 1)
    return list(tokens), torch.cat(positions), is_pad, is_noisy


def _image_tokens(model, latent, at, first_row, num_pads, rope_scales):
    """(tokens (B, T, C), positions (T + pads, 3)) of a latent or a patch of one."""
    tokens = torch.stack([model._patchify_image(each[:, None], 2, 1)[0] for each in latent])
    axes = [torch.arange(first, first + count, device=latent.device)
            for first, count in zip((first_row, 0), LATENT.counts(latent.shape))]
    if rope_scales is not None:
        axes = [axis * scale + shift
                for axis, (scale, shift) in zip(axes, scales_and_shifts(rope_scales).to(latent.device)[1:])]
    return tokens, _positions(at, axes, num_pads)


def _siglip_tokens(features, at):
    """(tokens, positions) of SigLIP features (B, rows, columns, C). The memory of (C, rows, columns) is cut into
    tokens, as in ComfyUI."""
    rows, columns, width = features.shape[1:]
    axes = [torch.linspace(0, count * 8 - 1, count, dtype=torch.float32, device=features.device).floor().long()
            for count in (rows, columns)]
    return (features.permute(0, 3, 1, 2).reshape(len(features), rows * columns, width),
            _positions(at, axes, padded(rows * columns) - rows * columns))


def _positions(at, axes, num_pads):
    first = torch.arange(at, at + 1, device=axes[0].device).to(axes[0])
    return F.pad(torch.cartesian_prod(first, *axes), (0, 0, 0, num_pads))


def _by_reference(conditioning, name):
    """Split a list of the conditioning: (an entry or None for each reference, the remaining entries)."""
    found, count = listed(conditioning, name), len(references(conditioning))
    return found[:count] + [None] * (count - len(found)), found[count:] if count else []


def _reference_images(call):
    found = references(call.conditioning)
    odd = next((each for each in found if each.shape[2] % 2 or each.shape[3] % 2), None)
    if odd is not None:
        raise ConfigError("Scale the reference images to sides that are multiples of 16 pixels, and set "
                          "auto_resize_images to false: Z-Image-Omni takes references with even sides, and this "
                          f"latent has {odd.shape[2]} x {odd.shape[3]}.")
    return [each.expand(len(call.latent), *each.shape[1:]) for each in found]


def _contexts(call):
    """The text of each reference, of the generated image, and further texts. A reference without a text has one of
    no tokens."""
    own, (before, after) = from_conditioning("context")(call), _by_reference(call.conditioning, "ref_contexts")
    return [own[:, :0] if each is None else each.expand(len(own), *each.shape[1:]) for each in (*before, own, *after)]


def _siglip(call):
    """SigLIP features of each reference; those of the generated image are empty. [] without references."""
    (found, _), width = _by_reference(call.conditioning, "siglip_feats"), call.config["siglip_feat_dim"]
    wrong = next((each.shape[-1] for each in found if each is not None and each.shape[-1] != width), None)
    if wrong is not None:
        raise ConfigError(f"Load this model's SigLIP in Load CLIP Vision: the conditioning has {wrong} features per "
                          f"patch of an image, and this Z-Image-Omni takes {width}.")
    empty = call.latent.new_zeros(1, 0, 0, width)
    return [(empty if each is None else each).expand(len(call.latent), -1, -1, -1)
            for each in (*found, None)] if found else []


def _num_text(conditioning):
    before, after = _by_reference(conditioning, "ref_contexts")
    return sum(padded(0 if each is None else each.shape[1]) for each in (*before, conditioning["context"], *after))


def _num_references(conditioning):
    return sum(padded(LATENT.num_tokens(each.shape)) for each in references(conditioning))


def _num_siglip(conditioning):
    found, _ = _by_reference(conditioning, "siglip_feats")
    return sum(padded(0 if each is None else each[0, ..., 0].numel()) for each in (*found, None)) if found else 0


Z_IMAGE_OMNI = dataclasses.replace(
    Z_IMAGE, name="Z-Image-Omni", title="Z-Image-Omni", adapt_model=_adapt,
    activation_factors={"alone": 19.8, "residual": 9.35, "whole": 6.15, "outside": 6.4, "held": 2.65, "block": 17.65,
                        "exchange": 16.9, "own": 0.0},
    detection=dataclasses.replace(
        Z_IMAGE.detection,
        recognise=lambda shapes: is_z_image(shapes) and EMBEDDER in shapes,
        config=config_of(**Z_IMAGE.detection.config.rules | {"siglip_feat_dim": size(EMBEDDER, 1)})),
    inputs=dataclasses.replace(
        Z_IMAGE.inputs,
        conditioning=Z_IMAGE.inputs.conditioning | {"ref_latents": None, "ref_contexts": None, "siglip_feats": None},
        only_with={"ref_contexts": "ref_latents", "siglip_feats": "ref_latents"},
        lengths={"text": _num_text, "reference": _num_references, "siglip": _num_siglip},
        arguments={"x": LATENT, "t": timestep(-1, 1), "reference_images": _reference_images, "contexts": _contexts,
                   "siglip": _siglip, "first_row": first_row, "num_pads": num_pads,
                   "rope_scales": from_conditioning("rope_scales")}),
    plan=dataclasses.replace(
        Z_IMAGE.plan,
        blocks=(BlockList("noise_refiner", "noise_refiner.", "n_refiner_layers", returns=(IMAGES,),
                          streams={"x": IMAGES}, attention={"attention": IMAGES},
                          tokens=dict.fromkeys(("freqs_cis", "noise_mask"), TokenArgument(1, IMAGES))),
                BlockList("layers", "layers.", "n_layers", returns=(ALL,))),
        streams={"x": ALL}, attention={"attention": ALL},
        tokens=dict.fromkeys(("freqs_cis", "noise_mask"), TokenArgument(1, ALL)),
        # not cacheable: blocks compute modulations for two timesteps, with that of the references
        cacheable={},
        cacheable_outside=Z_IMAGE.plan.cacheable_outside | {"siglip_embedder": "run", "siglip_refiner": "run"},
        unstaged_blocks=("context_refiner", "siglip_refiner")),
    testing=SmallConfig(Z_IMAGE.testing.config | {"siglip_feat_dim": 24}, Z_IMAGE.testing.native,
                        Z_IMAGE.testing.arguments | {"siglip_feat_dim": 40, "n_layers": 3}, detected="ZImage"))
