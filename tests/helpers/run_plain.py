"""Run the command with torch alone as its engine (plain_engine.py), whatever engine the plan names."""

from __future__ import annotations

import sys
from typing import Any

from plain_engine import PlainEngine

from offload_trainer.cli import main
from offload_trainer.run import train


def plain(setup: Any, *, swaps: Any, load_weights: bool) -> PlainEngine:
    return PlainEngine(setup.source, setup.config.model, setup.config.optim, load_weights=load_weights)


if __name__ == "__main__":
    train.train_run.__kwdefaults__["build"] = plain
    raise SystemExit(main(sys.argv[1:]))
