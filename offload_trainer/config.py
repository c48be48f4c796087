"""Configuration schema: frozen pydantic models with the type, default and description of every key.

Add or change a key here; `settings.py` fills the models from a YAML file and the command line, and `--help` and
docs/config.md take their text from the descriptions. `auto` means that the plan chooses the value and reports it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator


def _whole(value: Any) -> Any:
    """Return a float that is a whole number, such as 1e3, as an int; anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]
Home = Literal["auto", "gpu", "cpu", "nvme"]
Scalar = bool | int | float | str
RuleName = Literal["adamw", "muon"]  # described in plan/tiered/state_formats.py
STREAM = "stream:"  # begins an entry of data.path that names a streamed data set


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(_Section):
    """The model, and how its forward and backward run."""

    name: str = Field(
        "gpt2-mini",
        description="a preset (gpt2-mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-10b; random weights), "
        "a directory with a transformers causal language model, or a hub id such as openai-community/gpt2",
    )
    random_init: bool = Field(False, description="start from random weights: only the model's configuration is read")
    overrides: dict[str, Scalar] = Field(
        {},
        description="entries of the model's own configuration to change, e.g. n_layer: 24; needs random weights",
    )
    dtype: Literal["bf16", "fp16", "fp32"] = Field(
        "bf16",
        description="dtype of weights, activations and gradients; on a GPU without bf16 units the default is fp16. "
        "Master weights are always fp32 and start from the model directory's fp32 weights if it has them; "
        "optim.moment_dtype sets the dtype of the moments",
    )
    attention: Literal["auto", "sdpa", "eager"] = Field(
        "auto",
        description="transformers' attention implementation; auto: sdpa if the architecture supports it, else eager, "
        "which stores the attention matrices",
    )
    activation_checkpointing: Annotated[
        Count | Literal["auto", "on", "off"], AfterValidator(lambda wish: "off" if wish == 0 else wish)
    ] = Field(
        "auto",
        description="recompute activations in the backward (gradient checkpointing). on: those of all blocks; N: of "
        "the first N (tiered and plain only); auto: on for models of 100 M parameters and more, else off. On a "
        "benchmarked machine, the tiered engine's auto takes fewer blocks if that makes a step 5 % faster and puts "
        "no more on drives; a smaller model that does not fit checkpoints as few blocks as fit",
    )
    offload_activations: Annotated[
        bool | Literal["cpu", "nvme"], AfterValidator(lambda wish: "cpu" if wish is True else wish)
    ] = Field(
        False,
        description="store the block inputs that gradient checkpointing saves in host memory (cpu, true) or on the "
        "drives (nvme) instead of on the GPU; nvme: tiered only",
    )
    loss_chunk: PositiveInt = Field(
        1024,
        description="number of tokens whose logits exist at the same time in the loss; with more tokens, the logits "
        "are computed in chunks, and again in the backward",
    )
    mlp_chunk: PositiveInt | Literal["auto", "off"] = Field(
        "auto",
        description="number of tokens that pass through a block's MLP at the same time, for MLPs that a short trial "
        "shows to treat each token separately; auto: all tokens, or, if the run would not fit, the largest of 8192, "
        "4096, ... 256 with which it fits. Weight gradients of the chunks are summed in fp32, and dropout draws "
        "other random numbers; tiered and plain only",
    )
    compile: Literal["off", "on"] = Field(
        "off",
        description="on: compile the inside of blocks with torch.compile, one function for all blocks of a shape, in "
        "the first step; needs a C++ compiler, and changes the last bits of losses. Evaluation is not compiled. tiered "
        "and plain only",
    )
    kernels: Literal["torch", "liger"] = Field(
        "torch",
        description="liger: Liger-Kernel's Triton kernels in place of the model's norms, rotary embeddings and gated "
        "MLPs, for the architectures that it has them for; needs a GPU and changes the last bits of losses. The loss "
        "stays this program's own (model.loss_chunk). Extra: liger; tiered and plain only",
    )
    freeze: tuple[str, ...] = Field(
        (), description="regular expressions; parameters whose name matches one are not trained"
    )
    base: Literal["model", "nf4", "int8"] = Field(
        "model",
        description="how the frozen matrices of blocks are stored under adapters: in model.dtype, or quantised by "
        "bitsandbytes (extra: qlora) and dequantised on the device when they are used; nf4: 0.53 bytes a parameter; "
        "int8: 1.01. Library only, since this command does not train adapters",
    )
    trust_remote_code: bool = Field(False, description="allow the Python code of a model directory or hub id to run")


