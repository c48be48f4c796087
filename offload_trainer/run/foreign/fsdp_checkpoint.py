"""Read what accelerate saves of FSDP, also in a checkpoint directory of transformers' Trainer.

    pytorch_model_fsdp_0/  optimizer_0/         SHARDED_STATE_DICT: two directories of torch.distributed.checkpoint
    pytorch_model_fsdp.bin  optimizer.bin       FULL_STATE_DICT: weights, and the optimizer's state by name

FSDP1 and FSDP2 write the same files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from offload_trainer.errors import UserError
from offload_trainer.run.foreign.distributed_checkpoint import opened_distributed
from offload_trainer.run.foreign.pickles import load_pickle
from offload_trainer.run.foreign.state import ForeignState, adam_settings
from offload_trainer.safe_files import is_there

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"
_WANTED = {"step", "exp_avg", "exp_avg_sq"}


def is_of_fsdp(source: Path) -> bool:
    """Return whether `source` holds weights that FSDP has saved."""
    return any(source.glob(f"{_MODEL}*"))


@contextmanager
def opened_fsdp(source: Path) -> Iterator[ForeignState]:
    """Open the weights and the optimizer's state in `source`.

    Raises UserError for files of single ranks, missing files, and another optimizer.
    """
    told = f"{source} (FSDP)"
    weights, optimizer = source / f"{_MODEL}_0", source / f"{_OPTIMIZER}_0"
    if weights.is_dir():
        if not optimizer.is_dir():
            raise UserError(f"{told}: there is no {optimizer.name}, which holds the moments")
        with opened_distributed(weights, optimizer, told=told) as state:
            yield state
        return
    weights, optimizer = source / f"{_MODEL}.bin", source / f"{_OPTIMIZER}.bin"
    if not is_there(weights):
        found = sorted(path.name for path in source.glob(f"{_MODEL}*"))
        raise UserError(
            f"{told}: {found[0]} holds parts of one rank, which are not read: save with fsdp_state_dict_type="
            "SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    yield _whole(load_pickle(weights), load_pickle(optimizer), told=told)


def _whole(weights: Any, optimizer: Any, *, told: str) -> ForeignState:
    """Return the state of a whole model and a whole optimizer, both by name."""
    state = optimizer.get("state") if isinstance(optimizer, Mapping) else None
    if not isinstance(weights, Mapping) or not isinstance(state, Mapping) or not state:
        raise UserError(f"{told}: {_MODEL}.bin or {_OPTIMIZER}.bin is not a state_dict by name")
    for name, its in state.items():
        held = set(its) if isinstance(its, Mapping) else set()
        if name not in weights or held != _WANTED:
            raise UserError(
                f"{told}: its optimizer is neither torch's Adam nor its AdamW, or of other weights: {name} has "
                f"{', '.join(sorted(map(str, held))) or 'no state'}, expected {', '.join(sorted(_WANTED))}"
            )
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items() if isinstance(tensor, torch.Tensor)}
    return ForeignState(
        told=told,
        step=max(int(its["step"]) for its in state.values()),
        trained={name: shapes[name] for name in state},
        fixed={name: shape for name, shape in shapes.items() if name not in state},
        updates=lambda name: int(state[name]["step"]),
        read=lambda name, kind: weights[name] if kind == "master" else state[name][kind],
        read_fixed=lambda name: weights[name],
        settings=adam_settings(optimizer["param_groups"], told=told),
    )
