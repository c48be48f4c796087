"""Tables that map flags, keys, values and commands of other trainers to this program's names, for error messages.

The words come from transformers, TRL, Axolotl, LLaMA-Factory, torchtune, nanoGPT, litgpt and DeepSpeed. For any other
word only a likely misspelling of a known name is suggested: a wrong guess costs the user more than none.
"""

import difflib
from collections.abc import Iterable, Iterator
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
_UPLOADS = (
    "`hf upload USER/NAME DIR`, a command of huggingface_hub, uploads what `offload-train export RUN DIR` wrote; "
    "it has a switch for private repositories"
)
_ROWS_OF_STEP = "a step has --micro-batch x --accumulate rows on each rank"


@dataclass(frozen=True)
class Term:
    """This program's equivalent of another trainer's word."""

    here: str  # a key, a key with its value, a value or a command; "" if there is no equivalent
    note: str = ""  # sentence that says what differs or what to do instead


def _terms(table: str) -> Iterator[tuple[str, Term]]:
    """Yield (word, equivalent) from lines such as `in steps | optim.warmup_steps: warmup_ratio`.

    A note before a bar, of what differs or what to do instead, holds for all words up to the next one. `lora_*` stands
    for all words with this beginning.
    """
    note = here = ""
    for line in table.splitlines():
        before, bar, words = line.rpartition("|")
        if bar:
            note, here = before.strip(), ""
        for word in words.split():
            if word.endswith(":"):
                here = word[:-1]
            else:
                yield word, Term(here, note)


