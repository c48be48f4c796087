"""Tests of the learning rate against hand-computed numbers and torch's schedulers."""

import pytest
import torch
from transformers import get_scheduler

from offload_trainer.config import OptimSection
from offload_trainer.run.loop import learning_rate

DECAY = [0.85, 0.7, 0.55, 0.4, 0.25, 0.1]


def rates(steps: int, **settings) -> list[float]:
    section = OptimSection(**{"lr": 1.0, "final_lr_ratio": 0.1, **settings})
    return [learning_rate(step, section, steps=steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Four warm-up steps add a quarter each, then six steps fall to 0.1.
        ({"schedule": "linear", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, *DECAY]),
        # cos of 30, 60, 90, 120, 150 degrees: 0.8660, 0.5, 0, -0.5, -0.8660; 0.1 + 0.45 * (1 + cos).
        ({"schedule": "cosine", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1]),
        ({"schedule": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "wsd", "warmup_steps": 4, "decay_steps": 3}, [0.325, 0.55, 0.775, 1, 1, 1, 1, 0.7, 0.4, 0.1]),
        # The decay is longer than the steps after the warm-up, so it takes all of them, still from the peak.
        ({"schedule": "wsd", "warmup_steps": 4, "decay_steps": 9}, [0.325, 0.55, 0.775, 1, *DECAY]),
        ({"schedule": "wsd", "warmup_steps": 0, "decay_steps": 0}, [1] * 10),
        ({"schedule": "linear", "warmup_steps": 0}, [1 - 0.1 * step for step in range(10)]),
        ({"schedule": "linear", "warmup_steps": 10}, [(step + 1) / 10 for step in range(10)]),
    ],
)
def test_values_of_ten_steps(settings, expected):
    assert rates(10, **settings) == pytest.approx(expected, abs=1e-6)


def test_auto_warmup_is_two_percent_and_auto_decay_twenty():
    warm = rates(200, schedule="wsd")
    assert warm[:5] == pytest.approx([0.325, 0.55, 0.775, 1, 1])
    assert warm[159] == 1 > warm[160] == pytest.approx(1 - 0.9 / 40)
    assert rates(24, schedule="linear")[0] == 1  # 0.48 rounds to no warm-up
    assert rates(26, schedule="linear")[:2] == pytest.approx([1, 1 - 0.9 / 25])  # 0.52 rounds to one step, at the peak
    assert rates(2, schedule="wsd") == [1, pytest.approx(0.1)]  # a fifth of 2 is no step, but one decays all the same


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_short_runs_and_steps_beyond_the_end(schedule):
    section = OptimSection(schedule=schedule)
    end = learning_rate(49, section, steps=50)
    assert [learning_rate(step, section, steps=50) for step in (50, 51, 10_000)] == [end] * 3
    assert rates(1, schedule=schedule) == [1.0 if schedule == "constant" else 0.1]  # at its end
    assert rates(1, schedule=schedule, warmup_steps=1) == [1.0]  # one step of warm-up alone is the peak


WSD = {"num_decay_steps": 20, "decay_type": "linear"}


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("kind", "more", "schedule", "final"),
    [
        ("linear", {}, "linear", 0.0),
        ("cosine", {}, "cosine", 0.0),
        ("constant_with_warmup", {}, "constant", 0.0),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, "cosine", 0.1),
        ("warmup_stable_decay", WSD, "wsd", 0.0),
        ("warmup_stable_decay", WSD | {"min_lr_ratio": 0.2}, "wsd", 0.2),
    ],
)
def test_a_delay_gives_transformers_rates(kind, more, schedule, final, warmup, late):
    """Their scheduler starts `late` steps late, as after steps that overflowed."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    scheduler = get_scheduler(kind, optimizer, warmup, 50, scheduler_specific_kwargs=more)
    theirs = []
    for step in range(50):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if step >= late:
            scheduler.step()
    settings = {"final_lr_ratio": final, "warmup_steps": warmup, "schedule_delay": 1 + late, "decay_steps": 20}
    ours = rates(50, lr=3e-4, schedule=schedule, **settings)
    assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-18)
