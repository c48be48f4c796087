"""Activations, products and the plan's note of the parts of a model that only images pass through.

A plan is made before it sees an image, and architectures differ in their image inputs, so these parts are not run on
meta tensors. Their memory is estimated from the widths of their matrix products, for a number of patches in each row.
Pure arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import replace

from offload_trainer.plan.shape import KEPT, Growth, ModelShape, Part, Weight
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes

# At the peak of its backward, the largest block needs this share of what it keeps in addition, as in `estimated`.
_MORE_IN_BACKWARD = 0.3


def with_rate(shape: ModelShape, seq_len: int) -> ModelShape:
    """Return the shape with products and attention of the parts for images per token of a row of `seq_len` tokens."""
    images = shape.images
    if images is None or not images.units:
        return shape
    rate = images.patches(seq_len) / seq_len
    if rate == images.rate:
        return shape
    change, inside = rate / images.rate, set(images.units)
    weights = tuple(replace(w, products=w.products * change) if w.unit in inside else w for w in shape.weights)
    attention = tuple(
        # Each patch attends to all patches of the row, and the planner multiplies by the tokens of a row.
        round(width * change**2) if block in inside else width
        for block, width in zip(shape.blocks, shape.attention, strict=False)
    )
    return replace(shape, weights=weights, attention=attention, images=replace(images, rate=rate))


def image_part(work: Workload) -> Part:
    """Return the memory of the parts for images, and of the images' features among the embeddings of a row.

    Nothing is kept before the first trained weight. From there on a block keeps its input if it is checkpointed, and
    otherwise `KEPT` times the inputs and outputs of its products, as in `estimated`. Every patch attends to all patches
    of its row. Moments include what is kept.
    """
    shape, images, e = work.shape, work.shape.images, work.item_bytes
    assert images is not None
    patches = images.patches(work.seq_len)
    # Some towers pack the images of all rows into one row, with a mask between them (Pixtral).
    mask = e * work.micro_batch * patches**2 if images.masked and images.units else 0
    of_unit = shape.by_unit()
    kept, largest, gradient, frozen = 0.0, 0.0, 0, images.frozen(shape.weights)
    has_backward = len(frozen) < len(images.units)
    checkpointed = set(images.layers) if work.checkpointing else set()
    for unit in images.units:
        weights = of_unit[unit]
        whole = KEPT * e * sum(map(_width, weights))
        if any(weight.block for weight in weights):  # scores in the run's dtype, and their softmax in fp32 too
            whole += (2 * e + 4) * images.eager_heads * patches
        largest = max(largest, whole)
        if unit not in frozen:
            kept += e * images.hidden if unit in checkpointed else whole
            gradient = max([gradient, *(e * weight.numel for weight in weights if weight.trainable)])
    # The features and the embeddings that they replace, and a mask over the tokens with a copy in the run's dtype.
    features = Growth(token=2 * e * shape.hidden, pair=1 + e)
    again = (1 + _MORE_IN_BACKWARD if checkpointed else _MORE_IN_BACKWARD) * largest
    return Part(
        kept=Growth(row=patches * kept + mask * has_backward) + features,
        forward=(Growth(row=patches * (kept + largest) + mask) + features,),
        backward=(Growth(fixed=gradient, row=patches * (kept + again) + mask) + features,) if has_backward else (),
    )


def without_frozen(shape: ModelShape) -> ModelShape:
    """Return the shape without the parts for images that activation checkpointing does not recompute."""
    return shape.without(shape.images.frozen(shape.weights)) if shape.images else shape


def _width(weight: Weight) -> float:
    """Return the inputs and outputs per patch of the product with this weight; 0 for a weight without a product."""
    if not weight.products:
        return 0.0
    if len(weight.shape) > 3:  # a convolution over patches, which do not overlap
        return float(weight.shape[0] + math.prod(weight.shape[1:]))
    return float(sum(weight.shape[-2:]) * math.prod(weight.shape[:-2]))


def image_note(work: Workload) -> str:
    """Return the sentence of a plan on what it counts for images."""
    images = work.shape.images
    assert images is not None
    if not images.units:
        return "images: no part of this model is known to be for images alone, so they count as tokens of a row only"
    part = image_part(work)
    kept = format_bytes(part.kept.at(work.micro_batch, work.seq_len))
    most = format_bytes(max(moment.at(work.micro_batch, work.seq_len) for moment in (*part.forward, *part.backward)))
    return (
        f"images: {images.patches(work.seq_len)} patches a row are counted, {images.why}; their activations "
        f"take {most} and keep {kept} until the backward, estimated from the widths of matrix products. "
        "Another number: image_patches=N"
    )
