"""Calibrate forecasts: compare a run's measured seconds with the predicted ones, and correct later plans.

A ratio of measured to predicted seconds is stored by engine, phase, bounding resource and number of ranks. So a slow
drive does not correct the prediction of computation, and one rank does not correct that of several. Ratios are not
stored for short runs, unsteady steps (other load, thermal throttling), phases so short that Python dominates, or beyond
a factor of four, which only a wrong rate explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median, quantiles

from offload_trainer.plan.time.step_time import Forecast, correction_key

LEAST_STEPS = 8
_LEAST_SECONDS = 0.05
_SPREAD = 0.3  # largest interquartile range, relative to the median
_FARTHEST = 4.0  # largest ratio either way
_OUTVOTE = 3  # the median is taken of at least this many ratios


def steady_ratios(
    found: Forecast, taken: Mapping[str, Sequence[float]], *, engine: str, ranks: int
) -> dict[str, float]:
    """Return the ratios worth storing, by `correction_key`; `taken` maps phases to their seconds in the counted steps.

    Overlapping phases have no ratio, because they slow each other down.
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
    """Return the median of the last runs' ratios, with 1 for each missing one if there are fewer than three."""
    return median([*ratios, *(1.0,) * (_OUTVOTE - len(ratios))])
