"""Tests of every schedule of the update on every placement that it treats differently: the bits are plain torch's.

The update overlaps the next forward or this step's backward; then pages in RAM may have shadow memory for their old
bytes. Pages are updated slowly, and most backwards pause before their first block until every possible page is updated,
so that the outcome does not depend on timing. Tests with late copies and drives do not pause it.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_bench import (
    ON_GPU,
    REFERENCE,
    assert_same,
    batches,
    digest,
    engine,
    masters,
    model_directory,
    plain,
    saved,
    train,
)
from late_engines import engine_on_streams, late_engine
from test_overlap import AWAY, BEHIND, HOMES, gpt2
from test_speculative_update import CLIP, FULL, IN_LINE, ON_DRIVES, always, hold_up, kept  # noqa: F401  # fixtures

from offload_trainer.offloading.update.updater import Updater
from offload_trainer.optim import loss_scale

pytestmark = pytest.mark.usefixtures("nothing_is_small", "always", "_slow")

# Placement, overlap, and the share of the blocks' state in RAM that has shadow memory.
Row = tuple[list[str], str, float]
ROWS: dict[str, Row] = {
    **{
        f"forward, {home}": (HOMES[home], BEHIND, 0.0)
        for home in ("a third in RAM", "weights in RAM", "weights and gradients on the drive", "a part on the device")
    },
    "forward, state on the device": (HOMES["state on the device, weights on the drive"], BEHIND, 0.0),
    **{f"backward, {home}": (words, FULL, 0.0) for home, words in ON_DRIVES.items()},
    "shadows, all in RAM": (["--ram-fraction", "1"], FULL, 1.0),
    "shadows, a third in RAM": (["--ram-fraction", "0.3"], FULL, 0.5),
    "shadows, weights in RAM": (["--params", "cpu", "--ram-fraction", "1", "tiered.weight_buffers=2"], FULL, 1.0),
    "shadows, weights and gradients on the drive": ([*AWAY, "--ram-fraction", "1"], FULL, 0.6),
    "shadows, half of the state on the drive": ([*AWAY, "--ram-fraction", "0.5"], FULL, 1.0),
    "shadows, sums on the device": (["placement.gradients=gpu", "--ram-fraction", "0.6"], FULL, 0.5),
    "shadows, a part on the device": (["--gpu-fraction", "0.3", "--ram-fraction", "0.4"], FULL, 1.0),
}
SPECULATIVE = [name for name, row in ROWS.items() if row[1] == FULL]


@pytest.fixture
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow down each page's update."""
    update = Updater._update
    monkeypatch.setattr(Updater, "_update", lambda *given, **words: (time.sleep(0.0007), update(*given, **words))[1])