# Other trainers' words behind the name of their equivalent here.
_TERMS = f"""
    model.name: model_name_or_path base_model model_id model_name checkpoint_dir checkpointer.checkpoint_dir
        pretrained_model_name_or_path init_from model_path
    model.random_init=true: from_scratch random_init
    model.dtype: precision torch_dtype mixed_precision
    model.dtype=bf16: bf16 bfloat16 bf16.enabled
    model.dtype=fp16: fp16 float16 fp16.enabled
    model.dtype=fp32: fp32 float32
    model.attention: attn_implementation attn flash_attn
    model.attention=sdpa: flash_attention sdp_attention use_flash_attention_2 xformers_attention
    model.activation_checkpointing=on: gradient_checkpointing activation_checkpointing enable_activation_checkpointing
    model.offload_activations=true: activation_offloading enable_activation_offloading
    data.path: train_file dataset datasets dataset_name data_path train_data dataset_path data_dir data_files
        dataset.source pretraining_dataset
    data.validation_path: validation_file eval_dataset test_datasets eval_file val_data
    data.text_field: dataset_text_field text_column
    data.train_on=all: train_on_inputs train_on_prompt train_on_input
    data.train_on=answers: completion_only_loss assistant_only_loss mask_prompt
    data.tokenizer: tokenizer_name tokenizer_name_or_path tokenizer_path tokenizer.path
    data.seq_len: max_seq_length max_length block_size cutoff_len sequence_len max_seq_len context_length seq_length
    data.cache: dataset_prepared_path cache_dir
    optim.name: optim optimizer optimizer_type optimizer.type optimizer._component_
    optim.moment_dtype=8bit: adamw_8bit adam8bit paged_adamw_8bit adamw_bnb_8bit
    optim.lr: learning_rate max_lr
    optim.eps: adam_epsilon epsilon
    optim.weight_decay: wd
    optim.max_grad_norm: max_grad_norm grad_clip gradient_clipping clip_grad_norm max_norm gradient_clip_val
    optim.schedule: lr_scheduler_type lr_scheduler scheduler lr_schedule decay_lr scheduler.type
    optim.warmup_steps: warmup_iters lr_warmup_steps num_warmup_steps warmup_num_steps warmup
    train.steps: max_steps max_iters num_steps train_steps max_steps_per_epoch train_iters
    train.epochs: num_train_epochs num_epochs max_epochs
    train.micro_batch_size: per_device_train_batch_size micro_batch_size train_micro_batch_size_per_gpu
    train.gradient_accumulation_steps: gradient_accumulation_steps grad_accum gradient_accumulation_iters
        accumulate_grad_batches
    train.deterministic=true: full_determinism
    train.eval_every: eval_steps eval_interval eval.interval val_check_interval
    train.seed: data_seed random_seed
    placement.optimizer=cpu: offload_optimizer cpu_offload fsdp_offload_params fsdp_cpu_offload
    placement.optimizer: offload_optimizer.device offload_optimizer_device
    placement.params=cpu: offload_param offload_params cpu_offload_params
    placement.params: offload_param.device device_map offload_param_device
    placement.nvme: nvme_path offload_folder offload_dir
    placement.gpus: nproc_per_node num_gpus num_processes devices world_size
    placement.threads: num_threads omp_num_threads
    save.output: output_dir out_dir save_dir checkpointer.output_dir
    save.every: save_steps save_interval checkpoint_interval
    save.keep: save_total_limit keep_last_n_checkpoints
    save.resume: resume_from_checkpoint auto_resume_from_checkpoints
    save.trackers: report_to logger metric_logger log_with
    save.trackers=wandb: wandb wandb_log use_wandb
    parallel.tensor: tensor_parallel_size tp_size tensor_model_parallel_size autotp_size
    parallel.pipeline: pipeline_parallel_size pp_size pipeline_model_parallel_size
    deepspeed.zero_stage: zero_stage zero_optimization.stage
    deepspeed.sub_group_size: stage3_sub_group_size
    deepspeed.prefetch_bucket_size: stage3_prefetch_bucket_size
    deepspeed.max_live_parameters: stage3_max_live_parameters
    deepspeed.aio_block_size: aio.block_size
    deepspeed.aio_queue_depth: aio.queue_depth
    deepspeed.aio_threads: aio.thread_count
    changing the model's configuration needs random weights: --scratch |
        model.overrides: config_overrides model_init_kwargs vocab_size dropout hidden_size num_hidden_layers
        model.overrides.n_layer: n_layer num_layers
        model.overrides.n_head: n_head num_heads
        model.overrides.n_embd: n_embd embed_dim
    a share from 0 to 1 | data.validation: val_size val_set_size validation_split_percentage
    docs/architectures.md says which models support it |
        data.packing=on: sample_packing packed pack dataset.packed neat_packing packing_strategy padding_free
    a file, or auto for the tokenizer's own | data.chat_template: template chat_template_path chat_template_jinja
    both in a list: optim.betas=[0.9,0.95] | optim.betas: beta1 beta2 adam_beta1 adam_beta2
    in steps; auto: 2 % of the run's steps | optim.warmup_steps: warmup_ratio
    a share of --lr | optim.final_lr_ratio: min_lr min_lr_ratio
    rows of one forward; {_ROWS_OF_STEP} | train.micro_batch_size: batch_size
    {_ROWS_OF_STEP} | train.gradient_accumulation_steps: global_batch_size train_batch_size
    in steps |
        train.eval_every: eval_strategy evaluation_strategy run_val_every_n_steps evals_per_epoch
        save.every: save_strategy saves_per_epoch
    in rows | train.eval_rows: eval_iters max_eval_samples eval.max_iters
    its sizes are deepspeed.* | placement.engine=deepspeed: deepspeed zero_optimization ds_config deepspeed_config
    models run eagerly, since compiled code would keep weights that have moved | torch_compile compile
    {_ADAPTERS} | lora use_lora qlora dora use_dora peft use_peft adapter finetuning_type lora_* peft_*
    {_FEWER_BITS} | load_in_4bit load_in_8bit quantize quantization_bit quantization_config fp8 bnb_*
    {_PREFERENCES} | dpo beta reward_model kto grpo ppo orpo rlhf rl
    every step is written to metrics.jsonl in --output, and the terminal shows progress; there is no key for it |
        log_interval log_every_n_steps steps_per_print disable_tqdm log_level plot_loss logging_*
    a tracker names the run by --output | run_name wandb_run_name
    trackers read their own environment variables, such as WANDB_PROJECT | save.trackers: wandb_*
    {_UPLOADS} | push_to_hub upload hub_*
    --gpus N trains on several ranks: docs/scaling.md; `offload-train plan --parallel` |
        fsdp strategy ddp num_nodes nnodes ddp_* fsdp_*
    a GPU is used if there is one (choose it with CUDA_VISIBLE_DEVICES); --gpus N uses several |
        gpu device no_cuda use_cpu local_rank gpu_id gpu_ids
    the newest checkpoints are kept (save.every, save.keep), whatever their loss |
        load_best_model_at_end metric_for_best_model early_stopping_patience
    to start over, name another directory with --output | overwrite_output_dir overwrite_cache
    conversations in --data are enough (docs/tutorial.md); ZeRO's stage is deepspeed.zero_stage | stage sft
    --data reads the whole file; --steps ends a run earlier | max_samples max_train_samples streaming
    text is tokenised once with all CPU threads, and rows are read from the cache: there is nothing to set |
        preprocessing_num_workers dataset_num_proc num_workers dataset_processes dataloader_*
    the configuration file is the first word: `offload-train CONFIG.yaml` | config config_file
    the model runs its own modules, and model.loss_chunk limits the logits in memory | use_liger_kernel liger_*
    a weight for each --data | data.mixture: interleave_probs mix_strategy
    no such option: `offload-train` trains and evaluates; `offload-train prepare` only tokenises | do_train do_eval
    all rows have the length --seq-len; data.packing=on puts several conversations in a row |
        group_by_length pad_to_max_length pad_to_sequence_len
    evaluations use --micro-batch too | per_device_eval_batch_size
    for a dataset from the hub: --data hub:OWNER/NAME/CONFIGURATION:SPLIT |
        dataset_train_split dataset_test_split dataset_config dataset_split split
    the matrices of blocks follow Muon and all other weights AdamW: optim.name=muon | optim.name: use_muon muon
"""