class DataSection(_Section):
    """The training text, and how it is tokenized and cut into rows."""

    path: tuple[str, ...] = Field(
        ("builtin",),
        description="text files, jsonl files (also compressed: .gz, .bz2, .xz, .zst), tables (.parquet, .arrow; "
        "extra: tables), directories of these, directories written by datasets' save_to_disk, or .bin token files; "
        "they are read in this order. builtin: the text that comes with the package; hub:OWNER/NAME, with "
        "/CONFIGURATION and :SPLIT if the dataset has several: a dataset from the hub, downloaded with datasets "
        "(extra: hub); stream:OWNER/NAME or stream:PATH: one that is tokenized while the run reads it",
    )
    mixture: tuple[PositiveFloat, ...] = Field(
        (),
        description="one weight for each entry of data.path: its exact share of each epoch's rows, whatever its "
        "size; rows of a small text then repeat within an epoch. Empty: every row once an epoch",
    )
    validation_path: tuple[str, ...] = Field(
        (),
        description="validation text, in the same forms as data.path; no part of data.path is then held out. Of a "
        "stream, the first train.eval_rows rows are read at the start",
    )
    text_field: str = Field(
        "text", description="field of a jsonl line (at most 64 MiB) or a table row that holds the text"
    )
    format: Literal["auto", "text", "chat", "sharegpt", "alpaca", "pairs"] = Field(
        "auto",
        description="what a jsonl line or a table row holds. chat: messages with role and content; sharegpt: "
        "conversations with from and value; alpaca: instruction, input and output, or a question and an answer "
        "under other names; pairs: prompt and completion; text: text_field; auto: detected from the keys of the "
        "first line, text if it has text_field",
    )
    train_on: Literal["answers", "all"] = Field(
        "answers",
        description="which tokens of conversations and prompt-completion pairs count in the loss: the answers with "
        "their end tokens, or all",
    )
    packing: Literal["off", "on"] = Field(
        "off",
        description="on: put as many conversations in a row as fit, and keep conversations, or the documents of a "
        "text, separate: positions restart and attention does not cross their boundaries; refused for models that "
        "fail a trial of this at the start. off: one conversation a row, and documents are concatenated",
    )
    chat_template: str = Field(
        "auto",
        description="file with a Jinja template for conversations; auto: the tokenizer's template, or a plain one if "
        "it has none",
    )
    tokenizer: str = Field(
        "auto",
        description="builtin, a directory or a hub id; auto: the model directory's tokenizer, or builtin for presets",
    )
    seq_len: PositiveInt | Auto = Field(
        "auto", description="tokens in a row (sequence length); auto: the model's context, at most 1024"
    )
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.05,
        description="share of the tokens, taken from the end, kept for validation if validation_path is empty",
    )
    token_dtype: Literal["auto", "uint16", "uint32"] = Field(
        "auto",
        description="dtype of a .bin file that has no .bin.json next to it; auto: detected from the values, and "
        "refused if they could be either",
    )
    shuffle: bool = Field(
        True, description="read the rows in a random order that depends on the seed and changes every epoch"
    )
    shuffle_block_size: Count = Field(
        0,
        description="streams only: shuffle the rows inside each block of this many consecutive rows, which is kept in "
        "memory (4 bytes a token); 0: the stream's own order, whatever data.shuffle says",
    )
    cache: str = Field("auto", description="directory for tokenised text; auto: ~/.cache/offload-trainer")

    @property
    def streamed(self) -> bool:
        """True if the training text is a stream, which is tokenized while the run reads it."""
        return any(path.startswith(STREAM) for path in self.path)

    @property
    def validation_streamed(self) -> bool:
        """True if the validation text is a stream, of which the run reads the first rows."""
        return any(path.startswith(STREAM) for path in self.validation_path)


