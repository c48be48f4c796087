"""Place a model's weights, gradients and optimizer state on the device, in RAM or on drives, and train it from there.

    model.py         `OffloadedModel`: connects everything below; engines and sessions train through it
    allocation.py    `EngineParts`, and the storage, gradient sums and update progress that it describes
    weights/         16-bit weights: storage, prefetch to the device, parameters that fetch their values
    gradients/       collect, accumulate and measure gradients
    update/          the optimizer update of all pages, overlapped with drives, the forward or the backward
    pages/           optimizer state in RAM and in files
    ranks/           the same work shared by several ranks

Terms:

    unit     a group of weights that is fetched to the device together: a block, a part of a block, or a module outside
             the blocks. Its weights are concatenated in one flat tensor, the trainable ones first.
    page     a range of one unit's trainable weights whose optimizer state (masters and moments) is read, updated and
             written together. Pages of a unit may be in different tiers.
    piece    a range of a tensor that is copied, sent, summed or written at a time, and has no meaning beyond that.
    tier     where data is stored: the device, RAM, or one of the drives (`plan/tiers.py`). The home of a page or a unit
             is the number of its tier.
    master   the copy of a weight in the optimizer state, which the update changes and the weight is rounded from.
    copy     a page on a drive may have two: the valid one and the one that the update writes (`pages/store.py`).
"""
