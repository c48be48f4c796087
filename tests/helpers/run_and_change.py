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

number, settings, helper, *words = sys.argv[1:]


def change_at(watch: schedule_change.ScheduleWatch, record: Any) -> Any:
    planned = watch.setup.planned
    section = planned.config.tiered
    if record.step != int(number) or "auto" not in (section.overlap, section.master_format):
        return None
    chosen = dict(one.removeprefix("tiered.").split("=") for one in settings.split(","))
    config = planned.config.model_copy(update={"tiered": section.model_copy(update=chosen)})
    new = schedule_change.planned_with(replace(planned, config=config), planned.machine)
    new = replace(schedule_change.with_schedule(new, new.plan), plan=new.plan)
    told = f"changing to {schedule_change.schedule_in_words(new)} after step {record.step}"
    watch._say(told)
    watch.setup = schedule_change.with_change(watch.setup, schedule_change.ScheduleChange(new, told))
    return watch.setup.record


schedule_change.ScheduleWatch.__call__ = change_at  # type: ignore[method-assign]
if helper == "-":
    raise SystemExit(main(words))
sys.argv = [helper, *words]
runpy.run_path(str(Path(__file__).with_name(helper)), run_name="__main__")
