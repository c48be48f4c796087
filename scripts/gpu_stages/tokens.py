"""Time steps with few and with many tokens.

With few, the update takes long compared with the matrix products; with many, it takes little.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_stages import speed
from gpu_stages.stage import Stage

TITLE = "Speed at 2 and 32 thousand tokens a step"
COLUMNS = {"tokens": "tokens a step", **speed.COLUMNS}
BATCHES = {"2 thousand tokens": (2, 1), "32 thousand tokens": (8, 4)}  # rows of a micro-batch, number of micro-batches
_TAKEN = (
    speed.PLAIN,
    "forward and backward alone",
    "ours, state in RAM, overlap forward",
    "ours, state in RAM, overlap off",
    "FSDP2, CPU offload",
)


def carry_out(stage: Stage) -> None:
    for told, (rows, accumulate) in BATCHES.items():
        words, against = speed.prepare(stage, rows=rows, accumulate=accumulate), None
        for case in speed.cases():
            name = f"{case.name}: {told}"
            if case.name in _TAKEN and stage.asked(name):
                one = replace(case, name=name, words=[*words, *case.words])
                timed = speed.measure_against(stage, one, against)
                against = timed if case.name == speed.PLAIN else against
