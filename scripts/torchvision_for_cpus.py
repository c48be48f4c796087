"""Import PyPI's torchvision, which is built for CUDA, although torch is built for CPUs; do nothing without torchvision.

Its compiled operators do not load then, and two registrations fail without them. Their schemas are declared here, so
that torchvision can be imported. Nothing that calls an operator works; transforms, which need none, do.
"""

from __future__ import annotations

import importlib

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

try:
    importlib.import_module("torchvision")
except ModuleNotFoundError:
    pass
except RuntimeError as error:
    if "torchvision::" not in str(error):
        raise
    _library = torch.library.Library("torchvision", "DEF")  # declared until this object is deleted
    for _schema in _SCHEMAS:
        _library.define(_schema)
    importlib.import_module("torchvision")
