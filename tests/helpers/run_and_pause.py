"""run_and_pause.py STEP FILE WORDS...: run the command, which pauses after step STEP until FILE exists (5 minutes)."""

import sys
import time
from pathlib import Path
from typing import Any

from offload_trainer.cli import main
from offload_trainer.telemetry.sinks import Telemetry

shown, last, go = Telemetry.step, int(sys.argv[1]), Path(sys.argv[2])


def step(self: Telemetry, record: Any) -> None:
    shown(self, record)
    until = time.monotonic() + 300
    while record.step == last and not go.exists() and time.monotonic() < until:
        time.sleep(0.005)


Telemetry.step = step  # type: ignore[method-assign]
raise SystemExit(main(sys.argv[3:]))