class OptimSection(_Section):
    """The optimizer and the learning-rate schedule."""

    name: RuleName = Field(
        "adamw",
        description="optimizer; muon (Jordan et al. 2024; tiered only) updates the matrices of blocks as "
        "torch.optim.Muon does, with 8 bytes a parameter, and all other weights as adamw does",
    )
    lr: PositiveFloat = Field(3e-4, description="peak learning rate")
    muon_lr: PositiveFloat | Auto = Field(
        "auto", description="muon only: peak learning rate of the matrices of blocks; auto: optim.lr"
    )
    muon_momentum: Fraction = Field(0.95, description="muon only: Nesterov momentum of the matrices of blocks")
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = Field(
        "match_rms_adamw",
        description="muon only: how the rate of a matrix depends on its shape, as torch.optim.Muon's adjust_lr_fn; "
        "match_rms_adamw: updates are as large as AdamW's, so AdamW's rate and weight decay can be kept; original: "
        "Jordan's, for rates of about 0.02",
    )
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="decay rates of AdamW's first and second moment")
    eps: PositiveFloat = Field(1e-8, description="added to the square root of the second moment")
    moment_dtype: Literal["fp32", "bf16", "8bit"] = Field(
        "fp32",
        description="how moments are stored; bf16 (tiered only): rounded stochastically, 8 bytes a parameter with "
        "the fp32 master weight instead of 12; 8bit (adamw only): quantised in blocks of 256 with one scale each, 6 "
        "bytes a parameter; with --engine deepspeed, bitsandbytes' 8-bit AdamW on the GPU",
    )
    kernel: Literal["auto", "torch", "native"] = Field(
        "auto",
        description="tiered only: implementation of the update; native: a C++ kernel that is compiled in seconds at "
        "the first use; auto: native if a compiler is found and the kernel's results equal torch's bit for bit, "
        "else torch",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.1,
        description="decoupled weight decay of matrices and embeddings; biases, norms and other vectors, parameters "
        "that transformers' Trainer exempts by name, and A_log of state-space layers have none",
    )
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="the global gradient norm is clipped to this; 0: no clipping"
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="shape of the learning rate after the warm-up; wsd: constant, then linear over the last "
        "decay_steps",
    )
    warmup_steps: Count | Auto = Field("auto", description="steps of linear warm-up; auto: 2 % of the steps")
    decay_steps: Count | Auto = Field("auto", description="wsd only: steps of the final decay; auto: 20 % of the steps")
    final_lr_ratio: Fraction = Field(0.1, description="learning rate at the end, as a fraction of the peak")
    schedule_delay: Count = Field(
        0,
        description="steps by which the schedule comes later; 1: the rates of transformers' and torch's schedulers, "
        "whose warm-up begins at 0 and whose final rate would be that of the step after the last",
    )
    accumulate_dtype: Literal["fp32", "model"] = Field(
        "fp32", description="dtype in which gradients are summed over the micro-batches of a step"
    )
    initial_loss_scale: PositiveFloat = Field(
        65536.0,
        description="fp16 only: initial value of the dynamic loss scale, a power of two. A step that overflows "
        "changes no weight and halves the scale; it still counts as a step of the schedule and the data",
    )
    loss_scale_window: PositiveInt = Field(
        1000, description="fp16 only: number of steps without overflow after which the loss scale doubles"
    )
    on_nonfinite_grad: Literal["stop", "skip"] = Field(
        "stop",
        description="bf16 and fp32: what to do on a NaN or infinity in the gradient. stop: end the run; skip: leave "
        "the weights unchanged in that step, which still counts in the schedule and the data",
    )

    @field_validator("betas", mode="before")
    @classmethod
    def _tuple(cls, betas: Any) -> Any:
        """Convert a JSON list to the tuple that strict validation expects."""
        return tuple(betas) if isinstance(betas, list) else betas


