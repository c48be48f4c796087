"""Tests of steps that are clipped or skipped, and of snapshots, in every schedule of the update.

The update overlaps the next forward or this step's backward; then pages in RAM may have shadow memory for their old
bytes. Pages are updated slowly, and most backwards pause before their first block until every possible page is updated,
so that the outcome does not depend on timing. `test_pairs.py` does not pause them.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from engine_bench import assert_same, batches, digest, masters, plain, saved, train
from placements import ALL_ON_DRIVES, AWAY, BEHIND, CLIP, FULL, HOMES, IN_LINE, Build, plant

from offload_trainer.offloading.pages.named_state import TieredSnapshot
from offload_trainer.offloading.update.updater import MispredictionWatch
from offload_trainer.optim import loss_scale

pytestmark = pytest.mark.usefixtures("nothing_is_small", "always", "slow_pages")


def one_in(count: int, model: Path, steps: int) -> float:
    """Return a limit that about one in `count` of the first steps exceeds."""
    norms = sorted((norm or 0.0 for _, norm in plain(model, steps, "optim.max_grad_norm=0")[0]), reverse=True)
    return norms[steps // count - 1] * 0.999


QUICK = ("nothing in RAM", "a third in RAM")  # the others are only for `make test-all`


@pytest.mark.parametrize(
    "home",
    [pytest.param(h, marks=() if h in QUICK else pytest.mark.slow) for h in HOMES if h != "all on the device"],
)
def test_early_pages_of_clipped_steps_are_discarded_and_updated_again(
    home: str, build: Build, kept: list[tuple[int, int]]
) -> None:
    """bf16 with dropout. About one in four steps is clipped."""
    steps = 8
    limit = one_in(4, build.model, steps)
    clip = f"optim.max_grad_norm={limit}"
    expected, weights = plain(build.model, steps, clip)
    clipped = [norm is not None and norm > limit for _, norm in expected]
    assert 0 < sum(clipped) < steps
    with build(home, clip, FULL, held=True, shadows=0.6) as ours:
        assert train(ours, batches(steps)) == expected
        assert_same(masters(ours), weights)
    assert [(counted, done > 0) for counted, done in kept] == [
        (0 if was else done, True) for was, (_, done) in zip(clipped, kept, strict=True)
    ]


IN_RAM = [*AWAY, "--ram-fraction", "1"]
DRIVES = HOMES["weights and gradients on the drive"]


@pytest.mark.parametrize(
    ("home", "schedule", "shadows", "dtype", "late"),
    [
        (DRIVES, BEHIND, 0.0, "fp16", False),
        (HOMES["nothing in RAM"], FULL, 0.0, "fp16", False),
        (IN_RAM, FULL, 0.6, "bf16", True),
        pytest.param(HOMES["a part on the device"], FULL, 1.0, "fp16", False, marks=pytest.mark.slow),
        pytest.param(IN_RAM, FULL, 0.6, "bf16", False, marks=pytest.mark.slow),
        pytest.param(DRIVES, FULL, 0.0, "bf16", True, marks=pytest.mark.slow),
    ],
    ids=["forward", "backward", "shadow memory, late", "a part on the device", "shadow memory", "drives, late"],
)
def test_a_step_that_is_skipped_changes_nothing(
    home: list[str],
    schedule: str,
    shadows: float,
    dtype: str,
    late: bool,
    build: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An overflow and NaN in steps 1, 3 and 4 of 6 leave weights and state unchanged; fp16 halves its scale.

    If transfers are late, step 4 is not speculative: it leaves pages without shadow memory in slots, and step 5 must
    not update these before it is decided.
    """
    monkeypatch.setattr(loss_scale, "WINDOW", 3)
    if late:
        begun = iter([True, True, True, False, True, True])
        monkeypatch.setattr(MispredictionWatch, "rarely", property(lambda _: next(begun)))
    found = []
    for how in (IN_LINE, schedule):
        words = {"late": monkeypatch if late and how != IN_LINE else None, "held": how == FULL and not late}
        with build(home, "--dtype", dtype, how, **words, shadows=shadows) as ours:
            before = plant(ours, {1: float("inf"), 3: float("inf"), 4: float("nan")})
            seen = []
            for number, batch in enumerate(batches(6), 1):
                before(number)
                seen.append(train(ours, [batch]))
                seen.append(digest(map(ours.offloaded.weight, ours.offloaded.trained)))
                seen.append(digest(masters(ours).values()))
            found.append((str(seen), ours._scale.value, saved(ours, tmp_path / how)))
    assert found[0] == found[1]


# -- snapshots ---------------------------------------------------------------------------------------------------------

FROZEN = [*ALL_ON_DRIVES, 'model.freeze=["h.1.mlp","wpe"]', "optim.moment_dtype=8bit"]
SNAPSHOTS = {  # placement, schedule, share of shadow memory; on the device transfers are late
    "on the device": (["--gpu-fraction", "1"], IN_LINE, 0.0),
    "in all tiers, a part on the device": ([*AWAY, "--gpu-fraction", "0.3", "--ram-fraction", "0.3"], IN_LINE, 0.0),
    "off": (["--ram-fraction", "0.5", "optim.moment_dtype=8bit"], IN_LINE, 0.0),
    "forward, frozen": (FROZEN, BEHIND, 0.0),
    "forward, two copies": ([*HOMES["two copies on the drive"], CLIP], BEHIND, 0.0),
    "backward, all in RAM": (["--ram-fraction", "1", "optim.max_grad_norm=0"], FULL, 1.0),
    "backward, half in RAM": ([*AWAY, "--ram-fraction", "0.5", CLIP], FULL, 1.0),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if "on the device" in case else pytest.mark.slow) for case in SNAPSHOTS]
)
def test_a_snapshot_is_of_its_step(case: str, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written while later steps already update pages, and a run resumes from it, also during an update."""
    (home, how, shadows), data, put = SNAPSHOTS[case], batches(6), TieredSnapshot._put
    with build(home, IN_LINE) as ours:
        steps = train(ours, data[:3])
        expected = saved(ours, tmp_path / "in line")
        steps += train(ours, data[3:])
        weights = masters(ours)
    late = monkeypatch if "on the device" in case else None
    with build(home, how, shadows=shadows, late=late) as ours:
        monkeypatch.setattr(TieredSnapshot, "_put", lambda *given: (put(*given), time.sleep(0.01)))
        found = train(ours, data[:3])
        snapshot = ours.snapshot()
        (tmp_path / "meanwhile").mkdir()
        writing = threading.Timer(0.1, snapshot.write, args=[tmp_path / "meanwhile"])
        writing.start()
        found += train(ours, data[3:])
        writing.join()
        assert found == steps
        assert {path.name: path.read_bytes() for path in (tmp_path / "meanwhile").iterdir()} == expected
        for _ in range(2):  # the second time an update may still be running
            ours.load(tmp_path / "meanwhile")
            assert train(ours, data[3:]) == steps[3:]
        assert_same(masters(ours), weights)
