"""Place a model's weights, gradients and optimizer state on the device, in RAM or on drives, and train it from there.

`model.py` connects all other modules. docs/design.md defines unit, page, piece and tier. A master is the copy of a
weight in the optimizer state, which the update changes and the weight is rounded from.
"""
