"""run_and_weigh.py import|export SOURCE DESTINATION WORDS...: print by how much anonymous memory grows, as JSON.

`export` writes a Trainer's checkpoint. The peak is sampled every few milliseconds, from just before the work on.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path

from imported_state import imported

from offload_trainer.run.commands.export_trainer import export_trainer


def held() -> int:
    """Return this process's anonymous memory in bytes."""
    found = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[0]) * 1024


peak = 0


def watch() -> None:
    global peak
    while True:
        peak = max(peak, held())
        time.sleep(0.002)


def main(work: str, source: str, destination: str, *words: str) -> None:
    before = held()
    threading.Thread(target=watch, daemon=True).start()
    if work == "import":
        imported(Path(source), Path(destination), *words)
    else:
        export_trainer(Path(source), Path(destination), shard_bytes=10**9, check=False)
    print(json.dumps({"grown": peak - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
