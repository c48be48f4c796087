"""Compare several ranks with one rank: the same bits in every placement, and the same drive bytes.

    python soak/ranks_matrix.py FOLDER [--worlds 2 3 4] [--steps 20] [--only WORD ...] [--models gpt2 ...]

Small tied and untied models run in bf16 and fp32, with weights on the device, in RAM and on a drive (then with
gradients there too), and with none, half or all of the state in RAM. With half of the state in RAM, the update overlaps
the forward, and block inputs are on the drive if the weights are. 2 ranks have two micro-batches each, 3 and 4 have
one. Losses, norms, masters and moments must match, bit for bit, one rank with the same micro-batches and everything in
RAM.

Drive bytes must be those of one rank with the micro-batches of each rank. Exceptions are half of the state, which each
rank rounds up to 4096 elements, block inputs, which each rank has, and 16-bit sums of a single micro-batch. One line is
printed for each case; the exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/helpers"))

from engine_bench import model_directory
from forked_ranks import Case, run_ranks

MICRO = {2: 4, 3: 3, 4: 4}  # micro-batches of a step, over all ranks
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
SHAPES = {
    "gpt2": {"n_layer": 3, **DROPOUT},
    "qwen3": {"num_hidden_layers": 3},
    "mixtral": {},
    "opt": {},  # It drops random blocks, different ones in each micro-batch, so its ranks never need the same.
}
KINDS = [("gpt2", True), ("gpt2", False), ("qwen3", True), ("qwen3", False), ("mixtral", False), ("opt", True)]
AWAY = ("placement.gradients=nvme",)
INPUTS = ("model.activation_checkpointing=on", "model.offload_activations=nvme")
WEIGHTS = {"gpu": (), "cpu": (), "nvme": AWAY}
IN_RAM = ("--params", "cpu", "--ram-fraction", "1")
LONG = 7200  # seconds


def cases(folder: Path, *, steps: int, models: list[str], only: list[str]) -> dict[str, Case]:
    """Return the cases by name; `only` selects names that contain all of these words."""
    made = {}
    drive = folder / "drive"
    drive.mkdir()
    kinds = [kind for kind in KINDS if kind[0] in models]
    for (model, tied), dtype, home, share in itertools.product(kinds, ("bf16", "fp32"), WEIGHTS, (0, 0.5, 1)):
        name = f"{model}-{'tied' if tied else 'untied'}-{dtype}-{home}-{share:g}"
        if not all(word in name.split("-") for word in only):
            continue
        directory = model_directory(folder / "models" / f"{model}-{tied}", model, tied=tied, **SHAPES[model])
        state = ("--optimizer", "nvme", "--ram-fraction", str(share)) if share < 1 else ("--optimizer", "cpu")
        behind = ("tiered.overlap=forward", *(INPUTS if home == "nvme" else ())) if share == 0.5 else ()
        words = ("--params", home, "--dtype", dtype, *state, *WEIGHTS[home], *behind)
        made[name] = Case(str(directory), words, "", steps=steps, drives=(str(drive),))
    return made


def by(ranks: int, case: Case, *, micro: int, out: Path) -> Case:
    return replace(case, words=(*case.words, "--accumulate", str(micro // ranks)), micro=micro, out=str(out))


def references(wanted: Mapping[str, Case], micro: int, folder: Path) -> dict[str, Case]:
    """Return one rank's cases with everything in RAM, shared by cases with the same model and dtype."""
    made = {}
    for name, case in wanted.items():
        model, tied, dtype, *_ = name.split("-")
        bare = replace(case, words=(*IN_RAM, "--dtype", dtype), drives=())
        made[name] = by(1, bare, micro=micro, out=folder / f"of-{micro}" / f"{model}-{tied}-{dtype}")
    return made


def run_once(found: list[Case], *, count: int, folder: Path) -> None:
    run_ranks(list({case.out: case for case in found}.values()), count=count, folder=folder, seconds=LONG)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--worlds", type=int, nargs="+", default=list(MICRO))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--models", nargs="+", default=list(SHAPES))
    parser.add_argument("--only", nargs="*", default=[])
    told = parser.parse_args()
    folder, start = told.folder.absolute(), time.monotonic()
    folder.mkdir(parents=True)
    wanted = cases(folder, steps=told.steps, models=told.models, only=told.only)
    wrong = checked = 0
    for world in told.worlds:
        micro = MICRO[world]
        right = references(wanted, micro, folder)
        each = micro // world
        moved = {name: by(1, case, micro=each, out=folder / f"each-{each}" / name) for name, case in wanted.items()}
        missing = [case for case in (*right.values(), *moved.values()) if not Path(case.out).exists()]
        if missing:
            run_once(missing, count=1, folder=folder / f"one-{world}")
        several = {name: by(world, case, micro=micro, out=folder / f"{world}" / name) for name, case in wanted.items()}
        run_once(list(several.values()), count=world, folder=folder / f"ranks-{world}")
        for name, made in several.items():
            bits, drives, one = made.left == right[name].left, made.moved, moved[name].moved
            wider = each == 1 and "bf16-nvme" in name
            bytes_too = drives == one or wider or name.endswith("0.5") or name.startswith("opt")
            wrong += not (bits and bytes_too)
            checked += 1
            said = "bits equal" if bits else "BITS DIFFER"
            print(f"{world} ranks {name}: {said}, drives {drives}, of one {one}{'' if bytes_too else ' DIFFERS'}")
        print(f"after {time.monotonic() - start:.0f} s", flush=True)
    print(f"{wrong} of {checked} differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
