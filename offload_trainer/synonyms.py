"""Tables that map flags, keys, values and commands of other trainers to this program's names, for error messages.

The words come from transformers, TRL, Axolotl, LLaMA-Factory, torchtune, nanoGPT, litgpt and DeepSpeed. A word that is
not in the tables is compared with the known names, but only a likely misspelling is suggested: a wrong guess costs the
user more than none.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

_NEAR = 0.8  # lowest ratio of difflib: about one letter in five differs
_MOST_EDITS = 3  # letters removed plus added; without it, long words that share a part would match

_ADAPTERS = (
    "this command trains all weights; for adapters (PEFT) use the Python library: docs/library.md and, for "
    "transformers' Trainer and TRL, docs/integrations.md"
)
_FEWER_BITS = (
    "weights are trained in bf16, fp16 or fp32 and never quantised; to save memory use --params nvme and --optimizer "
    "nvme with --nvme DIR, and optim.moment_dtype=8bit for smaller moments. Under adapters, the Python library stores "
    "a frozen base in 4 or 8 bits: docs/library.md"
)
_PREFERENCES = (
    "preference training uses TRL with the Python library: docs/integrations.md; `offload-train cp dpo` writes a script"
)
_LOGGED = "every step is written to metrics.jsonl in --output, and the terminal shows progress; there is no key for it"
_UPLOADS = (
    "`hf upload USER/NAME DIR`, a command of huggingface_hub, uploads what `offload-train export RUN DIR` wrote; "
    "it has a switch for private repositories"
)
_SHARDING = "--gpus N trains on several ranks: docs/scaling.md; `offload-train plan --parallel`"
_PIPELINE = "not implemented: docs/scaling.md explains why"
_DEVICE = "a GPU is used if there is one (choose it with CUDA_VISIBLE_DEVICES); --gpus N uses several"
_TRACKERS = "trackers read their own environment variables, such as WANDB_PROJECT"
_SWITCHES = "no such option: `offload-train` trains and evaluates; `offload-train prepare` only tokenises"
_OWN_MODULES = "the model runs its own modules, and model.loss_chunk limits the logits in memory"
_EAGER = "models run eagerly, since compiled code would keep weights that have moved"
_OF_FILES = "docs/data.md lists the file formats of --data"
_PACKED = "docs/architectures.md says which models support it"
_WHOLE_ROWS = "all rows have the length --seq-len; data.packing=on puts several conversations in a row"
_LAST = "the newest checkpoints are kept (save.every, save.keep), whatever their loss"
_SPLIT = "for a dataset from the hub: --data hub:OWNER/NAME/CONFIGURATION:SPLIT"
_CACHED = "text is tokenised once with all CPU threads, and rows are read from the cache: there is nothing to set"
_ROWS_OF_STEP = "a step has --micro-batch x --accumulate rows on each rank"
_MODEL_KEYS = "changing the model's configuration needs random weights: --scratch"


@dataclass(frozen=True)
class Term:
    """This program's equivalent of another trainer's word."""

    here: str  # a key, a key with its value, or "" if there is no equivalent
    note: str = ""  # sentence that says what differs or what to do instead


# (equivalent here, words of other trainers, note if the meaning differs)
_TERMS: tuple[tuple[str, str, str], ...] = (
    ("model.name", "model_name_or_path base_model model_id model_name checkpoint_dir initial_checkpoint_dir", ""),
    ("model.name", "pretrained_model_name_or_path init_from model_path", ""),
    ("model.name", "load_checkpoint checkpointer.checkpoint_dir", ""),
    ("model.random_init=true", "from_scratch random_init train_from_scratch reinit_weights", ""),
    ("model.overrides", "config_overrides config_name model_init_kwargs", _MODEL_KEYS),
    ("model.overrides.n_layer", "n_layer num_layers", _MODEL_KEYS),
    ("model.overrides.n_head", "n_head num_heads", _MODEL_KEYS),
    ("model.overrides.n_embd", "n_embd embed_dim", _MODEL_KEYS),
    ("model.overrides", "vocab_size dropout bias hidden_size", _MODEL_KEYS),
    ("model.overrides", "num_hidden_layers rope_scaling tie_embeddings", _MODEL_KEYS),
    ("model.dtype", "precision torch_dtype param_dtype mixed_precision infer_dtype", ""),
    ("model.dtype=bf16", "bf16 bfloat16 pure_bf16 bf16_full_eval use_bf16 bf16.enabled", ""),
    ("model.dtype=fp16", "fp16 float16 half fp16_full_eval use_fp16 fp16.enabled", ""),
    ("model.dtype=fp32", "fp32 float32 no_mixed_precision full_precision", ""),
    ("model.attention", "attn_implementation attn flash_attn attention_implementation", ""),
    ("model.attention=sdpa", "flash_attention sdp_attention use_flash_attention_2", ""),
    ("model.attention=sdpa", "xformers_attention flash_attention_2", ""),
    ("model.attention=eager", "eager_attention", ""),
    ("model.activation_checkpointing=on", "gradient_checkpointing activation_checkpointing checkpoint_activations", ""),
    ("model.activation_checkpointing=on", "use_gradient_checkpointing enable_activation_checkpointing", ""),
    ("model.activation_checkpointing=off", "disable_gradient_checkpointing no_gradient_checkpointing", ""),
    ("model.offload_activations=cpu", "activation_offloading enable_activation_offloading activation_cpu_offload", ""),
    ("model.loss_chunk", "num_output_chunks", "tokens at a time"),
    ("", "use_liger_kernel enable_liger_kernel", _OWN_MODULES),
    ("", "torch_compile compile use_compile torch_compile_backend jit", _EAGER),
    ("model.freeze", "unfrozen_parameters freeze_trainable_layers", "names of what stays fixed"),
    ("model.freeze", "freeze_trainable_modules", "names of what stays fixed"),
    ("model.trust_remote_code=true", "trust_remote", ""),
    ("data.path", "train_file dataset datasets dataset_name data_path train_data dataset_path data_dir data_files", ""),
    ("data.path", "dataset_dir pretraining_dataset train_dataset dataset.source data.json_path training_data", ""),
    ("data.validation_path", "validation_file eval_dataset test_datasets eval_file val_data val_file test_file", ""),
    ("data.validation", "val_size val_set_size validation_split_percentage val_split_fraction", "a share from 0 to 1"),
    ("data.mixture", "interleave_probs mix_strategy dataset_weights", "a weight for each --data"),
    ("data.text_field", "dataset_text_field text_column field_messages text_key", ""),
    ("data.format", "dataset_type dataset_format prompt_style", _OF_FILES),
    ("data.train_on=all", "train_on_inputs train_on_prompt train_on_input train_on_source", ""),
    ("data.train_on=answers", "completion_only_loss assistant_only_loss train_on_responses_only", ""),
    ("data.train_on=answers", "mask_inputs mask_prompt", ""),
    ("data.packing=on", "sample_packing packed neat_packing dataset.packed", _PACKED),
    ("data.packing=on", "pack pack_sequences packing_strategy", _PACKED),
    ("data.packing=on", "padding_free batch_flattening", _PACKED),
    ("data.chat_template", "template chat_template_path", "a file, or auto for the tokenizer's own"),
    ("data.chat_template", "chat_template_jinja", "a file, or auto for the tokenizer's own"),
    ("data.tokenizer", "tokenizer_name tokenizer_dir tokenizer_name_or_path tokenizer_path tokenizer.path", ""),
    ("data.seq_len", "max_seq_length max_length block_size cutoff_len sequence_len max_seq_len context_length", ""),
    ("data.seq_len", "seq_length model_max_length max_source_length ctx_len sequence_length n_ctx", ""),
    ("data.cache", "dataset_prepared_path tokenized_path cache_dir", ""),
    ("data.shuffle", "shuffle_dataset dataloader_shuffle", ""),
    ("data.shuffle", "buffer_size shuffle_buffer_size shuffle_buffer", "rows of a stream"),
    ("optim.name", "optim optimizer optimizer_type optimizer_name optimizer.type optimizer._component_", ""),
    ("optim.moment_dtype=8bit", "adamw_8bit adam8bit use_8bit_optimizer paged_adamw_8bit adamw_bnb_8bit", ""),
    ("optim.lr", "learning_rate max_lr peak_lr base_lr", ""),
    ("optim.betas", "beta1 beta2 adam_beta1 adam_beta2", "both in a list: optim.betas=[0.9,0.95]"),
    ("optim.eps", "adam_epsilon epsilon adam_eps", ""),
    ("optim.weight_decay", "wd l2", ""),
    ("optim.max_grad_norm", "max_grad_norm grad_clip gradient_clipping clip_grad_norm max_norm", ""),
    ("optim.max_grad_norm", "grad_norm_clip clip_grad gradient_clip_val max_gradient_norm", ""),
    ("optim.schedule", "lr_scheduler_type lr_scheduler scheduler lr_schedule", ""),
    ("optim.schedule", "decay_lr lr_decay_style scheduler.type", ""),
    ("optim.warmup_steps", "warmup_iters lr_warmup_steps num_warmup_steps warmup_num_steps warmup lr_warmup_iters", ""),
    ("optim.warmup_steps", "warmup_ratio lr_warmup_fraction", "in steps; auto: 2 % of the run's steps"),
    ("optim.decay_steps", "lr_decay_iters num_decay_steps", "of optim.schedule=wsd; others decay to the end"),
    ("optim.decay_steps", "cooldown_steps", "of optim.schedule=wsd; others decay to the end"),
    ("optim.final_lr_ratio", "min_lr cosine_min_lr_ratio min_lr_ratio lr_min", "a share of --lr"),
    ("optim.accumulate_dtype", "grad_accum_dtype gradient_accumulation_dtype", ""),
    ("train.steps", "max_steps max_iters num_steps train_steps total_steps", ""),
    ("train.steps", "max_train_steps train_iters total_iters max_steps_per_epoch", ""),
    ("train.epochs", "num_train_epochs num_epochs max_epochs n_epochs", ""),
    ("train.micro_batch_size", "per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu mbs", ""),
    ("train.micro_batch_size", "batch_size", f"rows of one forward; {_ROWS_OF_STEP}"),
    ("train.gradient_accumulation_steps", "gradient_accumulation_steps grad_accum", ""),
    ("train.gradient_accumulation_steps", "gradient_accumulation_iters accumulate_grad_batches", ""),
    ("train.gradient_accumulation_steps", "gradient_accumulation accumulation_steps grad_accumulation_steps gas", ""),
    ("train.gradient_accumulation_steps", "global_batch_size train_batch_size total_batch_size", _ROWS_OF_STEP),
    ("train.deterministic=true", "full_determinism use_deterministic_algorithms", ""),
    ("train.eval_every", "eval_steps eval_interval eval.interval evaluation_steps val_check_interval eval_freq", ""),
    ("train.eval_every", "eval_strategy evals_per_epoch evaluation_strategy run_val_every_n_steps", "in steps"),
    ("train.eval_rows", "eval_iters max_eval_samples eval.max_iters eval_batches limit_val_batches", "in rows"),
    ("", "max_new_tokens eval.max_new_tokens eval_max_new_tokens", "`offload-train sample RUN --tokens N`"),
    ("train.seed", "data_seed random_seed", ""),
    ("placement.engine=deepspeed", "deepspeed zero_optimization", "its sizes are deepspeed.*"),
    ("placement.engine=deepspeed", "ds_config deepspeed_config", "its sizes are deepspeed.*"),
    ("deepspeed.zero_stage", "zero_stage zero_optimization.stage", ""),
    ("placement.optimizer=cpu", "offload_optimizer cpu_offload optimizer_offload", ""),
    ("placement.optimizer=cpu", "fsdp_offload_params fsdp_cpu_offload optim_cpu_offload", ""),
    ("placement.optimizer", "offload_optimizer.device offload_optimizer_device", ""),
    ("placement.params=cpu", "offload_param offload_params param_offload cpu_offload_param cpu_offload_params", ""),
    ("placement.params", "offload_param.device offload_param_device device_map", ""),
    ("placement.nvme", "nvme_path offload_folder offload_dir nvme_dir offload_param_nvme_path swap_dir", ""),
    ("placement.nvme", "offload_optimizer_nvme_path offload_state_dict", ""),
    ("placement.gpus", "nproc_per_node num_gpus num_processes devices world_size n_gpus ngpu gpus_per_node", ""),
    ("placement.threads", "num_threads omp_num_threads num_cpu_threads_per_process cpuadam_cores_perc", ""),
    ("save.output", "output_dir out_dir output_directory save_dir default_root_dir checkpointer.output_dir", ""),
    ("save.every", "save_steps save_interval checkpoint_interval save_every_n_steps save_freq", ""),
    ("save.every", "save_strategy always_save_checkpoint saves_per_epoch", "in steps"),
    ("save.keep", "save_total_limit keep_last_n_checkpoints max_checkpoints", ""),
    ("save.resume", "resume_from_checkpoint auto_resume_from_checkpoints resume_from", ""),
    ("save.trackers", "report_to logger_name metric_logger logger wandb_log use_wandb tensorboard_log log_with", ""),
    ("save.trackers=wandb", "wandb", ""),
    ("save.trackers=tensorboard", "use_tensorboard", ""),
    ("parallel.tensor", "tensor_parallel_size tp_size tensor_model_parallel_size tp tensor_parallel autotp_size", ""),
    ("parallel.sequence", "sequence_parallel_degree context_parallel_size cp_size sp_size ulysses_degree", ""),
    ("deepspeed.sub_group_size", "stage3_sub_group_size", ""),
    ("deepspeed.prefetch_bucket_size", "stage3_prefetch_bucket_size", ""),
    ("deepspeed.max_live_parameters", "stage3_max_live_parameters", ""),
    ("deepspeed.aio_block_size", "aio.block_size", ""),
    ("deepspeed.aio_queue_depth", "aio.queue_depth queue_depth", ""),
    ("deepspeed.aio_threads", "aio.thread_count thread_count aio.intra_op_parallelism", ""),
    ("", "lora use_lora qlora peft use_peft lora_r", _ADAPTERS),
    ("", "lora_rank lora_alpha lora_dropout lora_target adapter dora", _ADAPTERS),
    ("", "lora_target_modules peft_type adapter_name_or_path lora_model_dir lora_modules_to_save use_dora", _ADAPTERS),
    ("", "finetuning_type", f"all weights are trained, as with `full`; {_ADAPTERS}"),
    ("", "load_in_4bit load_in_8bit quantize quantization_bit", _FEWER_BITS),
    ("", "quantization_config bnb_4bit_quant_type fp8", _FEWER_BITS),
    ("", "dpo rl beta pref_beta pref_loss reward_model kto grpo ppo orpo rlhf simpo_gamma", _PREFERENCES),
    ("", "logging_steps log_interval log_every_n_steps logging_first_step steps_per_print logging_strategy", _LOGGED),
    ("", "logging_dir disable_tqdm log_level plot_loss wall_clock_breakdown log_freq", _LOGGED),
    ("", "run_name wandb_run_name wandb_run_id", "a tracker names the run by --output"),
    ("", "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo push_dataset_to_hub upload", _UPLOADS),
    ("", "fsdp fsdp_config strategy ddp ddp_backend ddp_timeout distributed_type num_nodes nnodes", _SHARDING),
    ("", "parallel.pipeline pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pp_size", _PIPELINE),
    ("", "gpu device no_cuda use_cpu local_rank cuda gpu_id gpu_ids use_cuda", _DEVICE),
    ("", "do_train do_eval do_predict eval_only", _SWITCHES),
    ("", "group_by_length pad_to_max_length pad_to_sequence_len pad_to_multiple_of dataloader_drop_last", _WHOLE_ROWS),
    ("", "load_best_model_at_end metric_for_best_model greater_is_better early_stopping_patience", _LAST),
    ("", "overwrite_output_dir", "to start over, name another directory with --output"),
    ("", "overwrite_cache", "to start over, name another directory with --output"),
    ("", "stage sft", "conversations in --data are enough (docs/tutorial.md); ZeRO's stage is deepspeed.zero_stage"),
    ("", "neftune_noise_alpha label_smoothing_factor", "no such key; use the Python library with your own loop"),
    ("", "max_samples max_train_samples streaming", "--data reads the whole file; --steps ends a run earlier"),
    ("", "preprocessing_num_workers dataset_num_proc dataset_processes dataloader_num_workers num_workers", _CACHED),
    ("", "initial_scale_power loss_scale fp16.loss_scale loss_scale_window", "fp16's loss scale follows its overflows"),
    ("", "tf32 allow_tf32", "matrix products use --dtype; fp32 is not replaced by tf32"),
    ("", "auto_find_batch_size", "a plan that does not fit names a --micro-batch that does, if there is one"),
    ("", "export_dir export_size merge_lora", "export a run afterwards: `offload-train export RUN DIR`"),
    ("", "per_device_eval_batch_size eval_batch_size", "evaluations use --micro-batch too"),
    ("", "eval_accumulation_steps", "evaluations use --micro-batch too"),
    ("", "gradient_checkpointing_kwargs", "model.activation_checkpointing=on has no further options"),
    ("", "activation_checkpointing_kwargs", "model.activation_checkpointing=on has no further options"),
    ("", "dataset_train_split dataset_test_split dataset_config dataset_split split", _SPLIT),
    ("optim.name", "use_muon muon", "the matrices of blocks follow Muon and all other weights AdamW: optim.name=muon"),
    ("", "use_galore use_badam use_apollo use_adam_mini adafactor", "optim.name is adamw or muon"),
    ("", "lr_scheduler_kwargs optim_args dataset_kwargs", "each of these has its own key: docs/config.md"),
    ("", "dry_run", "`offload-train plan` with the same words writes nothing"),
    ("", "config config_file", "the configuration file is the first word: `offload-train CONFIG.yaml`"),
    ("", "max_time", "`timeout -s TERM 3600 offload-train ...` ends a run with a checkpoint, from which it resumes"),
)
# Families of words that share a prefix.
_FAMILIES = {
    **dict.fromkeys(("lora_", "peft_", "pissa_", "loraplus_", "loftq_"), Term("", _ADAPTERS)),
    **dict.fromkeys(("ddp_", "fsdp_"), Term("", _SHARDING)),
    **dict.fromkeys(("galore_", "badam_", "apollo_"), Term("", "optim.name is adamw or muon")),
    **dict.fromkeys(("wandb_", "trackio_"), Term("save.trackers", _TRACKERS)),
    "hub_": Term("", _UPLOADS),
    "bnb_": Term("", _FEWER_BITS),
    "liger_": Term("", _OWN_MODULES),
    "logging_": Term("", _LOGGED),
    "dataloader_": Term("", _CACHED),
}
_BY_WORD = {word: Term(here, note) for here, words, note in _TERMS for word in words.split()}

# Values of other trainers, by key: the equivalent value, or a replacement for key and value.
_EIGHT_BITS = dict.fromkeys(
    ("adamw_8bit", "adamw8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adam8bit", "pagedadamw8bit"),
    "optim.moment_dtype=8bit",
)
_RULES = dict.fromkeys(
    ("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_fused", "paged_adamw_32bit", "fusedadam"), "adamw"
)
_RULES |= dict.fromkeys(("deepspeedcpuadam", "cpuadam", "adamw_apex_fused", "paged_adamw"), "adamw")
_WHERE = {"cuda": "gpu", "device": "gpu", "ram": "cpu", "host": "cpu", "disk": "nvme", "ssd": "nvme", "none": "gpu"}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "full": "fp32"}
_DTYPES |= {"bf16_true": "bf16", "bf16_mixed": "bf16", "16_true": "fp16", "16_mixed": "fp16", "32_true": "fp32"}
_DTYPES |= {"16": "fp16", "32": "fp32", "no": "fp32"}
_VALUES: dict[str, dict[str, str]] = {
    "model.dtype": _DTYPES,
    "model.attention": dict.fromkeys(
        ("flash_attention_2", "flash_attention_3", "fa2", "flash", "xformers", "true"), "sdpa"
    ),
    "model.activation_checkpointing": {"true": "on", "false": "off", "unsloth": "on"},
    "data.packing": {"true": "on", "false": "off", "bfd": "on"},
    "data.format": {"chatml": "chat", "openai": "chat", "chat_template": "chat", "messages": "chat", "raw": "text"}
    | {"completion": "text", "prompt_completion": "pairs", "instruction": "alpaca"},
    "data.train_on": {"assistant": "answers", "completion": "answers"},
    "optim.name": _RULES | _EIGHT_BITS,
    "optim.schedule": {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
    | {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine", "true": "cosine"},
    "optim.moment_dtype": {"8": "8bit", "8_bit": "8bit", "int8": "8bit", "bfloat16": "bf16", "float32": "fp32"},
    "placement.engine": dict.fromkeys(("zero", "zero1", "zero2", "zero3", "ds"), "deepspeed"),
    # --optimizer places the optimizer state; other trainers use the same flag to choose the optimizer.
    "placement.optimizer": dict.fromkeys(("adamw", *_RULES), "optim.name=adamw")
    | _EIGHT_BITS
    | {"muon": "optim.name=muon"}
    | _WHERE,
    "placement.params": _WHERE,
    "placement.gradients": _WHERE,
    "save.resume": {"true": "auto", "yes": "auto", "latest": "auto", "last": "auto"}
    | {"false": "never", "no": "never", "none": "never"},
    "save.trackers": {"none": "save.trackers=[]", "no": "save.trackers=[]", "true": "wandb", "all": "wandb"},
    "tiered.overlap": {"true": "forward", "false": "off"},
}

_EVALUATES = "a run computes its validation loss every train.eval_every steps; lm-eval reads an export: docs/export.md"
_SERVES = "`offload-train export` writes a directory that vLLM and transformers load"
_CONVERTS = "llama.cpp's convert_hf_to_gguf.py converts what it exports, see docs/export.md"
_HUB = "a run downloads what it needs: --model OWNER/NAME a model, --data hub:OWNER/NAME a dataset"
_COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("train", "finetune fine-tune finetune_full sft fit run pretrain pretraining launch start full finetuning", ""),
    ("train", "resume continue", "run the same command again to resume from its newest checkpoint"),
    ("sample", "generate generation inference infer predict complete", ""),
    ("chat", "talk interact cli_demo", ""),
    ("export", "merge merge-lora merge_lora convert convert-hf save zero_to_fp32 convert_to_hf", ""),
    ("export", "gguf quantize", _CONVERTS),
    ("import", "migrate import-checkpoint import_checkpoint load-checkpoint load_checkpoint", ""),
    ("prepare", "preprocess tokenize tokenise prepare-data prepare_data data build-dataset prepare_dataset", ""),
    ("plan", "estimate estimate-memory estimate_memory memory dry-run dryrun", ""),
    ("bench", "benchmark profile measure speedtest", ""),
    ("tune", "autotune search sweep autotuning", ""),
    ("doctor", "check env ds_report verify diagnose info", ""),
    ("runs", "status list-runs history ps", ""),
    ("report", "compare diff", ""),
    ("ls", "list recipes templates", ""),
    ("cp", "copy", ""),
    ("ls", "init new create setup wizard config configure", "`offload-train cp NAME` copies one of its recipes"),
    ("", "eval evaluate evaluation test validate lm_eval lm-eval perplexity", _EVALUATES),
    ("", "server api deploy webchat webui ui vllm-serve", _SERVES),
    ("", "download fetch pull", _HUB),
    ("", "upload push push-to-hub", _UPLOADS),
    ("", "version", "`offload-train --version`"),
    ("", "help", "`offload-train --help`"),
    ("", "dpo grpo ppo rm reward kto rlhf orpo", _PREFERENCES),
    ("", "lora qlora peft finetune_lora finetune_adapter", _ADAPTERS),
)
_COMMAND = {word: (command, note) for command, words, note in _COMMANDS for word in words.split()}


def term_of(word: str) -> Term | None:
    """Return the equivalent of another trainer's flag or key, such as "--learning-rate"; None if it is unknown."""
    word = plain(word)
    family = next((term for begin, term in _FAMILIES.items() if word.startswith(begin)), None)
    return _BY_WORD.get(word, family)


def value_of(key: str, value: object) -> str | None:
    """Return the equivalent of another trainer's value of a key, or a replacement for key and value."""
    return _VALUES.get(key, {}).get(plain(str(value)).removeprefix("torch."))


def command_of(word: str) -> tuple[str, str] | None:
    """Return (command, note) for another trainer's command, the command "" if there is no equivalent."""
    return _COMMAND.get(word.lower())


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` or in the tables that `word` misspells, if any."""
    spelled = {plain(name): name for name in (*_BY_WORD, *known)}
    near = difflib.get_close_matches(plain(word), spelled, n=3, cutoff=_NEAR)
    for name in near:
        same = sum(block.size for block in difflib.SequenceMatcher(None, plain(word), name).get_matching_blocks())
        if len(plain(word)) + len(name) - 2 * same <= _MOST_EDITS:
            return spelled[name]
    return None


def plain(word: str) -> str:
    """Normalize a word: no leading dashes, lower case, underscores for dashes."""
    return word.lstrip("-").lower().replace("-", "_")
