"""Import a checkpoint in this process, and compare what was imported; make rows for a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from engine_bench import VOCABULARY
from safetensors.torch import load_file

from offload_trainer.checkpoint import read_manifest
from offload_trainer.run.commands.import_checkpoint import Imported, import_checkpoint
from offload_trainer.settings import load_config

LENGTH = 24  # tokens of a row
KINDS = ("master", "exp_avg", "exp_avg_sq")
State = dict[str, dict[str, torch.Tensor]]  # kind -> name -> tensor


def imported(source: Path, run: Path, *words: str, notes: list[str] | None = None) -> Imported:
    """Import `source` as the command with `words` does; check the manifest of what it wrote."""
    config = load_config(list(words))
    done = import_checkpoint(source, run, config, say=(notes if notes is not None else []).append)
    read_manifest(done.checkpoint)
    return done


def state_of(checkpoint: Path) -> State:
    return {kind: load_file(checkpoint / f"{kind}.safetensors") for kind in KINDS}


def assert_same_state(found: State, expected: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Assert that both have the same names and bit-identical tensors, none of them all zeros."""
    for kind in KINDS:
        assert found[kind].keys() == expected[kind].keys(), kind
        for name, tensor in expected[kind].items():
            assert torch.equal(found[kind][name], tensor), (kind, name)
        assert any(tensor.any() for tensor in expected[kind].values())


def _row() -> torch.Tensor:
    tokens = [7]
    for _ in range(LENGTH):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return torch.tensor(tokens)


def same_rows() -> list[dict[str, torch.Tensor]]:
    """Return rows for a Trainer, which are all the same, so that their order changes nothing."""
    labels = _row()
    labels[0] = -100  # for some models a Trainer counts it as a target, and no token is before it
    return [{"input_ids": _row(), "labels": labels} for _ in range(4)]
