"""Train LoRA adapters over a quantised base of a billion parameters in less memory than its 16-bit weights need.

    python benchmarks/adapters_in_a_box.py DIRECTORY [--parameters 1.0e9] [--base nf4] [--box "box --ram 1.5G --"]

The base is the Llama that weights_in_a_box.py writes, read from a directory on a drive that also holds the quantised
weights. Planned and measured memory, drive bytes and the seconds of each step are printed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from weights_in_a_box import timed, write_model

STEPS, LENGTH, RANK = 5, 64, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=float, default=1.0e9)
    parser.add_argument("--base", default="nf4", choices=("nf4", "int8", "model"))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--box", default="", help="what the training runs in, such as `box --ram 1.5G --`")
    parser.add_argument("--child", action="store_true")
    wishes = parser.parse_args()
    if wishes.child:
        train(wishes.directory, base=wishes.base, dtype=wishes.dtype)
        return
    if not (wishes.directory / "model").exists():
        count = write_model(wishes.directory / "model", parameters=wishes.parameters)
        print(f"wrote {count} parameters to {wishes.directory / 'model'}", flush=True)
    ourselves = [sys.executable, __file__, str(wishes.directory), "--base", wishes.base, "--dtype", wishes.dtype]
    timed(f"LoRA over {wishes.base}", [*shlex.split(wishes.box), *ourselves, "--child"])


def train(directory: Path, *, base: str, dtype: str) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    import offload_trainer as ot
    from offload_trainer.telemetry.meters import peak_rss_bytes

    drive = directory / "drive"
    drive.mkdir(exist_ok=True)
    keys = {"params": "nvme", "freeze": ["."], "seq_len": LENGTH, "dtype": dtype}
    with ot.load(str(directory / "model"), nvme=[str(drive)], base=base, say=print, **keys) as session:
        lora = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(session.model, lora).train()
        optimizer = session.adamw(model.parameters(), lr=1e-3)
        ids = torch.arange(100, 100 + LENGTH)[None]
        for step in range(1, STEPS + 1):
            start = time.monotonic()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            session.clip_grad_norm_(1.0)
            optimizer.step()
            print(f"=> step {step}: loss {loss.item():.4f}, {time.monotonic() - start:.1f} s", flush=True)
        need = session.plan.to_json()["tiers"]["ram"]["need"]
        held = sum(item.bytes for item in session.plan.items if item.tier == str(drive))
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f"=> {trained / 1e6:.1f} M trained; {held / 1e6:.0f} MB on the drive")
    print(f"=> peak RSS {peak_rss_bytes() / 1e9:.2f} GB, planned {need / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
