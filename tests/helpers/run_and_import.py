"""run_and_import.py SOURCE RUN WORDS...: import a checkpoint; print by how much anonymous memory has grown, as JSON.

The peak is sampled every few milliseconds, from just before the import on.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path

from imported_state import imported


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


def main(source: str, run: str, *words: str) -> None:
    before = held()
    threading.Thread(target=watch, daemon=True).start()
    imported(Path(source), Path(run), *words)
    print(json.dumps({"grown": peak - before}))


if __name__ == "__main__":
    main(*sys.argv[1:])
