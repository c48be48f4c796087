"""What a plan says of an update behind the next forward."""

from __future__ import annotations

from itertools import pairwise

import pytest
from plans import SHAPES, machine, wish
from test_time import timed

from offload_trainer.plan.choose import make_plan
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.overlap import Part, hidden_seconds
from offload_trainer.plan.ratios import steady_ratios
from offload_trainer.plan.sizes import TierSizes
from offload_trainer.plan.time import Bound, Forecast


def forecast(update: float, forward: float, *bounds: Bound) -> Forecast:
    return Forecast({"data": 0.0, "forward": forward, "backward": 1.0, "update": update}, bounds)


def simulated(update: float, forward: float, parts: list[Part]) -> float:
    """Seconds until both are done, unit by unit."""
    home = done = 0.0
    for part in parts:
        home += update * part.update
        done = max(home, done) + forward * part.forward
    return max(home, done)


@pytest.mark.parametrize("update", [0.0, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("forward", [0.0, 0.4, 1.0, 2.0])
@pytest.mark.parametrize(
    "shares", [[(1.0, 1.0)], [(0.5, 0.0), (0.25, 0.25), (0.25, 0.5), (0.0, 0.25)], [(0.1, 0.1)] * 10, [(0, 1), (1, 0)]]
)
def test_hidden_is_what_a_walk_through_the_units_gives(
    update: float, forward: float, shares: list[tuple[float, float]]
) -> None:
    parts = [Part(*share) for share in shares]
    hidden = hidden_seconds(forecast(update, forward), parts, micro_batches=1, gpu=False)
    assert update + forward - hidden == pytest.approx(simulated(update, forward, parts))


def test_only_the_first_micro_batch_hides_and_what_both_ask_of_one_thing_does_not() -> None:
    parts = [Part(0.001, 0.001)] * 1000
    assert hidden_seconds(forecast(2.0, 4.0), parts, micro_batches=1, gpu=False) == pytest.approx(2.0, rel=0.01)
    assert hidden_seconds(forecast(2.0, 4.0), parts, micro_batches=4, gpu=False) == pytest.approx(1.0, rel=0.01)
    shared = [Bound("update", 1.5, "", "drive", "sda"), Bound("forward", 3.0, "", "drive", "sda")]
    assert hidden_seconds(forecast(2.0, 4.0, *shared), parts, micro_batches=1, gpu=False) == pytest.approx(1.5)
    apart = [shared[0], Bound("forward", 3.0, "", "drive", "sdb")]
    assert hidden_seconds(forecast(2.0, 4.0, *apart), parts, micro_batches=1, gpu=False) == pytest.approx(2.0, rel=0.01)
    cpu = [Bound("update", 1.0, "", "adamw"), Bound("forward", 4.0, "", "compute")]
    assert hidden_seconds(forecast(1.0, 4.0, *cpu), parts, micro_batches=1, gpu=False) == 0.0
    assert hidden_seconds(forecast(1.0, 4.0, *cpu), parts, micro_batches=1, gpu=True) == pytest.approx(1.0, rel=0.01)


def test_the_plan_counts_it_and_says_so() -> None:
    plans = {
        how: make_plan(wish("--ram-fraction", "0.5", f"tiered.overlap={how}"), SHAPES["gpt2"], timed())
        for how in ("off", "forward")
    }
    off, on = (plan.forecast for plan in plans.values())
    assert off.step is not None
    assert on.step is not None
    assert on.seconds == off.seconds
    assert off.hidden == 0 < on.hidden
    assert on.step == pytest.approx(off.step - on.hidden)
    assert sum(seconds or 0.0 for seconds in on.in_line.values()) == pytest.approx(on.step)
    assert off.in_line == off.seconds
    assert plans["forward"].to_json()["hidden"] == on.hidden
    assert "go on behind the next forward" in plans["forward"].describe()
    assert "go on behind" not in plans["off"].describe()


def test_auto_takes_it_where_it_hides_enough() -> None:
    def chosen(*words: str, on: MachineProfile) -> tuple[bool, float, float]:
        plan = make_plan(wish(*words), SHAPES["gpt2"], on)
        assert isinstance(plan.sizes, TierSizes)
        return plan.sizes.overlap, plan.forecast.hidden, plan.forecast.step or 0.0

    half = ("--ram-fraction", "0.5", "--seq-len", "1024", "--micro-batch", "2")
    behind, hidden, step = chosen(*half, on=timed())
    assert behind
    assert hidden > 0.05 * step
    assert chosen(*half, "tiered.overlap=off", on=timed())[:2] == (False, 0.0)
    for words in (("--ram-fraction", "1"), ("--ram-fraction", "0", "--seq-len", "16", "--micro-batch", "1")):
        assert chosen(*words, on=timed())[:2] == (False, 0.0)  # one CPU does both; there is little to hide it behind
        assert chosen(*words, "tiered.overlap=forward", on=timed())[0]
    assert not chosen(*half, on=machine())[0]  # whose seconds nobody knows


def test_ratios_of_phases_that_run_at_once_are_not_kept() -> None:
    def kept(how: str) -> set[str]:
        found = make_plan(wish("--ram-fraction", "0", f"tiered.overlap={how}"), SHAPES["gpt2-medium"], timed()).forecast
        taken = {phase: [1.2 * (seconds or 0.0)] * 12 for phase, seconds in found.seconds.items()}
        return {key.split(".")[1] for key in steady_ratios(found, taken, engine="tiered")}

    assert kept("off") == {"forward", "backward", "update"}
    assert kept("forward") == {"backward"}


def test_more_of_the_update_is_hidden_with_more_tokens() -> None:
    found = [
        make_plan(
            wish("--ram-fraction", "0", "tiered.overlap=forward", "--micro-batch", str(n)), SHAPES["gpt2"], timed()
        )
        for n in (1, 2, 4, 8)
    ]
    assert all(one.forecast.hidden < more.forecast.hidden for one, more in pairwise(found))
