"""Count the activations of each small model once for all processes of a test run: that takes longer than its steps."""

import hashlib
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from transformers import PreTrainedModel

from offload_trainer.model import shape as model_shape
from offload_trainer.model.activations import count_activations

FOLDER = "TEST_RUN_COUNTS"  # variable that names the directory of the counts; conftest makes one for each test run
if FOLDER not in os.environ:  # a script that is no test
    os.environ[FOLDER] = (_own := TemporaryDirectory()).name


def counted_once(model: PreTrainedModel, names: Sequence[str], *, dtype: torch.dtype, **which: Any) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.train()
    trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    attention = model.config._attn_implementation
    key = (type(model), model.config.to_json_string(), attention, trained, tuple(names), dtype, str(which))
    file = Path(os.environ[FOLDER], hashlib.sha256(repr(key).encode()).hexdigest())
    if not file.exists():
        part = file.with_suffix(f".{os.getpid()}")
        part.write_bytes(pickle.dumps(count_activations(model, names, dtype=dtype, **which)))
        part.replace(file)
    return pickle.loads(file.read_bytes())


def cached_counts() -> Any:
    """Return a context in which `counted_once` counts."""
    return mock.patch.object(model_shape, "count_activations", counted_once)
