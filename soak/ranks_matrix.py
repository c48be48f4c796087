"""Ranks against one rank: the same bits wherever things live, and the drive bytes of one.

    python soak/ranks_matrix.py FOLDER [--worlds 2 3 4] [--steps 20] [--only WORD ...]

Small models, tied and untied, weights on the device, in RAM and on a drive (sums and inputs of blocks there too),
shares of the state in RAM, dtypes: each case is trained by one rank and by as many ranks as `--worlds` says, with the
same micro-batches. Losses, norms, masters and moments must be equal to the last bit. Drive bytes must be those of one
rank with as many micro-batches as each of the ranks has, but for inputs of blocks, which each rank has for itself.
Prints a line a case, and ends with 1 where anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from bench_of_engines import model_directory
from ranked import Case, run_ranks

MICRO = 12  # micro-batches of a step: 1, 2, 3 and 4 ranks divide it
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
MODELS = [
    ("gpt2", True),
    ("gpt2", False),
    ("qwen3", True),
    ("qwen3", False),
    ("mixtral", False),
    ("opt", True),
]  # OPT leaves out blocks at random, in each micro-batch others
AWAY = ("placement.gradients=nvme", "model.checkpointing=on", "model.offload_activations=nvme")
WEIGHTS = {"gpu": (), "cpu": (), "nvme": AWAY}


def cases(folder: Path, *, steps: int, only: list[str]) -> dict[str, Case]:
    """By name; `only` those whose name has all of these words."""
    made = {}
    drive = folder / "drive"
    drive.mkdir(exist_ok=True)
    for (model, tied), dtype, home, share in itertools.product(MODELS, ("bf16", "fp32"), WEIGHTS, (0, 0.5, 1)):
        name = f"{model}-{'tied' if tied else 'untied'}-{dtype}-{home}-{share:g}"
        if not all(word in name.split("-") for word in only):
            continue
        directory = folder / "models" / f"{model}-{tied}"
        model_directory(directory, model, tied=tied, **(DROPOUT if model == "gpt2" else {}))
        state = ("--optimizer", "nvme", "--ram-fraction", str(share)) if share < 1 else ("--optimizer", "cpu")
        words = ("--params", home, "--dtype", dtype, *state, *WEIGHTS[home])
        made[name] = Case(str(directory), words, "", steps=steps, micro=MICRO, drives=(str(drive),))
    return made


def by(ranks: int, case: Case, *, micro: int, out: Path) -> Case:
    return replace(case, words=(*case.words, "--accumulate", str(micro // ranks)), micro=micro, out=str(out))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[])
    told = parser.parse_args()
    folder, start = told.folder.absolute(), time.monotonic()
    folder.mkdir(parents=True)
    wanted = cases(folder, steps=told.steps, only=told.only)
    alone = {name: by(1, case, micro=MICRO, out=folder / "1" / name) for name, case in wanted.items()}
    run_ranks(list(alone.values()), count=1, folder=folder / "one")
    print(f"{len(wanted)} cases by one rank after {time.monotonic() - start:.0f} s", flush=True)
    wrong = 0
    for world in told.worlds:
        several = {name: by(world, case, micro=MICRO, out=folder / f"{world}" / name) for name, case in wanted.items()}
        run_ranks(list(several.values()), count=world, folder=folder / f"ranks-{world}")
        fewer = {
            name: by(1, case, micro=MICRO // world, out=folder / f"1-{world}" / name) for name, case in wanted.items()
        }
        run_ranks(list(fewer.values()), count=1, folder=folder / f"one-{world}")
        for name in wanted:
            same = several[name].left == alone[name].left
            moved, expected = several[name].moved, fewer[name].moved
            wrong += not same
            print(f"{world} ranks {name}: {'bits equal' if same else 'DIFFERS'}, drives {moved}, of one {expected}")
        print(f"after {time.monotonic() - start:.0f} s", flush=True)
    print(f"{wrong} of {len(wanted) * len(told.worlds)} differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
