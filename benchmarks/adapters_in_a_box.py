"""Train adapters over a quantised base larger than the memory it is given, and print bytes and seconds.

    python benchmarks/adapters_in_a_box.py DIRECTORY [--parameters 1.0e9] [--base nf4] [--dtype bf16]
        [--box "box --ram 1536M --read 400M --write 400M --dir DIRECTORY --"]

A Llama with random fp32 weights is written in shards, as by weights_in_a_box.py. Within the box, a session quantises it
onto the drive and trains LoRA adapters of rank 8. The planned and measured bytes of host memory, the stored bytes and
the seconds of each step are printed; the box says what it allowed.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from weights_in_a_box import VOCABULARY, write_model

TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=float, default=1.0e9)
    parser.add_argument("--base", default="nf4", choices=("nf4", "int8", "model"))
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--box", default="", help="what the training is run in, such as `box --ram 1536M --`")
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        train(options)
        return
    if not (options.directory / "model").exists():
        count = write_model(options.directory / "model", parameters=options.parameters)
        print(f"wrote {count} parameters to {options.directory / 'model'}", flush=True)
    ourselves = [sys.executable, __file__, *sys.argv[1:], "--child"]
    raise SystemExit(subprocess.run([*shlex.split(options.box), *ourselves], check=False).returncode)


def train(options: argparse.Namespace) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    import offload_trainer as ot
    from offload_trainer.telemetry.meters import peak_rss_bytes

    drive = options.directory / "drive"
    drive.mkdir(exist_ok=True)
    torch.set_num_threads(os.cpu_count() or 1)
    start = time.monotonic()
    words = {"dtype": options.dtype, "base": options.base, "freeze": ["."], "params": "nvme", "nvme": [str(drive)]}
    with ot.load(str(options.directory / "model"), seq_len=TOKENS, micro_batch_size=1, **words) as session:
        lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(session.model, lora)
        optimizer = session.adamw(model.parameters(), lr=1e-4)
        items = session.plan.items
        stored = sum(item.bytes for item in items if item.tier == str(drive))
        planned = sum(item.bytes for item in items if item.tier == "ram")
        print(f"=> ready after {time.monotonic() - start:.0f} s; {stored / 1e6:.0f} MB on the drive", flush=True)
        generator, losses, seconds = torch.Generator().manual_seed(0), [], []
        ids = torch.randint(VOCABULARY, (1, TOKENS), generator=generator)
        for _ in range(options.steps):
            began = time.monotonic()
            with session.micro_batch():
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.monotonic() - began)
    print("=> losses", *(f"{loss:.4f}" for loss in losses))
    print("=> seconds of steps", *(f"{one:.2f}" for one in seconds))
    print(f"=> peak RSS {peak_rss_bytes() / 1e9:.2f} GB; {planned / 1e9:.2f} GB planned", flush=True)


if __name__ == "__main__":
    main()
