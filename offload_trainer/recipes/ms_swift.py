# A plugin that runs inside ms-swift: `swift sft` and `swift pt` train all weights, offloaded; other tuners: not tried.
# run:    swift sft sft.yaml --external_plugins configs/ms_swift.py
# docs/integrations.md has a YAML. It needs ms-swift 4.6, and offload-trainer without its extra hf.
import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from swift.model import MODEL_MAPPING, ModelLoader
from swift.trainers import Seq2SeqTrainer, TrainerFactory

from offload_trainer.errors import UserError
from offload_trainer.hf import Offloaded, load

DTYPES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
ELSEWHERE = ("attn_impl", "experts_impl", "rope_scaling", "max_model_len", "new_special_tokens", "init_strategy")


class Trainer(Offloaded, Seq2SeqTrainer):
    def __init__(self, *, args: Any, **words: Any) -> None:
        if args.gradient_checkpointing:
            raise UserError("gradient_checkpointing=True: set it to false; load() recomputes what its plan says")
        if args.optimizer:
            raise UserError(f"optimizer={args.optimizer!r}: leave it out; offloaded weights are trained with AdamW")
        super().__init__(args=args, **words)

    def create_optimizer(self, model: Any = None) -> Any:  # replaces ms-swift's own
        return super().create_optimizer(model)


class OffloadedLoader(ModelLoader):
    def get_model(self, model_dir: str, config: Any, processor: Any, model_kwargs: dict[str, Any]) -> Any:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for name in ("max_length", "per_device_train_batch_size", "gradient_accumulation_steps"):
            parser.add_argument(f"--{name}", type=int, required=True)
        parser.add_argument("--tuner_type", default="lora")
        parser.add_argument("--model_kwargs", type=yaml.safe_load, default={})
        arguments, _ = parser.parse_known_args()
        unused = [name for name in ELSEWHERE if getattr(self, name)]
        unused += [name for name in ("quantization_config", "max_memory") if name in model_kwargs]
        if unused or self.model_info.task_type != "causal_lm":
            raise UserError(
                f"{', '.join(unused) or self.model_info.task_type}: the weights are loaded by offload_trainer.hf.load, "
                "as a causal language model; leave these keys out, and give its keywords in model_kwargs"
            )
        words: dict[str, Any] = {"freeze": ["."]} if arguments.tuner_type != "full" else {}
        words |= {
            "dtype": DTYPES[str(self.model_info.torch_dtype)],
            "seq_len": arguments.max_length,
            "micro_batch_size": arguments.per_device_train_batch_size,
            "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        }
        return load(model_dir, **(words | arguments.model_kwargs))


command = Path(sys.argv[0]).stem
if command == "rlhf":
    raise UserError("ms_swift.py is for `swift sft` and `swift pt`: leave it out of external_plugins")
if command in ("sft", "pt"):
    TrainerFactory.TRAINER_MAPPING["causal_lm"] = f"{__name__}.Trainer"
    for meta in MODEL_MAPPING.values():
        if meta.loader.get_model is ModelLoader.get_model and not meta.is_multimodal:
            meta.loader = type("Loader", (OffloadedLoader, meta.loader), {})
