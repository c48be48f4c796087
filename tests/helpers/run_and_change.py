"""run_and_change.py STEP SETTING[,SETTING] HELPER|- WORDS...: run the command, which changes to these settings of its
update schedule after step STEP if it has left one open. With HELPER, a script in this directory runs the words.
"""

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload_trainer.cli import main
from offload_trainer.run import schedule_change
from offload_trainer.run.schedule_change import ScheduleChange

number, settings, helper, *words = sys.argv[1:]


def is_open(planned: Any) -> bool:
    return "auto" in (planned.config.tiered.overlap, planned.config.tiered.master_format)


def change_at(watch: schedule_change.ScheduleWatch, record: Any) -> ScheduleChange | None:
    watch._deciding = record.step < int(number)
    if record.step != int(number):
        return None
    planned = watch.setup.planned
    chosen = dict(one.removeprefix("tiered.").split("=") for one in settings.split(","))
    section = planned.config.tiered.model_copy(update=chosen)
    config = planned.config.model_copy(update={"tiered": section})
    new = schedule_change.planned_with(replace(planned, config=config), planned.machine)
    new = replace(schedule_change.with_schedule(new, new.plan), plan=new.plan)
    return ScheduleChange(new, f"changing to {schedule_change.schedule_in_words(new)} after step {record.step}")


schedule_change.may_change = is_open
schedule_change.ScheduleWatch._change_after = change_at  # type: ignore[method-assign, assignment]
if helper == "-":
    raise SystemExit(main(words))
sys.argv = [helper, *words]
runpy.run_path(str(Path(__file__).with_name(helper)), run_name="__main__")
