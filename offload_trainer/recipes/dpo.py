# DPO (TRL) on preferences, training every parameter of an 8B model; the initial model is the reference.
# run:    python configs/dpo.py --model Qwen/Qwen3-8B --data preferences.jsonl --nvme /mnt/ssd
# plan:   offload-train plan --model Qwen/Qwen3-8B --seq-len 1024 --micro-batch 2 --accumulate 16 --machine a100-80gb
# memory: gpu 84.8 GB, ram 86.9 GB, runs 295 GB, /mnt/nvme 0 B
# Each line of the data has `chosen` and `rejected`: conversations with role and content, or texts with a `prompt`.
# It needs pip install 'offload-trainer[hf]'; running the same command again resumes from the newest checkpoint.
import argparse
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer

from offload_trainer.hf import Offloaded, load


class Trainer(Offloaded, DPOTrainer):
    pass


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "nvme"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--output", default="runs/dpo")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    for name, default in (("seq-len", 1024), ("rows", 1), ("accumulate", 16), ("steps", 300), ("save-every", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=5e-7)
    wish = parser.parse_args()

    # Each row is a pair of a chosen and a rejected answer, so a micro-batch has twice as many sequences.
    shape = {"seq_len": wish.seq_len, "micro_batch_size": 2 * wish.rows, "gradient_accumulation_steps": wish.accumulate}
    model = load(wish.model, nvme=[wish.nvme], dtype=wish.dtype, **shape)
    arguments = DPOConfig(
        wish.output,
        bf16=False,  # bf16=True would mean autocast; the weights are already in their dtype
        precompute_ref_log_probs=True,
        max_length=wish.seq_len,
        per_device_train_batch_size=wish.rows,
        gradient_accumulation_steps=wish.accumulate,
        max_steps=wish.steps,
        learning_rate=wish.lr,
        warmup_steps=wish.steps // 10,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=wish.save_every,
        save_total_limit=2,
        report_to="none",
    )
    trainer = Trainer(
        model,
        args=arguments,
        train_dataset=load_dataset("json", data_files=wish.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(wish.model),
    )
    begun = any(Path(wish.output).glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=begun)
    trainer.save_model(f"{wish.output}/final")


if __name__ == "__main__":
    main()