class TrainSection(_Section):
    """Length of the run, batch sizes, evaluation intervals and the seed."""

    steps: PositiveInt = Field(300, description="optimizer steps of the whole run")
    epochs: PositiveFloat | Auto = Field(
        "auto",
        description="number of passes over the training rows, from which the number of steps follows once the text "
        "is tokenised; 0.5: half of the rows; auto: train.steps decides",
    )
    micro_batch_size: PositiveInt = Field(4, description="rows of one forward and backward, on each rank")
    gradient_accumulation_steps: PositiveInt = Field(1, description="micro-batches a step, on each rank")
    tokens_per_step: PositiveInt | Auto = Field(
        "auto",
        description="tokens of an optimizer step over all ranks; the plan then chooses micro_batch_size and "
        "gradient_accumulation_steps, the fastest that fit; auto: those two keys decide",
    )
    seed: Count = Field(0, description="seed of the initial weights, the order of the rows and the dropout")
    deterministic: bool = Field(
        False,
        description="on a GPU: use torch's deterministic algorithms, which are slower. Without them, the backward of "
        "attention and embeddings sums in varying order, and two runs differ in their last bits. On a CPU runs are "
        "always reproducible",
    )
    eval_every: Count = Field(100, description="steps between validations; 0: only at the end")
    eval_rows: PositiveInt = Field(32, description="validation rows used each time")
    stop_within: PositiveFloat | Auto = Field(
        "auto",
        description="seconds from a stop signal until the scheduler kills the run. If finishing the step and saving "
        "are expected to take longer, the run stops at once instead, and resumes from its newest checkpoint or page "
        "files; auto: no limit",
    )


class PlacementSection(_Section):
    """Placement of weights, gradients and optimizer state, and the engine that implements it."""

    engine: Literal["auto", "tiered", "deepspeed", "plain"] = Field(
        "auto",
        description="tiered: this package's own engine; deepspeed: stock DeepSpeed ZeRO; plain: torch alone, "
        "everything on one device; auto: tiered",
    )
    params: Home = Field("auto", description="where the 16-bit weights are stored")
    optimizer: Home = Field("auto", description="where the optimizer state (fp32 master weights and moments) is stored")
    nvme: tuple[str, ...] = Field(
        (), description="directories on drives where weights and optimizer state may be stored"
    )
    gradients: Home = Field(
        "auto",
        description="tiered only: where a step's gradients are summed; parameters whose whole state is on the GPU "
        "keep their gradients there in any case. auto: the GPU if a step has several micro-batches and there is "
        "room, else RAM, or a drive if RAM is too small",
    )
    gpu_fraction: Fraction | Auto = Field(
        "auto",
        description="tiered only: share of the optimizer state that is stored and updated on the GPU; auto: as much "
        "as fits, the rest in RAM and on drives",
    )
    ram_fraction: Fraction | Auto = Field(
        "auto", description="tiered only: share of the optimizer state that is stored in RAM; auto: as much as fits"
    )
    gpus: PositiveInt = Field(
        1, description="number of processes (ranks) to start, one for each GPU; without a GPU they run on the CPU"
    )
    threads: PositiveInt | Auto = Field("auto", description="CPU threads of each process; auto: its share of the cores")
    force: bool = Field(False, description="run even if the plan says that it does not fit")

    @property
    def engine_name(self) -> str:
        """The engine's name, with `auto` resolved."""
        return "tiered" if self.engine == "auto" else self.engine

    @property
    def shares(self) -> dict[str, float | Auto]:
        """Return the shares of the optimizer state that the configuration names, by flag; the rest is on drives."""
        return {"--gpu-fraction": self.gpu_fraction, "--ram-fraction": self.ram_fraction}


