"""The learning rate of a step: a pure function, so that a resumed run needs no state for it.

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
    """Rate of the 0-based `step` in a run of `steps`.

    Warm-up: ``lr * (step + 1) / warmup``, so the first step already learns and step ``warmup - 1`` is at the
    peak. Then `cosine` and `linear` fall over all that is left, `wsd` over its last `decay_steps`, each to
    exactly ``lr * final_lr_ratio`` at step ``steps - 1``; `constant`, and `wsd` with no decay steps, stay at
    the peak. Where the warm-up fills the whole run, it ends at the peak. Beyond the last step the rate stays.
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
    return section.lr * left + final * (1 - left)  # this form is exactly the peak where left is 1
