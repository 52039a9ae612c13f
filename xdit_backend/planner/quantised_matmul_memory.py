"""Temporary memory of layers with packed weights: unpacked weights, rounded inputs, and intermediates of
comfy-kitchen's matrix multiplications. Arithmetic only; tests/unit/tools/dry_run/test_types.py allows 5 % of error."""

import math
from dataclasses import dataclass

WIDENING = 2.0                 # at the start of an up-projection: its input, and the tensor that it was made from
# bytes in eager 4-bit products: per input element while it is rotated, rounded and unpacked; per rounded input element
# while the weight is unpacked; per weight element
UNPACKED_INPUT, ROUNDED_INPUT, UNPACKED_WEIGHT = 13.5, 4.5, 11.0
UNGROUPED_WEIGHT = 15.0        # bytes per weight element while 8-bit numbers are made of 4-bit ones and group scales
# bytes in eager 8-bit products: per input element while it is rounded; per int32 sum; per result; and of the sums
# scaled at a time
ROUNDING, SUM, RESULT, CHUNK_BYTES = 3.0, 4.0, 2.0, 2 ** 28


@dataclass(frozen=True, order=True)
class Product:
    """A product with a block's weight stored in a ComfyUI format. columns, rows: of the weight. with_text: whether
    image and text tokens are its input together. input_bytes: per rounded input element. rotated: whether inputs are
    rotated first. row_scales: whether each row of the weight has a scale."""

    columns: int
    rows: int
    with_text: bool
    format: str
    input_bytes: float = 1.0
    rotated: bool = False
    row_scales: bool = False


def most_in_layers(dims, footprint, tokens, text, most, tensor, has_lora):
    """Peak memory in layers with packed weights. In an up-projection, the other live tensors are those that tensor
    parallelism does not shard.

    footprint: memory_model.ActivationFootprint. tokens, text: of a rank, over all images. most: peak in other layers.
    tensor: degree. has_lora: whether a LoRA is applied to packed weights.
    """
    numbers = (tokens + text) * dims.width
    narrow_bytes, wide_bytes = dims.lora_unpack_bytes if has_lora else (dims.unpack_bytes, 0.0)
    narrow = footprint.narrowing * most
    found = [most + dims.rounded_bytes * numbers, narrow + narrow_bytes / tensor,
             WIDENING * dims.element_bytes * numbers + wide_bytes / tensor]

    def there(product):
        return tokens + (text if product.with_text else 0)

    # the result coexists with the rounded inputs
    found += [narrow + there(product) * (product.input_bytes * product.columns / tensor
                                    + dims.element_bytes * product.rows)
              for product in dims.rounded_products]
    for product in dims.eager_products:
        narrows = product.rows <= product.columns
        # ranks agree on scales there: kitchen_layers.py computes the product
        if product.format == "int8_tensorwise" and narrows and tensor > 1:
            continue
        inside = {"int8_tensorwise": _in_8_bits, "asym_w4a8_int8": _with_groups}.get(product.format, _in_4_bits)
        others = narrow if narrows else footprint.residual * dims.element_bytes * numbers
        found.append(others + inside(product, there(product), 1 if narrows else tensor))
    return max(found)


def _in_4_bits(product, tokens, _):
    inputs = tokens * product.columns
    return max(UNPACKED_INPUT * inputs, ROUNDED_INPUT * inputs + UNPACKED_WEIGHT * product.columns * product.rows)


def _with_groups(product, tokens, tensor):
    """The weight in 8 bits, which is unpacked from groups, coexists with its product."""
    weight = product.columns * product.rows / tensor
    return max(UNGROUPED_WEIGHT * weight, weight + _in_8_bits(product, tokens, tensor))


def _in_8_bits(product, tokens, tensor):
    """Memory of comfy_kitchen.backends.eager.quantization.int8_linear, with a tensor rank's rows."""
    inputs, results = tokens * product.columns, tokens * product.rows / tensor
    # of sums: the chunk itself, and the scales by which it is multiplied
    chunk, times = min(SUM * results, CHUNK_BYTES), 1 + product.row_scales
    before = RESULT * (results - chunk / SUM)                  # results of earlier chunks
    last = SUM * results - chunk * (math.ceil(SUM * results / chunk) - 1)
    scaled = SUM * results + max((times + 1 + RESULT / SUM) * chunk + before, times * last + 2 * RESULT * results)
    summed = SUM * results + product.columns * product.rows / tensor           # a transposed copy of the weight
    return (2.0 * inputs if product.rotated else 0.0) + max(ROUNDING * inputs, inputs + max(summed, scaled))
