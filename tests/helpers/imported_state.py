"""Import a checkpoint in this process, and train on from what was imported; train with a Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from engine_bench import VOCABULARY, Step, engine, train
from safetensors.torch import load_file
from transformers import Trainer

from offload_trainer.checkpoint import read_manifest
from offload_trainer.data.rows import Batch, DataState
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


def continued(
    checkpoint: Path, model: Path, data: Sequence[Batch], *words: str, accumulate: int = 1, lr: float
) -> list[Step]:
    """Return (loss, norm) of the steps that an engine trains from the checkpoint."""
    with engine(model, "--dtype", "fp32", *words) as made:
        made.load(checkpoint)
        return train(made, data, accumulate=accumulate, lr=lr)


class Recording(Trainer):
    """A Trainer that keeps the loss of each micro-batch, divided by their number."""

    def __init__(self, *args: Any, **words: Any) -> None:
        super().__init__(*args, **words)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **words: Any) -> torch.Tensor:
        loss = super().training_step(*args, **words)
        self.losses.append(float(loss))
        return loss


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


def same_batch() -> Batch:
    """Return two of these rows as a batch of an engine."""
    return Batch(_row()[:-1].expand(2, -1), _row()[1:].expand(2, -1), state=DataState(0), seed=0)
