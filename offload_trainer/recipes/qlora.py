# QLoRA (PEFT, TRL) on conversations: adapters over a base in 4 bits, which is on the GPU, in RAM or on a drive.
# run:    python configs/qlora.py --model Qwen/Qwen3-8B --data chat.jsonl --nvme /mnt/ssd
# Each line of the data has `messages` with role and content, or a `text`. It prints its plan before it loads the base.
# It needs pip install 'offload-trainer[hf,qlora]'; running the same command again resumes from the newest checkpoint.
import argparse
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from offload_trainer.hf import Offloaded, load, save_merged


class Trainer(Offloaded, SFTTrainer):
    pass


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data", "nvme"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--output", default="runs/qlora")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--base", default="nf4", choices=("nf4", "int8", "model"))
    parser.add_argument("--params", default="auto", choices=("auto", "gpu", "cpu", "nvme"), help="where the base is")
    for name, default in (("seq-len", 1024), ("rows", 1), ("accumulate", 16), ("steps", 300), ("save-every", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--merge", action="store_true", help="also write the base, rounded, with the adapters merged")
    wish = parser.parse_args()

    shape = {"seq_len": wish.seq_len, "micro_batch_size": wish.rows, "gradient_accumulation_steps": wish.accumulate}
    place = {"nvme": [wish.nvme], "params": wish.params}
    base = load(wish.model, dtype=wish.dtype, freeze=["."], base=wish.base, **place, **shape)
    lora = LoraConfig(r=wish.rank, lora_alpha=2 * wish.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    arguments = SFTConfig(
        wish.output,
        bf16=False,  # bf16=True would mean autocast; the weights are already in their dtype
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
        get_peft_model(base, lora),
        args=arguments,
        train_dataset=load_dataset("json", data_files=wish.data, split="train"),
        processing_class=AutoTokenizer.from_pretrained(wish.model),
    )
    begun = any(Path(wish.output).glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=begun)
    trainer.save_model(f"{wish.output}/adapters")
    if wish.merge:
        save_merged(trainer.model, f"{wish.output}/merged")


if __name__ == "__main__":
    main()