# Values of other trainers behind the equivalent value, or the replacement for key and value.
_EIGHT_BITS = "optim.moment_dtype=8bit: adamw_8bit adamw8bit adamw_bnb_8bit paged_adamw_8bit pagedadamw8bit adam8bit"
_ADAMW = "adam adamw_torch adamw_torch_fused adamw_hf adamw_fused fusedadam deepspeedcpuadam paged_adamw_32bit"
_WHERE = "gpu: cuda device none cpu: ram host nvme: disk ssd"
_VALUES = {
    "model.dtype": "bf16: bfloat16 bf16_true bf16_mixed fp16: float16 half 16_true 16_mixed 16 "
    "fp32: float32 float full 32_true 32 no",
    "model.attention": "sdpa: flash_attention_2 flash_attention_3 fa2 flash xformers true",
    "model.activation_checkpointing": "on: true unsloth off: false",
    "data.packing": "on: true bfd off: false",
    "data.format": "chat: chatml openai messages chat_template text: raw completion pairs: prompt_completion "
    "alpaca: instruction",
    "data.train_on": "answers: assistant completion",
    "optim.name": f"adamw: {_ADAMW} {_EIGHT_BITS}",
    "optim.schedule": "constant: constant_with_warmup warmuplr cosine: cosine_with_min_lr warmupcosinelr true "
    "linear: warmupdecaylr wsd: warmup_stable_decay",
    "optim.moment_dtype": "8bit: 8 8_bit int8 bf16: bfloat16 fp32: float32",
    "optim.master_dtype": "bf16: bfloat16 fp32: float32",
    "placement.engine": "deepspeed: zero zero1 zero2 zero3 ds",
    # --optimizer places the optimizer state; other trainers use the same flag to choose the optimizer.
    "placement.optimizer": f"optim.name=adamw: adamw {_ADAMW} {_EIGHT_BITS} optim.name=muon: muon {_WHERE}",
    "placement.params": _WHERE,
    "placement.gradients": _WHERE,
    "save.resume": "auto: true yes latest last never: false no none",
    "save.trackers": "save.trackers=[]: none no wandb: true all",
    "tiered.overlap": "forward: true off: false",
}

_COMMANDS = f"""
    train: finetune fine-tune sft fit run pretrain launch start full finetuning finetune_full pretraining
    sample: generate generation inference infer predict complete
    chat: talk interact cli_demo
    export: merge convert save zero_to_fp32 merge-lora merge_lora convert-hf convert_to_hf
    import: migrate import-checkpoint load-checkpoint import_checkpoint
    prepare: preprocess tokenize tokenise prepare-data data prepare_data build-dataset prepare_dataset
    plan: estimate estimate-memory memory dry-run estimate_memory dryrun
    bench: benchmark profile measure speedtest
    tune: autotune search sweep autotuning
    doctor: check env ds_report verify diagnose info
    runs: status history ps list-runs
    report: compare diff
    ls: list recipes templates
    cp: copy
    run the same command again to resume from its newest checkpoint | train: resume continue
    llama.cpp's convert_hf_to_gguf.py converts what it exports, see docs/export.md | export: gguf quantize
    `offload-train cp NAME` copies one of its recipes | ls: init new create setup config configure wizard
    a run computes its validation loss every train.eval_every steps; lm-eval reads an export: docs/export.md |
        eval evaluate test validate lm_eval lm-eval evaluation perplexity
    `offload-train export` writes a directory that vLLM and transformers load |
        server api deploy webui webchat ui vllm-serve
    a run downloads what it needs: --model OWNER/NAME a model, --data hub:OWNER/NAME a dataset | download fetch pull
    {_UPLOADS} | upload push push-to-hub
    `offload-train --version` | version
    `offload-train --help` | help
    {_PREFERENCES} | dpo grpo ppo reward kto rlhf orpo rm
    {_ADAPTERS} | lora qlora peft finetune_lora finetune_adapter
"""
_BY_WORD, _BY_COMMAND = dict(_terms(_TERMS)), dict(_terms(_COMMANDS))
_FAMILIES = {word[:-1]: _BY_WORD.pop(word) for word in [*_BY_WORD] if word.endswith("*")}  # prefix -> term
_BY_VALUE = {key: {word: term.here for word, term in _terms(table)} for key, table in _VALUES.items()}


def term_of(word: str) -> Term | None:
    """Return the equivalent of another trainer's flag or key, such as "--learning-rate"; None if it is unknown."""
    word = plain(word)
    family = next((term for begin, term in _FAMILIES.items() if word.startswith(begin)), None)
    return _BY_WORD.get(word, family)


def value_of(key: str, value: object) -> str | None:
    """Return the equivalent of another trainer's value of a key, or a replacement for key and value."""
    return _BY_VALUE.get(key, {}).get(plain(str(value)).removeprefix("torch."))


def command_of(word: str) -> Term | None:
    """Return the equivalent of another trainer's command; None if it is unknown."""
    return _BY_COMMAND.get(word.lower())


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
