"""Run several ranks of stock DeepSpeed on the CPU, save DeepSpeed's own checkpoint, and train on.

zero_checkpoint(folder, words, ranks=2)     run `ranks` ranks in forks; FOLDER holds `model`, a directory with weights
zero_checkpoint_ranks.py FOLDER RANK RANKS WORDS...      run one of the ranks

After `BEFORE` steps the ranks write FOLDER/zero, DeepSpeed's checkpoint. Rank 0 writes FOLDER/state, the state by name
as the engine reads it from DeepSpeed's buffers; FOLDER/masters.safetensors, what DeepSpeed's zero_to_fp32 makes of
the checkpoint; and FOLDER/universal with DeepSpeed's converter. It prints the losses of `AFTER` further steps as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from commands import start
from engine_bench import batches, train
from run_stock_deepspeed import build
from safetensors.torch import save_file

from offload_trainer.engine.cpu_matmul import use_fp32_products
from offload_trainer.mesh import RUN
from offload_trainer.ranks import join, join_torch

BEFORE, AFTER, LR = 3, 3, 1e-2
TAG = f"global_step{BEFORE}"


def zero_checkpoint(folder: Path, *words: object, ranks: int) -> list[float]:
    """Run the ranks in forks; return the losses of the steps after the checkpoint."""
    said = [folder / f"said{rank}" for rank in range(ranks)]
    started = [
        start(__file__, folder, rank, ranks, *words, stdout=out, stderr=out, stock=True)
        for rank, out in enumerate(said)
    ]
    codes = [process.wait(300) for process in started]
    assert not any(codes), [out.read_text()[-3000:] for out in said]
    losses: list[float] = json.loads(said[0].read_text().splitlines()[-1])
    return losses


def convert(folder: Path) -> None:
    """Make a universal checkpoint with DeepSpeed's converter, in this process."""
    from deepspeed.checkpoint.ds_to_universal import main as to_universal

    to_universal(
        argparse.Namespace(
            input_folder=str(folder / "zero" / TAG),
            output_folder=str(folder / "universal" / TAG),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), *map(int, sys.argv[2:4])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), RUN: str(folder)}
    use_fp32_products(torch.bfloat16)  # A real run does the same.
    join()
    join_torch("gloo")
    engine = build(folder, ["--lr", str(LR), *sys.argv[4:]])
    data = batches((BEFORE + AFTER) * ranks)[rank::ranks]
    train(engine, data[:BEFORE], lr=LR)
    engine._engine.save_checkpoint(str(folder / "zero"), tag=TAG)
    (folder / "state").mkdir(exist_ok=True)
    engine.snapshot().write(folder / "state")
    if rank == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        whole = get_fp32_state_dict_from_zero_checkpoint(str(folder / "zero"), tag=TAG)
        names = {name.removeprefix("model."): tensor for name, tensor in whole.items() if name.startswith("model.")}
        save_file({name: tensor.contiguous().clone() for name, tensor in names.items()}, folder / "masters.safetensors")
        convert(folder)
    found = train(engine, data[BEFORE:], lr=LR)
    if rank == 0:
        print(json.dumps([loss for loss, _ in found]))


if __name__ == "__main__":
    main()
