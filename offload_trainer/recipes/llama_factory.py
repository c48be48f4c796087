# LLaMA-Factory's supervised fine-tuning of all weights (stage sft, finetuning_type full), offloaded, from its YAML.
# run:    python configs/llama_factory.py sft.yaml --nvme /mnt/ssd
# It reads arguments, data and template through LLaMA-Factory 0.9.5, and trains with that project's trainer.
# docs/integrations.md has a YAML and the versions; running the same command again resumes from the newest checkpoint.
import argparse
from dataclasses import fields
from typing import Any

from llamafactory.data import SFTDataCollatorWith4DAttentionMask, get_dataset, get_template_and_fix_tokenizer
from llamafactory.hparams import FinetuningArguments, ModelArguments, get_train_args
from llamafactory.model import load_tokenizer
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
from omegaconf import OmegaConf

from offload_trainer.errors import UserError
from offload_trainer.hf import Offloaded, load

MODEL_KEYS: tuple[str, ...] = ("model_name_or_path", "use_fast_tokenizer", "split_special_tokens", "trust_remote_code")
MODEL_KEYS += ("disable_gradient_checkpointing", "use_reentrant_gc", "low_cpu_mem_usage")
METHOD_KEYS = ("pure_bf16", "disable_shuffling", "use_dft_loss", "use_eaft_loss", "eaft_alpha")
PAD_TO = 8  # LLaMA-Factory pads rows for training to a multiple of this


class Trainer(Offloaded, CustomSeq2SeqTrainer):
    def create_optimizer(self, model: Any = None) -> Any:  # replaces LLaMA-Factory's own
        return super().create_optimizer(model)


def changed(given: Any, default: Any, *, used: tuple[str, ...]) -> list[str]:
    """Return the keys that differ from their defaults, without those that this script uses."""
    names = [field.name for field in fields(given) if field.init and field.name not in used]
    return [name for name in names if getattr(given, name) != getattr(default, name)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("yaml")
    parser.add_argument("--nvme", required=True)
    parser.add_argument("--params", default="auto", choices=("auto", "gpu", "cpu", "nvme"), help="where weights are")
    arguments = parser.parse_args()
    model_args, data_args, training_args, method, _ = get_train_args(
        OmegaConf.to_container(OmegaConf.load(arguments.yaml))
    )

    unused = changed(model_args, ModelArguments(model_args.model_name_or_path), used=MODEL_KEYS)
    unused += changed(method, FinetuningArguments(stage="sft", finetuning_type="full"), used=METHOD_KEYS)
    refused = ("bf16", "fp16", "fp8", "predict_with_generate", "do_predict")
    unused += [name for name in refused if getattr(training_args, name)]
    unused += ["neat_packing"] if data_args.neat_packing else []
    if unused:
        raise UserError(
            f"{', '.join(unused)}: this script does not use these keys; it trains all weights with stage sft, in bf16 "
            "with pure_bf16: true and in fp32 without"
        )
    tokenizers = load_tokenizer(model_args)
    if tokenizers["processor"] is not None:
        raise UserError(f"{model_args.model_name_or_path} has a processor for images, which was not tried")
    template = get_template_and_fix_tokenizer(tokenizers["tokenizer"], data_args)
    rows = get_dataset(template, model_args, data_args, training_args, stage="sft", **tokenizers)
    model = load(
        model_args.model_name_or_path,
        nvme=[arguments.nvme],
        params=arguments.params,
        dtype="bf16" if method.pure_bf16 else "fp32",
        activation_checkpointing="off" if model_args.disable_gradient_checkpointing else "auto",
        trust_remote_code=model_args.trust_remote_code,
        seq_len=-(-data_args.cutoff_len // PAD_TO) * PAD_TO,
        micro_batch_size=training_args.per_device_train_batch_size,
        gradient_accumulation_steps=training_args.gradient_accumulation_steps,
    )
    collator = SFTDataCollatorWith4DAttentionMask(
        template=template,
        model=model,
        pad_to_multiple_of=PAD_TO,
        label_pad_token_id=-100 if data_args.ignore_pad_token_for_loss else tokenizers["tokenizer"].pad_token_id,
        **tokenizers,
    )
    trainer = Trainer(
        model=model, args=training_args, finetuning_args=method, data_collator=collator, **rows, **tokenizers
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
