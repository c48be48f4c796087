"""Run one stage of the GPU suite, the checks that need a machine with a GPU; scripts/gpu_suite.sh documents its use.

    gpu_suite.py ── stage (gpu_stages/check, parity, ...) ──requests──> worker processes, which use the GPU
                         └── Record: STAGE.json and STAGE.md, rewritten after every result

This process imports neither torch nor transformers, so that a crash or hang affects a worker alone and the stage
continues. Exits with 1 if something failed, and 2 if nothing could start.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path

from gpu_stages.record import Record
from gpu_stages.stage import Stage, facts

STAGES = {  # stage name: module in gpu_stages
    **{"check": "check", "tests": "tests", "parity": "parity", "speed": "speed", "tokens": "tokens", "ways": "ways"},
    **{"8b": "llama_8b", "8b-plain": "llama_8b_plain", "10b": "gpt2_10b", "saves": "saves"},
}
NEEDED = ("torch", "transformers", "pydantic", "safetensors", "psutil", "tqdm", "yaml")  # required by the package
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    options = _options()
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        told = f"lacks {', '.join(lacking)}; scripts/offline_bundle.sh gathers what it can on a machine with a network"
        print(f"gpu_suite: {sys.executable} {told}", file=sys.stderr)
        return 2
    if options.rehearse:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # exit normally, so that files on the drive are removed
    folder = options.folder or (tempfile.mkdtemp(prefix="gpu-rehearsal-") if options.rehearse else _PAGES)
    about = facts(rehearsal=options.rehearse)
    if about["gpu"] is None and not options.rehearse:
        print("gpu_suite: torch sees no GPU here; nothing was run. --rehearse goes without", file=sys.stderr)
        return 2
    good = True
    for name in STAGES if options.stage == "all" else [options.stage]:
        module = importlib.import_module(f"gpu_stages.{STAGES[name]}")
        record = Record(
            Path(folder), name, title=module.TITLE, columns=module.COLUMNS, about=about, rehearsal=options.rehearse
        )
        with Stage(record, seconds=options.seconds, drive=options.drive, only=options.only) as stage:
            module.carry_out(stage)
        good = record.close() and good
        print(f"gpu_suite: {record.page}", file=sys.stderr)
    return 0 if good else 1


_PAGES = str(ROOT / "docs" / "benchmarks" / "gpu")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_suite.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("stage", choices=[*STAGES, "all"])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, without a GPU; the numbers mean nothing")
    parser.add_argument("--seconds", type=float, default=520.0, help="after which a stage says what it did not get to")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has TEXT in it")
    parser.add_argument("--drive", type=Path, default=Path(tempfile.gettempdir()), help="a directory on the drive")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
