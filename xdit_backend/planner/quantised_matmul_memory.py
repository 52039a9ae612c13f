"""Bytes that live while a layer with packed weights runs: what is unpacked of them, inputs that are rounded, and what
comfy-kitchen's products take inside. Pure arithmetic, for memory_model.py; tests/unit/tools/dry_run/test_types.py holds
it to 5 %."""

import math
from dataclasses import dataclass

WIDENING = 2.0                 # where a layer begins that widens tokens: what it reads, and what that is made of
# bytes in 4-bit products without kernels: of a number that is multiplied, rotated and rounded, while it is unpacked and
# while the weight is; and of a number of the weight
UNPACKED_INPUT, ROUNDED_INPUT, UNPACKED_WEIGHT = 13.5, 4.5, 11.0
# in 8-bit products without kernels: bytes of a number of the inputs while it is rounded; of one of the sums, in 32
# bits; of one of the result; and bytes of the sums that are scaled at a time
ROUNDING, SUM, RESULT, CHUNK_BYTES = 3.0, 4.0, 2.0, 2 ** 28


@dataclass(frozen=True, order=True)
class Product:
    """A product with a weight of a block that is held in a format of ComfyUI's. columns, rows: of the weight.
    with_text: do image and text pass it as one? input_bytes: of a rounded number of its inputs. rotated: are they
    rotated before? row_scales: has each row of the weight a scale?"""

    columns: int
    rows: int
    with_text: bool
    format: str
    input_bytes: float = 1.0
    rotated: bool = False
    row_scales: bool = False


def most_in_layers(dims, footprint, tokens, text, most, tensor, has_lora):
    """The most that lives in a layer with packed weights. Of a layer that widens tokens, what lives beside it is what
    tensor parallelism does not divide.

    live: memory_model.ActivationFootprint. tokens, text: that a rank has, of all images. most: what lives else. tensor:
    degree. has_lora: is one added to packed weights?
    """
    numbers = (tokens + text) * dims.width
    narrow_bytes, wide_bytes = dims.lora_unpack_bytes if has_lora else (dims.unpack_bytes, 0.0)
    narrow = footprint.narrowing * most
    found = [most + dims.rounded_bytes * numbers, narrow + narrow_bytes / tensor,
             WIDENING * dims.element_bytes * numbers + wide_bytes / tensor]

    def there(product):
        return tokens + (text if product.with_text else 0)

    # the result is there beside rounded inputs
    found += [narrow + there(product) * (product.input_bytes * product.columns / tensor
                                    + dims.element_bytes * product.rows)
              for product in dims.rounded_products]
    for product in dims.eager_products:
        narrows = product.rows <= product.columns
        # of ranks that agree: kitchen_layers.py's own
        if product.format == "int8_tensorwise" and narrows and tensor > 1:
            continue
        inside = _in_8_bits if product.format == "int8_tensorwise" else _in_4_bits
        beside = narrow if narrows else footprint.residual * dims.element_bytes * numbers
        found.append(beside + inside(product, there(product), 1 if narrows else tensor))
    return max(found)


def _in_4_bits(product, tokens, _):
    inputs = tokens * product.columns
    return max(UNPACKED_INPUT * inputs, ROUNDED_INPUT * inputs + UNPACKED_WEIGHT * product.columns * product.rows)


def _in_8_bits(product, tokens, tensor):
    """comfy_kitchen.backends.eager.quantization.int8_linear's, with the rows of a tensor rank."""
    inputs, results = tokens * product.columns, tokens * product.rows / tensor
    # of sums: as they are, and what they are scaled by
    chunk, times = min(SUM * results, CHUNK_BYTES), 1 + product.row_scales
    before = RESULT * (results - chunk / SUM)                  # results of chunks before
    last = SUM * results - chunk * (math.ceil(SUM * results / chunk) - 1)
    scaled = SUM * results + max((times + 1 + RESULT / SUM) * chunk + before, times * last + 2 * RESULT * results)
    summed = SUM * results + product.columns * product.rows / tensor           # a copy of the weight in its other order
    return (2.0 * inputs if product.rotated else 0.0) + max(ROUNDING * inputs, inputs + max(summed, scaled))
