"""LoRA and other weight patches of every kind and naming that ComfyUI's loaders parse, made at random for a tiny model.
Used by the tests.

A file's tensors are made for names of the kind that a publisher, kohya's scripts or diffusers write: those that
ComfyUI's own table of names (comfy.lora.model_lora_keys_unet) lists for the model.
"""

import torch

SEED = 9


def makers():
    """{kind: maker of {ending of a tensor's name: tensor} for a weight of a shape}."""
    return {"lora": _lora, "lora without alpha": lambda draw, *shape: _without(_lora(draw, *shape), ".alpha"),
            "dora": lambda draw, rows, *shape: _lora(draw, rows, *shape)
            | {".dora_scale": 1 + 0.1 * draw(rows, 1).abs()},
            "locon": _locon, "loha": _loha, "lokr": _lokr, "glora": _glora, "oft": _oft, "boft": _boft,
            "diff": lambda draw, *shape: {".diff": 0.02 * draw(*shape)},
            "set": lambda draw, *shape: {".set_weight": 0.05 * draw(*shape)}}


def adapters(kind, shapes, seed=SEED):
    """Tensors of a LoRA file. shapes: {name of a layer, as the file has it: shape of its weight}."""
    generator = torch.Generator().manual_seed(seed)
    make = makers()[kind]
    return {name + ending: tensor.contiguous() for name, shape in shapes.items()
            for ending, tensor in make(lambda *size: torch.randn(size, generator=generator), *shape).items()}


def _without(tensors, ending):
    return {name: tensor for name, tensor in tensors.items() if name != ending}


def _lora(draw, rows, *columns, rank=4):
    return {".lora_up.weight": 0.1 * draw(rows, rank, *[1] * (len(columns) - 1)),
            ".lora_down.weight": 0.1 * draw(rank, *columns), ".alpha": torch.tensor(3.0)}


def _locon(draw, rows, *columns, rank=4):
    """With a core between the factors, for a convolution's weight."""
    if len(columns) != 3:
        return _lora(draw, rows, *columns, rank=rank)
    return {".lora_up.weight": 0.1 * draw(rows, rank, 1, 1), ".lora_down.weight": 0.1 * draw(rank, columns[0], 1, 1),
            ".lora_mid.weight": draw(rank, rank, *columns[1:])}


def _loha(draw, rows, *columns, rank=4):
    columns = torch.Size(columns).numel()
    return {".hada_w1_a": 0.3 * draw(rows, rank), ".hada_w1_b": 0.3 * draw(rank, columns),
            ".hada_w2_a": 0.3 * draw(rows, rank), ".hada_w2_b": 0.3 * draw(rank, columns), ".alpha": torch.tensor(2.0)}


def _lokr(draw, rows, *columns):
    columns = torch.Size(columns).numel()
    return {".lokr_w1": 0.2 * draw(2, 2), ".lokr_w2_a": 0.2 * draw(rows // 2, 4),
            ".lokr_w2_b": 0.2 * draw(4, columns // 2), ".alpha": torch.tensor(2.0)}


def _glora(draw, rows, columns, rank=4):
    return {".a1.weight": 0.1 * draw(columns, rank), ".a2.weight": 0.1 * draw(rank, columns),
            ".b1.weight": 0.1 * draw(rows, rank), ".b2.weight": 0.1 * draw(rank, columns), ".alpha": torch.tensor(2.0)}


def _oft(draw, rows, *columns, size=4):
    return {".oft_blocks": 0.1 * draw(rows // size, size, size), ".alpha": torch.tensor(1.0)}


def _boft(draw, rows, *columns, size=4, factors=2):
    return {".oft_blocks": 0.1 * draw(factors, rows // size, size, size), ".alpha": torch.tensor(1.0)}
