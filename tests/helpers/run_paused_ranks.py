"""run_paused_ranks.py STEP FILE WORDS...: run the command with several ranks, each started through run_and_pause.py."""

import sys
from pathlib import Path

from offload_trainer.cli import main
from offload_trainer.run import launcher

_start, _held = launcher._Ranks.start, Path(__file__).with_name("run_and_pause.py")


def start(self, command, *, count):  # type: ignore[no-untyped-def]
    words = command[command.index("offload_trainer") + 1 :]
    _start(self, [sys.executable, str(_held), *sys.argv[1:3], *words], count=count)


launcher._Ranks.start = start
sys.exit(main(sys.argv[3:]))
