"""Compare the choice of `tune` with a full sweep of the same keys and with DeepSpeed's defaults. Run it in a box.

    compare_tuning.py --nvme DIR [--steps 5] [--table FILE] [WORDS]

All optimizer state is on the drive. The sweep tries every combination of the tuner's keys. DeepSpeed's defaults are
those of its documentation (0.19), except that a buffer holds a whole sub-group.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from offload_trainer.run.commands.tune import Trial, run_trial, tune

_GROUPS = (
    ("tiered.io_threads=2", "tiered.io_threads=8"),
    ("tiered.page_size=2097152", "tiered.page_size=8388608"),
    ("tiered.page_buffers=4", "tiered.page_buffers=10"),
)
_PLANNED = ("tiered.io_threads=4", "tiered.page_size=4194304", "tiered.page_buffers=6")
_STOCK_DEFAULTS = (
    "deepspeed.sub_group_size=1000000000 deepspeed.reduce_bucket_size=500000000 "
    "deepspeed.prefetch_bucket_size=50000000 deepspeed.max_live_parameters=1000000000 "
    "deepspeed.optimizer_buffer_count=5 deepspeed.pipeline_read=false deepspeed.pipeline_write=false "
    "deepspeed.aio_block_size=1048576 deepspeed.aio_queue_depth=8 deepspeed.aio_threads=1"
)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def rows(named: dict[str, Trial], picked: Trial) -> Iterator[str]:
    yield "| settings | step s | update s | update / the tuner's |"
    yield "| --- | --- | --- | --- |"
    for name, trial in sorted(named.items(), key=lambda item: item[1].phase("update")):
        if trial.failed:
            yield f"| {name} | failed: {trial.failed[:80]} | | |"
            continue
        ratio = trial.phase("update") / picked.phase("update")
        yield f"| {name} | {trial.seconds:.2f} | {trial.phase('update'):.2f} | {ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--table", type=Path)
    options, words = parser.parse_known_args()
    common = ["--nvme", options.nvme, "--seq-len", "128", "--micro-batch", "1", "--dtype", "bf16", *words]
    tiered = [*common, "--engine", "tiered", "--ram-fraction", "0"]
    named: dict[str, Trial] = {}
    stock = [*common, "--engine", "deepspeed", "--optimizer", "nvme"]
    named["DeepSpeed's defaults"] = run_trial(stock, _STOCK_DEFAULTS, steps=options.steps, say=say)
    named["DeepSpeed, pipelined, 12 buffers"] = run_trial(stock, "", steps=options.steps, say=say)
    best, *_ = tune(tiered, _GROUPS, phase="update", steps=options.steps, say=say)
    named[f"the tuner's: {best.words or 'as planned'}"] = best
    for combination in product(*((planned, *group) for planned, group in zip(_PLANNED, _GROUPS, strict=True))):
        added = " ".join(combination)
        named[added] = run_trial(tiered, added, steps=options.steps, say=say)
    page = "\n".join(rows(named, best))
    print(page)
    if options.table:
        options.table.write_text(page + "\n")


if __name__ == "__main__":
    main()