class SaveSection(_Section):
    """Run directory, checkpoints, resuming and experiment trackers."""

    output: str = Field("runs/default", description="the run directory: logs, metrics and checkpoints")
    every: Count | Auto = Field(
        "auto", description="steps between checkpoints; 0: only on request; auto: a tenth of the steps"
    )
    keep: PositiveInt = Field(2, description="how many of the newest checkpoints are kept")
    resume: str = Field(
        "auto",
        description="auto: resume from the newest checkpoint in the run directory, if there is one; never: start "
        "from step 0; or the directory of a checkpoint",
    )
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        (),
        description="experiment trackers that also receive the metrics of each step (extras of the same names). "
        "tensorboard, and wandb with WANDB_MODE=offline, write to the run directory, trackio to TRACKIO_DIR. "
        "Empty: nothing is sent anywhere",
    )


class ParallelSection(_Section):
    """Tensor and sequence parallelism; `plan --parallel` compares them with data parallelism."""

    tensor: PositiveInt | Auto = Field(
        1,
        description="with --engine deepspeed: number of ranks that share each matrix product of a block (tensor "
        "parallelism), by DeepSpeed's AutoTP with ZeRO-1 and weights on the GPU; groups of this many ranks are "
        "data-parallel to each other. For architectures with a tensor-parallel plan in transformers, such as Llama "
        "and Qwen3; checkpoints and exports hold whole weights. auto: the number of a node's ranks with the fastest "
        "forecast, 1 if nothing was timed; the tokens of a step stay the same",
    )
    sequence: PositiveInt = Field(
        1,
        description="tiered only: number of ranks that share each row (Ulysses sequence parallelism): each holds "
        "seq_len / N of its tokens, and attention sees the whole row; groups of this many ranks are data-parallel "
        "to each other. Refused for models whose results a trial at the start shows to change (recurrent layers, "
        "chunked attention)",
    )
    partition_activations: bool = Field(
        False,
        description="with parallel.tensor=N: each rank stores 1 / N of the input of each checkpointed block, and the "
        "ranks gather it when the block is recomputed",
    )


