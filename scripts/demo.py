"""Run the whole workflow once: train, checkpoint, export fp16 and fp32, load both with transformers, compare, sample.

    demo.py [WORDS]      extra arguments for the training command, after the demo's own

Writes into demo-run/, after removing an earlier demo's output. Exits with 1 and the reason if a step fails.
"""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from offload_trainer.storage.owned_dirs import ScratchDirectory, remove_dead

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "demo-run"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def offload_train(*words: str) -> None:
    command = ["offload-train", *words]
    print("$", " ".join(command), flush=True)
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PATH": PATH})


def main() -> int:
    with suppress(FileNotFoundError):
        remove_dead(OUT, what="the demo in")
    ScratchDirectory(OUT, what="the demo in")
    (OUT / "drive").mkdir()
    run = OUT / "run"
    half_on_the_drive = ("--nvme", str(OUT / "drive"), "--ram-fraction", "0.5")
    offload_train("configs/demo.yaml", *half_on_the_drive, "--output", str(run), *sys.argv[1:])
    losses = [json.loads(line)["validation_loss"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    start = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    print(f"loss {start:.3f} at the start, validation {losses[0]:.3f} -> {losses[-1]:.3f}")
    if losses[-1] > start - 2:
        print("the validation loss did not fall well below the start", file=sys.stderr)
        return 1
    exports = {dtype: OUT / f"export-{dtype}" for dtype in ("fp16", "fp32")}
    for dtype, place in exports.items():
        offload_train("export", str(run), str(place), "--dtype", dtype)
    return compare(exports)


def compare(exports: dict[str, Path]) -> int:
    """Load both exports with transformers, compare their logits, and print a sample; return the exit status."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(exports["fp32"])
    models = {name: AutoModelForCausalLM.from_pretrained(path).eval() for name, path in exports.items()}
    for name, model in models.items():
        print(f"{name}: {next(model.parameters()).dtype}, {model.num_parameters():,} parameters")
    ids = tokenizer("MACBETH.\nTo-morrow, and to-morrow", return_tensors="pt").input_ids
    with torch.no_grad():
        half, full = models["fp16"].float()(ids).logits, models["fp32"](ids).logits
    difference = float((half - full).abs().max())
    print(f"logits of the fp16 and the fp32 export differ by {difference:.2g} at most, of {full.abs().max():.3g}")
    if not difference < 0.05:
        print("the exports do not agree", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    told = models["fp32"].generate(ids, max_new_tokens=60, do_sample=True, top_k=50, temperature=0.8, pad_token_id=0)
    print("--- a sample of the exported model ---")
    print(tokenizer.decode(told[0], skip_special_tokens=True))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
