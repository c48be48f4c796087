"""Learning-rate schedules as a pure function of the step, so that checkpoints need no scheduler state.

peak |   /‾‾‾\\            warm-up, then the schedule's shape, and from the last step on its final value
     |  /     \\__ final
     +--------------> step
"""

from __future__ import annotations

import math

from offload_trainer.config import OptimSection

_AUTO_WARMUP = 0.02
_AUTO_DECAY = 0.20


def learning_rate(step: int, section: OptimSection, *, steps: int) -> float:
    """Return the learning rate of the 0-based `step` in a run of `steps`.

    The warm-up is ``lr * (step + 1) / warmup``, so step 0 has a nonzero rate and step ``warmup - 1`` has the peak.
    Then `cosine` and `linear` decay over all remaining steps, and `wsd` over the last `decay_steps`. Each reaches
    exactly ``lr * final_lr_ratio`` at step ``steps - 1``. `constant`, and `wsd` without decay steps, stay at the peak.
    If the warm-up fills the whole run, the run ends at the peak. Beyond the last step the rate stays constant.
    """
    assert step >= 0, step
    assert steps >= 1, steps
    last = steps - 1
    step = min(step, last)
    warmup = round(_AUTO_WARMUP * steps) if section.warmup_steps == "auto" else section.warmup_steps
    if step < warmup:
        return section.lr * ((step + 1) / warmup)

    span = last - max(warmup - 1, 0)  # steps from the peak to the end
    if section.schedule == "constant":
        return section.lr
    if section.schedule == "wsd":
        decay = max(1, round(_AUTO_DECAY * steps)) if section.decay_steps == "auto" else section.decay_steps
        if decay == 0:
            return section.lr
        span = min(span, decay)

    final = section.lr * section.final_lr_ratio
    if step == last:
        return final  # a run of one step has no span to divide by
    left = min(1.0, (last - step) / span)
    if section.schedule == "cosine":
        left = 0.5 * (1 - math.cos(math.pi * left))
    return section.lr * left + final * (1 - left)  # exactly the peak when left is 1
