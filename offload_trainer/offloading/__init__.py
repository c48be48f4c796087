"""Place a model's weights, gradients and optimizer state on the device, in RAM or on drives, and train it from there.

    model.py         `OffloadedModel`: connects everything below; engines and sessions train through it
    allocation.py    `EngineParts`, and the storage, gradient sums and update progress that it describes
    weights/         16-bit weights: storage, prefetch to the device, parameters that fetch their values
    gradients/       collect, accumulate and measure gradients
    update/          the optimizer update of all pages, overlapped with drives, the forward or the backward
    pages/           optimizer state in RAM and in files
    ranks/           the same work shared by several ranks

docs/design.md defines unit, page, piece and tier. A master is the copy of a weight in the optimizer state, which the
update changes and the weight is rounded from.
"""
