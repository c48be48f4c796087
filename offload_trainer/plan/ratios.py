"""How far off a forecast was, as far as a run can tell: what corrects the next plan on the machine, and what does not.

A ratio of measured to predicted seconds is kept by engine, phase, what bounded the phase and the number of ranks, since
a drive that is slower than it was timed says nothing of products, nor one rank of what several wait for. Not of short
runs, of steps that differ much from each other (other work beside them, a machine that throttles), of phases so short
that Python is what takes the time, nor of ratios that only a wrong rate explains: those are said, and bench times the
machine again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles

from offload_trainer.plan.time import Forecast, correction_key

LEAST_STEPS = 8
_LEAST_SECONDS = 0.05
_SPREAD = 0.3  # between the quartiles, of the median
_FARTHEST = 4.0  # times as long, or as short
_OUTVOTE = 3  # ratios that a middle one is taken of, at least


def steady_ratios(
    found: Forecast, taken: Mapping[str, Sequence[float]], *, engine: str, ranks: int
) -> dict[str, float]:
    """By `correction_key`; `taken`: each phase's seconds in the steps that count.

    None of a forward and an update that run at once: each makes the other longer.
    """
    kept = {}
    for phase, seconds in taken.items():
        predicted = found.seconds.get(phase)
        if phase not in found.apart or predicted is None or predicted < _LEAST_SECONDS or len(seconds) < LEAST_STEPS:
            continue
        middle = median(seconds)
        low, _, high = quantiles(seconds, n=4)
        if high - low <= _SPREAD * middle and 1 / _FARTHEST <= middle / predicted <= _FARTHEST:
            kept[correction_key(engine, phase, found.kind(phase), ranks=ranks)] = middle / predicted
    return kept


def correction(ratios: Sequence[float]) -> float:
    """The middle one of the last runs' ratios; of fewer than three, with 1 for each that is missing."""
    return median([*ratios, *(1.0,) * (_OUTVOTE - len(ratios))])
