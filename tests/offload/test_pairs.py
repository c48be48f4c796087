"""Test that neither placement nor schedule changes a bit, on tables in which every pair of values occurs."""

from collections import Counter
from functools import partial
from itertools import combinations, count, product
from pathlib import Path
from typing import Any

import pytest
from engine_bench import DROPOUT, ON_GPU, assert_same, batches, engine, masters, model_directory, plain, train
from late_transfers import late_engine
from placements import CLIP, HOMES, OFF, ON

pytestmark = pytest.mark.usefixtures("nothing_is_small", "always", "slow_pages")

Cell = tuple[str, str]  # column and value

STEPS = 3
UNTIED, IN_8_BITS, UNCLIPPED = DROPOUT | {"tied": False}, "optim.moment_dtype=8bit", "optim.max_grad_norm=1000"
# Architecture, changes to its shape, words, micro-batches of a step.
SETTINGS: dict[str, tuple[str, dict[str, Any], list[str], int]] = {
    "gpt2, bf16": ("gpt2", DROPOUT, [CLIP], 1),
    "gpt2, fp16, bf16 moments": ("gpt2", DROPOUT, ["--dtype", "fp16", "optim.moment_dtype=bf16"], 1),
    "gpt2, untied, fp32, 8-bit moments": ("gpt2", UNTIED, ["--dtype", "fp32", IN_8_BITS, UNCLIPPED], 3),
    "gpt2, bf16 masters, 8-bit moments": ("gpt2", DROPOUT, ["optim.master_dtype=bf16", IN_8_BITS, CLIP], 3),
    # The first block that is trained gets inputs that need no gradient.
    "gpt2, some frozen": ("gpt2", DROPOUT, ['model.freeze=["wte","wpe","h.0.","h.1.mlp"]', CLIP], 3),
    "qwen3, tied": ("qwen3", {}, [], 3),
    "mixtral, some experts unused": ("mixtral", {"tied": False, "output_router_logits": True}, [], 2),
    "opt, layers are dropped": ("opt", {}, ["--dtype", "fp32", "optim.max_grad_norm=0"], 1),
}
WIDE = {"n_embd": 1024, "n_head": 16, "vocab_size": 8192}  # 46 M parameters
if ON_GPU:  # transfers take as long as the steps' kernels
    SETTINGS["gpt2, wide"] = ("gpt2", DROPOUT | WIDE, ["tiered.page_size=1048576", UNCLIPPED], 2)
BREADTH = [ON, "tiered.micro_batch_order=breadth_first", "tiered.weight_buffers=1"]
BLOCKS = {
    "kept": [OFF],
    "computed again": [ON],
    "computed again, in one buffer": [ON, "tiered.weight_buffers=1"],
    "inputs in RAM": [ON, "model.offload_activations=true"],
    "two inputs in RAM": ["model.activation_checkpointing=2", "model.offload_activations=true"],
    "breadth-first": BREADTH,
    "breadth-first, added on the device": BREADTH,
}
COLUMNS = {
    "home": [*HOMES],
    "schedule": ["off", "forward", "backward", "backward, with shadow memory"],
    "setting": [*SETTINGS],
    "blocks": [*BLOCKS],
    "transfers": ["at once", "late"],
}
IMPOSSIBLE = [
    {"breadth-first", "opt, layers are dropped"},
    {"breadth-first, added on the device", "opt, layers are dropped"},
    {"two inputs in RAM", "opt, layers are dropped"},  # both checkpoint all blocks or none
    {"two inputs in RAM", "gpt2, some frozen"},
    *({"backward, with shadow memory", home} for home in HOMES if home in ("nothing in RAM", "all on the device")),
]


def rows() -> list[dict[str, str]]:
    """Return rows in which every possible pair occurs. The first ones have every pair of placement and schedule."""
    places = [[(name, value) for value in values] for name, values in COLUMNS.items()]
    pairs = (frozenset(pair) for columns in combinations(places, 2) for pair in product(*columns))
    missing = dict.fromkeys(pair for pair in pairs if {value for _, value in pair} not in IMPOSSIBLE)
    used: Counter[Cell] = Counter()
    found = []
    while missing:
        row = dict(next(iter(missing)))

        def gain(cell: Cell, row: dict[str, str] = row) -> tuple[int, int]:
            return sum(frozenset((cell, other)) in missing for other in row.items()), -used[cell]

        for cells in places:
            if (name := cells[0][0]) not in row:
                possible = [c for c in cells if all({c[1], value} not in IMPOSSIBLE for value in row.values())]
                row[name] = max(possible, key=gain)[1]
        used.update(row.items())
        found.append(row)
        for pair in combinations(row.items(), 2):
            missing.pop(frozenset(pair), None)
    return found


def of_row(row: dict[str, str], number: int) -> Any:
    """Return the row as a test's parameters; `make test` runs those with the pairs of placement and schedule."""
    quick = number < len(COLUMNS["home"]) * len(COLUMNS["schedule"]) - 2
    return pytest.param(row, id=", ".join(row[name] for name in COLUMNS), marks=() if quick else pytest.mark.slow)


# Rows with the same setting follow each other, so that few workers compute what both are compared with.
@pytest.mark.parametrize("row", sorted(map(of_row, rows(), count()), key=lambda row: row.values[0]["setting"]))
def test_no_pair_changes_a_bit(row: dict[str, str], folder: Path, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, blocks = row["setting"], BLOCKS[row["blocks"]]
    name, changes, words, accumulate = SETTINGS[setting]
    layers = 9 if "inputs" in row["blocks"] else 3  # more than there are buffers for inputs
    model = model_directory(folder / f"{setting}, {layers}", name, **{"n_layer": layers} | changes)
    stored = "moments" in setting  # they are rounded
    same = [word for word in blocks if ON_GPU and word.startswith("model.activation_checkpointing")]  # changes bits
    schedule, _, shadows = row["schedule"].partition(", ")
    always = [*words, "--accumulate", str(accumulate)]
    words = [*always, f"tiered.overlap={schedule}", *HOMES[row["home"]]]
    words += ["tiered.micro_batch_order=depth_first", *blocks]
    late = row["transfers"] == "late" and not ON_GPU  # on a CPU, late transfers emulate a GPU's
    drives = [drive / f"{number}" for number in range(3 if "three" in row["home"] else 1)]
    size = {"rows": 1, "length": 3} if "unused" in setting else {}
    reference: Any = {"reference": ("--ram-fraction", "1", "tiered.overlap=off")} if stored else {}
    steps, weights = plain(model, STEPS, *always, *same, accumulate=accumulate, **reference, **size)
    build = partial(late_engine, monkeypatch) if late else engine
    sums = 10**9 if "added" in row["blocks"] and accumulate > 1 else 0
    with build(model, *words, drives=drives, shadows=0.6 * bool(shadows), device_sums=sums) as ours:
        assert (ours._breadth_first is not None) == (blocks is BREADTH and accumulate > 1)
        assert train(ours, batches(STEPS * accumulate, **size), accumulate=accumulate) == steps
        assert_same(masters(ours), weights)


def test_every_pair_occurs() -> None:
    for one, other in combinations(COLUMNS, 2):
        given = {frozenset((row[one], row[other])) for row in rows()}
        wanted = set(map(frozenset, product(COLUMNS[one], COLUMNS[other]))) - set(map(frozenset, IMPOSSIBLE))
        assert given == wanted
