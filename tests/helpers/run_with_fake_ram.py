"""run_with_fake_ram.py BYTES WORDS...: run the command as if this machine had BYTES of RAM."""

import sys
from dataclasses import replace
from typing import Any

from offload_trainer.cli import main
from offload_trainer.run import planning

probed = planning.machine_here


def machine_here(*given: Any, **words: Any) -> Any:
    return replace(probed(*given, **words), ram_bytes=int(sys.argv[1]))


planning.machine_here = machine_here
raise SystemExit(main(sys.argv[2:]))