class TieredSection(_Section):
    """Buffer sizes, overlap and I/O of the tiered engine."""

    page_size: Annotated[int, Field(ge=4096)] = Field(
        4 << 20,
        description="parameters in a page: the optimizer state is read, updated and written in pages of at most this "
        "many",
    )
    page_buffers: Annotated[int, Field(ge=2)] = Field(
        6, description="buffers in RAM for pages that are being read from or written to a drive"
    )
    fetch_granularity: Literal["auto", "block", "module"] = Field(
        "auto",
        description="how much of a block's weights is fetched to the device at a time if they are stored elsewhere. "
        "block: all; module: one part, such as a matrix of its MLP, if a trial shows that the parts are not needed "
        "together (stochastic rounding of bf16 moments then draws other random numbers); auto: module if nothing "
        "fits otherwise, else block",
    )
    weight_buffers: Annotated[int, Field(ge=1)] = Field(
        3,
        description="number of blocks, or of their parts, whose weights are on the device at a time if they are "
        "stored elsewhere; unless it is set, the plan lowers it to 2 or 1 when nothing fits otherwise",
    )
    weight_transfer: Literal["auto", "direct", "all_gather"] = Field(
        "auto",
        description="how several GPUs of a node fetch weights that are stored in RAM. direct: each copies all of "
        "them from RAM; all_gather: each copies its shard, and they exchange the shards; auto: the faster one by "
        "the plan's forecast",
    )
    micro_batch_order: Literal["auto", "depth_first", "breadth_first"] = Field(
        "auto",
        description="order in which the micro-batches of a step pass through the model. depth_first: one after the "
        "other; breadth_first: all of them through a block before the next block, so that weights stored elsewhere are "
        "fetched once a pass instead of once a micro-batch, while the block inputs of all micro-batches are kept; "
        "auto: breadth_first if it is possible, fits, and saves 5 % of a step by the plan's forecast. No result "
        "depends on it",
    )
    overlap: Literal["auto", "off", "forward", "backward"] = Field(
        "auto",
        description="what the optimizer update overlaps with. forward: it runs while the next forward computes; "
        "backward: it also starts during the backward, for pages on drives, which needs two copies of their state, "
        "and with a GPU for pages in RAM, if RAM is left for their old state; off: nothing; auto: the fastest "
        "by the plan's forecast, if it saves 5 % of a step (forward: 2 %) and fits; forward if drives are used and "
        "this machine was not timed",
    )
    state_copies: Literal["auto", 1, 2] = Field(
        "auto",
        description="copies of each page of optimizer state on a drive. 2: the previous step's page is kept, which "
        "takes twice the disk space and leaves a complete step behind when the run is killed; auto: 2 if the update "
        "starts during the backward or the run resumes from page files that have 2, else 1",
    )
    io: Literal["threads", "async_io"] = Field(
        "threads",
        description="how drives are read and written. threads: preadv and pwritev in threads; async_io: DeepSpeed's "
        "kernel, with every byte verified",
    )
    io_threads: PositiveInt = Field(4, description="number of threads that read, and of threads that write")
    io_block_bytes: Annotated[int, Field(ge=4096, multiple_of=4096)] = Field(
        8 << 20, description="bytes of one read or write request"
    )
    checksums: bool = Field(
        False,
        description="also verify checksums of weights, gradients and activations that are read from drives, as is "
        "always done for optimizer state; async_io always verifies them",
    )
    drive_speeds: tuple[PositiveFloat, ...] = Field(
        (), description="relative speed of each --nvme directory, by which the state is distributed; empty: all equal"
    )


class DeepSpeedSection(_Section):
    """Sizes inside DeepSpeed. auto: derived from the model, so that every placement runs."""

    zero_stage: Literal[1, 2, 3] | Auto = Field(
        "auto",
        description="what ZeRO shards over the ranks; 1: optimizer state; 2: gradients too; 3: weights too; auto: 2 "
        "if the weights are on the GPU and the state is there or in RAM, else 3",
    )
    sub_group_size: PositiveInt | Auto = Field("auto", description="ZeRO-3: parameters updated at a time")
    reduce_bucket_size: PositiveInt | Auto = Field("auto", description="gradient elements reduced at a time")
    prefetch_bucket_size: Count | Auto = Field("auto", description="ZeRO-3: weight elements prefetched")
    max_live_parameters: PositiveInt | Auto = Field("auto", description="ZeRO-3: weight elements gathered at a time")
    param_buffer_count: PositiveInt | Auto = Field(
        "auto", description="weights on NVMe: number of buffers, each as large as the largest weight"
    )
    optimizer_buffer_count: Annotated[int, Field(ge=4)] | Auto = Field(
        "auto", description="optimizer state on NVMe: number of buffers, each as large as the largest sub-group"
    )
    pipeline_read: bool = Field(True, description="optimizer state on NVMe: read the next sub-group during the update")
    pipeline_write: bool = Field(
        True, description="optimizer state on NVMe: write the previous sub-group during the update"
    )
    aio_block_size: PositiveInt = Field(1 << 20, description="bytes of one request to a drive")
    aio_queue_depth: PositiveInt = Field(32, description="requests in flight in each thread")
    aio_threads: PositiveInt = Field(2, description="threads that share one transfer")


class TrainConfig(_Section):
    """The complete configuration. Sections are named as on the command line: ``optim.lr=1e-3``."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    placement: PlacementSection = PlacementSection()
    save: SaveSection = SaveSection()
    parallel: ParallelSection = ParallelSection()
    tiered: TieredSection = TieredSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
