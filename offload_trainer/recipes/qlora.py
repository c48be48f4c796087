# QLoRA (PEFT, TRL) on conversations: adapters over a base in 4 bits, which is on the GPU, in RAM or on a drive.
# run:    python configs/qlora.py --model Qwen/Qwen3-8B --data chat.jsonl --nvme /mnt/ssd
# Each line of the data has `messages` with role and content, or a `text`. It prints its plan before it loads the base.
# Every field of TRL's SFTConfig is a flag. It needs pip install 'offload-trainer[hf,qlora]'; the same command resumes.
from dataclasses import dataclass
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, HfArgumentParser
from trl import SFTConfig, SFTTrainer

from offload_trainer.hf import Offloaded, load, session_of

SETTINGS = {"output_dir": "runs/qlora", "max_steps": 300, "save_steps": 100, "save_total_limit": 2, "logging_steps": 1}
SETTINGS |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, "learning_rate": 2e-4}
SETTINGS |= {"lr_scheduler_type": "cosine", "warmup_steps": 0.1, "report_to": "none"}
SETTINGS |= {"bf16": False}  # TRL's default, True, would make dtype="fp32" mean autocast


class Trainer(Offloaded, SFTTrainer):
    pass


@dataclass
class Given:
    model: str
    data: str
    nvme: str
    dtype: str = "bf16"
    base: str = "nf4"  # nf4, int8, or model: in dtype
    params: str = "auto"  # placement of the base: gpu, cpu or nvme
    rank: int = 16
    merge: bool = False  # also write the base, rounded, with the adapters merged


def main() -> None:
    parser = HfArgumentParser((Given, SFTConfig))
    parser.set_defaults(**SETTINGS)
    given, arguments = parser.parse_args_into_dataclasses()
    base = load(
        given.model,
        nvme=[given.nvme],
        dtype=given.dtype,
        freeze=["."],
        base=given.base,
        params=given.params,
        seq_len=arguments.max_length,
        micro_batch_size=arguments.per_device_train_batch_size,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
    )
    lora = LoraConfig(r=given.rank, lora_alpha=2 * given.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    rows = load_dataset("json", data_files=given.data, split="train")
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    trainer = Trainer(get_peft_model(base, lora), args=arguments, train_dataset=rows, processing_class=tokenizer)
    output = Path(arguments.output_dir)
    trainer.train(resume_from_checkpoint=any(output.glob("checkpoint-*/trainer_state.json")))
    trainer.save_model(output / "adapters")
    merged = output / f"merged-{trainer.state.global_step}"
    if given.merge and not merged.exists():
        session_of(trainer.model).export(merged, dtype=given.dtype)


if __name__ == "__main__":
    main()
