"""measured.py WHAT FOLDER OUTPUT DRIVE: a Trainer's run with weights and state on the drive; plan and peak as JSON.

WHAT: `trainer`, all of the model in FOLDER; `lora`, adapters beside it. The peak is of memory that no file backs, seen
every few milliseconds.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from pathlib import Path

from trainers import Ours, arguments, rows

from offload_trainer.hf import load, session_of

peak = 0


def watch() -> None:
    global peak
    while True:
        held = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        peak = max(peak, int(held[0]) * 1024)
        time.sleep(0.004)


def main(what: str, folder: str, output: str, drive: str) -> None:
    keys = {"freeze": ["."]} if what == "lora" else {"ram_fraction": 0.0, "gradients": "nvme", "page_size": 1 << 18}
    threading.Thread(target=watch, daemon=True).start()
    model = load(folder, nvme=drive, params="nvme", seq_len=24, micro_batch=2, accumulate=2, **keys)
    session = session_of(model)
    if what == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    words = {"max_steps": 4, "save_steps": 2, "eval_steps": 2, "warmup_steps": 0}
    trainer = Ours(model, arguments(Path(output), **words), train_dataset=rows(24), eval_dataset=rows(4))
    trainer.train()
    trainer.save_model(output + "/final")
    needs = sum(item.bytes for item in session.plan.items if item.tier == "ram")
    session.close()
    print(json.dumps({"plan": needs, "peak": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
