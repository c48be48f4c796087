# DPO (TRL) on preferences, training every parameter of an 8B model; the initial model is the reference.
# run:    python configs/dpo.py --model Qwen/Qwen3-8B --data preferences.jsonl --nvme /mnt/ssd
# plan:   offload-train plan --model Qwen/Qwen3-8B --seq-len 1024 --micro-batch 2 --accumulate 16 --machine a100-80gb
# memory: gpu 84.8 GB, ram 86.9 GB, runs 295 GB
# Each line of the data has `chosen` and `rejected`: conversations with role and content, or texts with a `prompt`.
# Every field of TRL's DPOConfig is a flag. It needs pip install 'offload-trainer[hf]'; the same command resumes.
from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer, HfArgumentParser
from trl import DPOConfig, DPOTrainer

from offload_trainer.hf import Offloaded, load

SETTINGS = {"output_dir": "runs/dpo", "max_steps": 300, "save_steps": 100, "save_total_limit": 2, "logging_steps": 1}
SETTINGS |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "learning_rate": 5e-7}
SETTINGS |= {"lr_scheduler_type": "cosine", "warmup_steps": 0.1, "report_to": "none", "precompute_ref_log_probs": True}
SETTINGS |= {"bf16": False}  # TRL's default, True, would make dtype="fp32" mean autocast


class Trainer(Offloaded, DPOTrainer):
    pass


@dataclass
class Given:
    model: str
    data: str
    nvme: str
    dtype: str = "bf16"


def main() -> None:
    parser = HfArgumentParser((Given, DPOConfig))
    parser.set_defaults(**SETTINGS)
    given, arguments = parser.parse_args_into_dataclasses()
    model = load(
        given.model,
        nvme=[given.nvme],
        dtype=given.dtype,
        seq_len=arguments.max_length,
        micro_batch_size=2 * arguments.per_device_train_batch_size,  # a row is a pair of answers
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
    )
    rows = load_dataset("json", data_files=given.data, split="train")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    trainer = Trainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    output = Path(arguments.output_dir)
    trainer.train(resume_from_checkpoint=any(output.glob("checkpoint-*/trainer_state.json")))
    trainer.save_model(output / "final")


if __name__ == "__main__":
    main()
