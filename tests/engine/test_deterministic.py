"""Test of what a GPU needs to repeat its bits."""

import os
from unittest.mock import MagicMock

import pytest
import torch

from offload_trainer.run import train as train_module
from offload_trainer.run.process_setup import prepare_process
from offload_trainer.settings import load_config


@pytest.mark.parametrize("words", [["train.deterministic=true"], []])
def test_a_gpu_repeats_its_bits_with_train_deterministic(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS is configured before CUDA starts, and torch before anything is built."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    # It would ask the GPU for its name.
    monkeypatch.setattr(train_module.checks, "refuse_other_programs", lambda _: None)
    monkeypatch.setattr(train_module, "plan_run", MagicMock(side_effect=LookupError("at the plan")))
    before, config = torch.get_num_threads(), load_config(words)
    torch.use_deterministic_algorithms(False)
    try:
        prepare_process(config)
        with pytest.raises(LookupError, match="at the plan"):
            train_module.train_run(config)
        # An error, since with a warning torch leaves fused attention's backward as it is.
        assert torch.get_deterministic_debug_mode() == (2 if words else 0)
        assert torch.utils.deterministic.fill_uninitialized_memory != bool(words)  # type: ignore[attr-defined]
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (":4096:8" if words else None)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.set_num_threads(before)