def one_in(count: int, model: Path, steps: int) -> float:
    """Return a limit that about one in `count` of the first steps exceeds."""
    norms = sorted((norm or 0.0 for _, norm in plain(model, steps, "optim.max_grad_norm=0")[0]), reverse=True)
    return norms[steps // count - 1] * 0.999


@pytest.mark.parametrize("name", SPECULATIVE)
def test_steps_match_plain_torch(
    name: str,
    folder: Path,
    drive: Path,
    kept: list[tuple[int, int]],  # noqa: F811
) -> None:
    """bf16 with dropout. About one in four steps is clipped: its early pages are discarded and updated again."""
    model, (home, how, shadows) = gpt2(folder), ROWS[name]
    limit = one_in(4, model, 12)
    clip = f"optim.max_grad_norm={limit}"
    expected, weights = plain(model, 12, clip)
    clipped = [norm is not None and norm > limit for _, norm in expected]
    assert 0 < sum(clipped) <= 6
    with engine(model, *home, clip, how, drives=[drive], shadows=shadows) as ours:
        hold_up(ours)
        assert train(ours, batches(12)) == expected
        assert_same(masters(ours), weights)
    assert [(counted, done > 0) for counted, done in kept] == [
        (0 if was else done, True) for was, (_, done) in zip(clipped, kept, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("forward, a part on the device", True),
        ("backward, weights and gradients on the drive", False),
        ("backward, sums on the device", True),
        ("shadows, weights and gradients on the drive", False),
    ],
)
def test_accumulation_and_frozen_weights(name: str, tied: bool, folder: Path, drive: Path) -> None:
    model, (home, how, shadows) = gpt2(folder, tied=tied), ROWS[name]
    words = ["--accumulate", "3", CLIP, 'model.freeze=["wpe","h.1.mlp"]']
    expected, weights = plain(model, 3, *words, accumulate=3)
    with engine(model, *home, *words, how, drives=[drive], shadows=shadows) as ours:
        if how == FULL:
            hold_up(ours)
        assert train(ours, batches(9), accumulate=3) == expected
        assert_same(masters(ours), weights)


@pytest.mark.parametrize("name", ["forward, weights and gradients on the drive", "backward, nothing in RAM"])
def test_experts_that_are_not_used(name: str, folder: Path, drive: Path) -> None:
    """Blocks with unused experts never become complete in a backward; they are updated after it."""
    model, data = model_directory(folder / "mixtral", "mixtral", tied=False), batches(6, rows=1, length=3)
    with engine(model, *REFERENCE) as reference:
        expected, weights = train(reference, data), masters(reference)
    with engine(model, *ROWS[name][0], ROWS[name][1], drives=[drive]) as ours:
        assert train(ours, data) == expected
        assert_same(masters(ours), weights)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("forward, weights and gradients on the drive", "fp16"),
        ("backward, nothing in RAM", "fp16"),
        ("backward, a part on the device", "fp16"),
        ("shadows, weights and gradients on the drive", "bf16"),
        ("shadows, a part on the device", "fp16"),
    ],
)
def test_a_step_that_is_skipped_changes_nothing(
    name: str, dtype: str, folder: Path, drive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An overflow and NaN in steps 1, 3 and 4 of 7 leave weights and state unchanged; fp16 halves its scale."""
    monkeypatch.setattr(loss_scale, "WINDOW", 3)
    home, schedule, shadows = ROWS[name]
    found = []
    for how in (IN_LINE, schedule):
        with engine(gpt2(folder), *home, "--dtype", dtype, how, drives=[drive], shadows=shadows) as ours:
            planted = {1: float("inf"), 3: float("inf"), 4: float("nan")}
            step, seen = [0], []

            def plant(grad: torch.Tensor, step: Any = step, planted: Any = planted) -> torch.Tensor:
                return grad.fill_(planted[step[0]]) if step[0] in planted else grad

            ours.offloaded.parameters["transformer.h.0.ln_1.weight"][0].register_hook(plant)
            if how == FULL:
                hold_up(ours)
            for number, batch in enumerate(batches(7), 1):
                step[0] = number
                seen.append(train(ours, [batch]))
                seen.append(digest(map(ours.offloaded.weight, ours.offloaded.trained)))
                seen.append(digest(masters(ours).values()))
            found.append((str(seen), ours._scale.value, saved(ours, tmp_path / how)))
    assert found[0] == found[1]


# -- every wait is needed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_late_copies_and_reads_change_nothing(name: str, folder: Path, drive: Path, monkeypatch: Any) -> None:
    """Some pages are in flight when the step is decided, others wait for a slot. Steps 1 and 3 are clipped."""
    model, (home, how, shadows) = gpt2(folder), ROWS[name]
    accumulate = 1 + list(ROWS).index(name) % 3 // 2
    words = ["--accumulate", str(accumulate), CLIP]
    expected, weights = plain(model, 4, *words, accumulate=accumulate)
    with late_engine(monkeypatch, model, *home, *words, how, drives=[drive], shadows=shadows) as ours:
        assert train(ours, batches(4 * accumulate), accumulate=accumulate) == expected
        assert_same(masters(ours), weights)


@pytest.mark.skipif(ON_GPU, reason="the stand-in's queues are for the CPU's memory")
@pytest.mark.parametrize("name", ROWS)
def test_queues_that_run_late_change_nothing(name: str, folder: Path, drive: Path, monkeypatch: Any) -> None:
    """New weights of pages in RAM pass through slots if the device has separate memory."""
    model, (home, how, shadows) = gpt2(folder), ROWS[name]
    with engine_on_streams(monkeypatch, model, *home, CLIP, how, drives=[drive], shadows=shadows) as ours:
        assert train(ours, batches(4)) == plain(model, 4, CLIP)[0]
        assert_same(masters(ours), plain(model, 4, CLIP)[1])


# -- snapshots ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "limit", "more"),
    [
        ("forward, weights and gradients on the drive", CLIP, []),
        ("forward, a third in RAM", CLIP, ["tiered.state_copies=2"]),
        ("shadows, all in RAM", "optim.max_grad_norm=0", []),
        ("shadows, half of the state on the drive", CLIP, []),
    ],
)
def test_a_snapshot_is_of_its_step(
    name: str, limit: str, more: list[str], folder: Path, drive: Path, tmp_path: Path
) -> None:
    """It is written while later steps already update pages, and a run resumes from it, also during an update."""
    model, (home, how, shadows) = gpt2(folder), ROWS[name]
    steps, weights = plain(model, 8, limit)
    with engine(model, *home, limit, IN_LINE, drives=[drive]) as ours:
        train(ours, batches(8)[:4])
        expected = saved(ours, tmp_path / "in line")
    with engine(model, *home, *more, limit, how, drives=[drive], shadows=shadows) as ours:
        found = train(ours, batches(8)[:4])
        snapshot = ours.snapshot()
        (tmp_path / "meanwhile").mkdir()
        writing = threading.Timer(0.3, snapshot.write, args=[tmp_path / "meanwhile"])
        writing.start()
        found += train(ours, batches(8)[4:])
        writing.join()
        assert found == steps
        assert {path.name: path.read_bytes() for path in (tmp_path / "meanwhile").iterdir()} == expected
        for _ in range(2):  # the second time an update may still be running
            ours.load(tmp_path / "meanwhile")
            assert train(ours, batches(8)[4:]) == steps[4:]
        assert_same(masters(ours), weights)
