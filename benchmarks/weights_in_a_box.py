"""Test pretrained weights and exports of a model larger than memory: the export must have the live model's logits.

    python benchmarks/weights_in_a_box.py DIRECTORY [--parameters 1.0e9] [--dtype bf16] [--box "box --ram 2G --"]

A Llama with random fp32 weights is written in shards, one tensor at a time. Within the box, it is imported with
everything on the drive, the live engine computes logits and saves a checkpoint, and that is exported. transformers then
loads the export outside the box. Bytes, seconds, peaks and the comparison of logits are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from offload_trainer.storage.owned_dirs import fresh_directory

HIDDEN, INNER, HEADS, GROUPS, VOCABULARY = 1536, 4096, 24, 8, 32000
TOKENS = list(range(100, 148))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=float, default=1.0e9)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--box", default="", help="what a command is run in, such as `box --ram 2G --`")
    parser.add_argument("--child", choices=["live", "loaded"])
    wishes = parser.parse_args()
    if wishes.child == "live":
        live(wishes.directory, wishes.dtype)
    elif wishes.child == "loaded":
        loaded(wishes.directory, wishes.dtype)
    else:
        compare(wishes)


def compare(wishes: argparse.Namespace) -> None:
    model, trial = wishes.directory / "model", wishes.directory / f"trial-{wishes.dtype}"
    run, exported = trial / "run", trial / "exported"
    box = shlex.split(wishes.box)
    if not model.exists():
        count = write_model(model, parameters=wishes.parameters)
        print(f"wrote {count} parameters to {model}", flush=True)
    fresh_directory(trial, what="a trial in")
    ourselves = [sys.executable, __file__, str(wishes.directory), "--dtype", wishes.dtype, "--child"]
    timed("import, logits, checkpoint", [*box, *ourselves, "live"])
    words = ["export", str(run), str(exported), "--dtype", wishes.dtype, "--max-shard-size", "1GB", "--check"]
    timed("export", [*box, sys.executable, "-m", "offload_trainer", *words])
    timed("loaded by transformers", [*ourselves, "loaded"])


def timed(name: str, command: list[str]) -> None:
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    told = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("box", "=>", "exported"))]
    print(f"{name}: {time.monotonic() - start:.0f} s, exit {done.returncode}", *told, sep="\n    ", flush=True)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])


def write_model(directory: Path, *, parameters: float) -> int:
    """Write a Llama of at least `parameters` parameters, one tensor at a time, in shards of one block each."""
    import torch
    from transformers import LlamaConfig

    from offload_trainer.model.init_weights import meta_model
    from offload_trainer.storage.tensorfile import TensorEntry, TensorFileWriter

    def config(layers: int) -> Any:
        return LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_attention_heads=HEADS,
            num_key_value_heads=GROUPS,
            num_hidden_layers=layers,
            vocab_size=VOCABULARY,
            max_position_embeddings=2048,
            tie_word_embeddings=False,
        )

    one, two = (sum(p.numel() for p in meta_model(config(n)).parameters()) for n in (1, 2))
    layers = 1 + -int(-(parameters - one) // (two - one))
    directory.mkdir(parents=True)
    config(layers).save_pretrained(directory)
    shards: dict[str, list[TensorEntry]] = {}
    for name, parameter in meta_model(config(layers)).named_parameters():
        part = name.split(".")[2] if ".layers." in name else "rest"
        entry = TensorEntry(name, torch.float32, tuple(parameter.shape))
        shards.setdefault(f"model-{part}.safetensors", []).append(entry)
    generator = torch.Generator().manual_seed(0)
    for file, entries in shards.items():
        writer = TensorFileWriter(directory / file, entries)
        for entry in entries:
            if len(entry.shape) == 1:
                writer.write(entry.name, torch.ones(entry.shape))
            else:
                writer.write(entry.name, torch.empty(entry.shape).normal_(0, 0.02, generator=generator))
        writer.close()
    index = {entry.name: file for file, entries in shards.items() for entry in entries}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(entry.numel for entries in shards.values() for entry in entries)


def live(directory: Path, dtype: str) -> None:
    """Import the model, compute logits and save a checkpoint, with everything possible on the drive."""
    from offload_trainer.run.process_setup import prepared

    drive = directory / "drive"
    drive.mkdir(exist_ok=True)
    words = ["--model", directory / "model", "--tokenizer", "builtin", "--nvme", drive, "--dtype", dtype]
    words += [
        "--params",
        "nvme",
        "--optimizer",
        "nvme",
        "placement.gradients=nvme",
        "tiered.page_size=1048576",
        "optim.moment_dtype=8bit",
    ]
    words += ["--seq-len", "64", "--micro-batch", "1", "--output", directory / f"trial-{dtype}/run", "save.keep=1"]
    config = prepared([str(word) for word in words])
    import torch

    from offload_trainer.checkpoint import TrainState
    from offload_trainer.run import train
    from offload_trainer.telemetry.meters import peak_rss_bytes

    def serve(job: Any) -> None:
        logits = job.engine.next_logits(torch.tensor([TOKENS]))
        torch.save(logits, directory / f"live-{dtype}.pt")
        with job.checkpoints:
            job.checkpoints.save(job.engine, TrainState(step=0, tokens=0, data_position=0))
        print(f"=> peak RSS {peak_rss_bytes() / 1e9:.2f} GB")

    train.train_run(config, instead=serve)


def loaded(directory: Path, dtype: str) -> None:
    """Load the export in transformers, with the engine's arithmetic for 16-bit products on this CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    from offload_trainer.engine.cpu_matmul import use_fp32_products
    from offload_trainer.storage.tensorfile import DTYPES

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    use_fp32_products(DTYPES[dtype])
    model, info = AutoModelForCausalLM.from_pretrained(
        directory / f"trial-{dtype}/exported", dtype="auto", output_loading_info=True
    )
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert model.dtype is DTYPES[dtype], model.dtype
    with torch.no_grad():
        ours = model(torch.tensor([TOKENS]), logits_to_keep=1).logits[:, -1].float()
    live_logits = torch.load(directory / f"live-{dtype}.pt", weights_only=True)
    largest, apart = ours.abs().max().item(), (ours - live_logits).abs().max().item()
    print(f"=> logits up to {largest:.3f}; equal: {torch.equal(ours, live_logits)}, {apart:.3g} apart")


if __name__ == "__main__":
    main()
