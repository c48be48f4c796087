"""Configuration schema: frozen pydantic models with the type, default and description of every key.

Add or change a key here; `settings.py` fills the models from a YAML file and the command line, and `--help` and
docs/config.md take their text from the descriptions. `auto` means that the plan chooses the value and reports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator


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
LION_BETAS = (0.9, 0.99)  # defaults of the Lion paper


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(_Section):
    """The model, and how its forward and backward run."""

    name: str = Field(
        "gpt2-mini",
        description="a preset (gpt2-mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-10b; random weights), "
        "a directory with a transformers causal language model, or a hub id such as openai-community/gpt2",
    )
    random_init: bool = Field(False, description="take only the shape, with random weights")
    overrides: dict[str, Scalar] = Field(
        {},
        description="keys of the model's own configuration to change (needs random weights), e.g. n_layer: 24",
    )
    dtype: Literal["bf16", "fp16", "fp32"] = Field(
        "bf16",
        description="dtype of weights, activations and gradients; master weights are always fp32 and start from a "
        "model "
        "directory's fp32 weights where it has them; optim.moment_dtype sets the moments; the default is fp16 on a GPU "
        "without bf16 units",
    )
    attention: Literal["auto", "sdpa", "eager"] = Field(
        "auto",
        description="transformers' attention implementation; auto: sdpa where the architecture has it, else eager, "
        "which keeps attention's matrices",
    )
    activation_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto", description="gradient checkpointing, one segment a block; auto: on from 100 M parameters"
    )
    offload_activations: Annotated[
        bool | Literal["cpu", "nvme"], AfterValidator(lambda wish: "cpu" if wish is True else wish)
    ] = Field(
        False,
        description="keep what gradient checkpointing keeps in host memory (cpu, true) or on the drives (nvme) instead "
        "of on the GPU; nvme: tiered only",
    )
    loss_chunk: PositiveInt = Field(
        1024,
        description="tokens whose logits exist at a time in the loss; more of them are recomputed in chunks",
    )
    mlp_chunk: PositiveInt | Literal["auto", "off"] = Field(
        "auto",
        description="tokens that go through a block's MLP at a time, where it computes each by itself, as a trial "
        "shows; auto: all, or the most of 8192, 4096, ... 256 with which a run fits that would not otherwise. Weights' "
        "gradients of the pieces are added up in fp32, and dropout draws otherwise; tiered and plain only",
    )
    freeze: tuple[str, ...] = Field((), description="regular expressions; parameters whose name matches stay fixed")
    trust_remote_code: bool = Field(False, description="let a model directory's or hub id's own Python code run")


class DataSection(_Section):
    """The training text, and how it is tokenized and cut into rows."""

    path: tuple[str, ...] = Field(
        ("builtin",),
        description="text files, jsonl files (packed ones too: .gz, .bz2, .xz, .zst), tables (.parquet, .arrow; "
        "extra: tables), directories of them, what datasets saved, or .bin token files, which follow each other in "
        "this order; builtin: the text shipped here; hub:OWNER/NAME, with /CONFIGURATION and :SPLIT where it has "
        "several: a data set of the hub, which datasets fetches (extra: hub)",
    )
    mixture: tuple[PositiveFloat, ...] = Field(
        (),
        description="a weight for each of data.path: of each epoch's rows this share is that text's, to the row, "
        "whatever its size, by a small one coming around more often; empty: each row once an epoch",
    )
    validation_path: tuple[str, ...] = Field(
        (), description="the same for validation; nothing is then kept back from data.path"
    )
    text_field: str = Field(
        "text", description="field of a jsonl line (at most 64 MiB) or a table's row that holds the text"
    )
    format: Literal["auto", "text", "chat", "sharegpt", "alpaca", "pairs"] = Field(
        "auto",
        description="what a jsonl line or a table's row holds. chat: messages of role and content; sharegpt: "
        "conversations of from and value; alpaca: instruction, input, output, or question and answer by other names; "
        "pairs: prompt and completion; text: text_field; auto: by the keys of the first line, text where it has "
        "text_field",
    )
    train_on: Literal["answers", "all"] = Field(
        "answers",
        description="of conversations and pairs, what is learned: the answers and what ends them, or every token",
    )
    packing: Literal["off", "on"] = Field(
        "off",
        description="on: several conversations in a row, as many as have room, and each of them, or each document of "
        "text, by itself: positions begin anew and attention does not cross; refused for models that a trial at the "
        "start shows not to do that; off: each conversation in a row of its own, documents one after another",
    )
    chat_template: str = Field(
        "auto",
        description="a file with a Jinja template for conversations; auto: the tokenizer's own, or a plain one where "
        "it has none",
    )
    tokenizer: str = Field(
        "auto",
        description="builtin, a directory or a hub id; auto: the model directory's own, builtin for presets",
    )
    seq_len: PositiveInt | Auto = Field("auto", description="tokens in a row; auto: the model's context, at most 1024")
    validation: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.05,
        description="share of the tokens, at their end, that is kept for validation where validation_path names none",
    )
    token_dtype: Literal["auto", "uint16", "uint32"] = Field(
        "auto",
        description="of a .bin file without a .bin.json beside it; auto: as its values show, and refused where they "
        "may be either",
    )
    shuffle: bool = Field(True, description="visit the rows in an order drawn from the seed, another each epoch")
    cache: str = Field("auto", description="directory of token files; auto: ~/.cache/offload-trainer")


class OptimSection(_Section):
    """The optimizer and the learning-rate schedule."""

    name: Literal["adamw", "lion"] = Field(
        "adamw",
        description="the rule of the update; lion (Chen et al. 2023; tiered only): one moment, 8 bytes a parameter "
        "with the master instead of 12; its rate is a third to a tenth of AdamW's",
    )
    lr: PositiveFloat = Field(3e-4, description="peak learning rate")
    betas: tuple[Fraction, Fraction] = Field(
        (0.9, 0.95),
        description="adamw: decay of the first and the second moment; lion: share of the moment in a step, and its "
        "decay, 0.9 and 0.99 where nothing is said",
    )
    eps: PositiveFloat = Field(1e-8, description="adamw only: added to the root of the second moment")
    moment_dtype: Literal["fp32", "bf16", "8bit"] = Field(
        "fp32",
        description="how moments are stored; bf16 (tiered only): rounded stochastically, 8 bytes a parameter with the "
        "master instead of 12; 8bit (adamw only): in blocks of 256 with a scale each, 6 bytes, and with --engine "
        "deepspeed bitsandbytes' on the GPU; masters are fp32 always",
    )
    kernel: Literal["auto", "torch", "native"] = Field(
        "auto",
        description="tiered only: what computes the update; native: compiled here in seconds; auto: native where a "
        "compiler is found and it gives torch's bits, else torch",
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        0.1,
        description="decoupled; on matrices and embeddings, not on biases, norms and other vectors, nor on what "
        "transformers' Trainer spares by name, nor on A_log of state-space layers",
    )
    max_grad_norm: Annotated[float, Field(ge=0)] = Field(
        1.0, description="largest global gradient norm; 0: no clipping"
    )
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="shape of the rate after the warm-up; wsd: constant, then linear over decay_steps",
    )
    warmup_steps: Count | Auto = Field("auto", description="steps of linear warm-up; auto: 2 % of the steps")
    decay_steps: Count | Auto = Field("auto", description="wsd only: steps of the final decay; auto: 20 % of the steps")
    final_lr_ratio: Fraction = Field(0.1, description="rate at the end, as a share of the peak")
    accumulate_dtype: Literal["fp32", "model"] = Field(
        "fp32", description="dtype that gradients are summed in over the micro-batches of a step"
    )
    initial_loss_scale: PositiveFloat = Field(
        65536.0,
        description="fp16 only: where dynamic loss scaling starts, a power of two; a step that overflows changes no "
        "weight and halves it, and counts as a step: the schedule and the data go on",
    )
    loss_scale_window: PositiveInt = Field(1000, description="fp16 only: good steps after which the scale doubles")
    on_nonfinite_grad: Literal["stop", "skip"] = Field(
        "stop",
        description="bf16 and fp32: a NaN or infinity in the gradient stops the run, or skips that step, while the "
        "schedule and the data go on",
    )

    @model_validator(mode="before")
    @classmethod
    def _betas_of_lion(cls, values: Any) -> Any:
        """Default `betas` to Lion's for Lion, and convert a JSON list to the tuple that strict validation expects."""
        if not isinstance(values, dict):
            return values
        given = {"betas": LION_BETAS, **values} if values.get("name") == "lion" else dict(values)
        return given | {"betas": tuple(given["betas"])} if isinstance(given.get("betas"), list) else given


class TrainSection(_Section):
    """Length of the run, batch sizes, evaluation intervals and the seed."""

    steps: PositiveInt = Field(300, description="optimizer steps of the whole run")
    epochs: PositiveFloat | Auto = Field(
        "auto",
        description="how often the run visits each training row, for which it works out steps once the text is "
        "tokenised; 0.5: half of the rows; auto: as steps says",
    )
    micro_batch_size: PositiveInt = Field(4, description="rows in one forward and backward, on each rank")
    gradient_accumulation_steps: PositiveInt = Field(1, description="micro-batches a step, on each rank")
    tokens_per_step: PositiveInt | Auto = Field(
        "auto",
        description="tokens of an optimizer step on all ranks, for which the plan chooses micro_batch and accumulate, "
        "the fastest that fit; auto: as those two say",
    )
    seed: Count = Field(0, description="of the initial weights, the order of the rows and the dropout")
    deterministic: bool = Field(
        False,
        description="on a GPU: torch's deterministic algorithms, slower; without them the backward of attention and "
        "embeddings adds in any order there, and no two runs have the same bits. On a CPU all runs have",
    )
    eval_every: Count = Field(100, description="steps between validations; 0: only at the end")
    eval_rows: PositiveInt = Field(32, description="validation rows each time")
    sample_every: Count = Field(0, description="steps between samples of text; 0: never")
    sample_prompt: str = Field("The ", description="what samples continue")
    sample_tokens: PositiveInt = Field(48, description="length of a sample")


class PlacementSection(_Section):
    """Placement of weights, gradients and optimizer state, and the engine that implements it."""

    engine: Literal["auto", "tiered", "deepspeed", "plain"] = Field(
        "auto",
        description="tiered: ours; deepspeed: stock ZeRO; plain: torch alone, everything on one device; auto: tiered",
    )
    params: Home = Field("auto", description="home of the 16-bit weights")
    optimizer: Home = Field("auto", description="home of master weights and moments")
    nvme: tuple[str, ...] = Field((), description="directories on drives that state may live on")
    gradients: Home = Field(
        "auto",
        description="tiered only: home of a step's gradients, but for those whose whole state is on the GPU, and so "
        "they; auto: the GPU where several micro-batches are added up and it has room, else RAM, or a drive where RAM "
        "is too small",
    )
    gpu_fraction: Fraction | Auto = Field(
        "auto",
        description="tiered only: share of the optimizer state kept and updated on the GPU; auto: as much as fits, "
        "before RAM and drives",
    )
    ram_fraction: Fraction | Auto = Field(
        "auto", description="tiered only: share of the optimizer state kept in RAM; auto: as much as fits"
    )
    gpus: PositiveInt = Field(1, description="processes to start, one a GPU (on a machine without: on the CPU)")
    threads: PositiveInt | Auto = Field("auto", description="CPU threads of each process; auto: its share of the cores")
    hang_timeout: Count = Field(
        1800,
        description="with several ranks: how long one thread of a rank may be in one and the same wait within the "
        "kernel (a driver, a drive, a network's filesystem) before the run ends; 0: for ever",
    )
    force: bool = Field(False, description="run even where the plan says that it does not fit")


class SaveSection(_Section):
    """Run directory, checkpoints, resuming and experiment trackers."""

    output: str = Field("runs/default", description="the run directory")
    every: Count | Auto = Field(
        "auto", description="steps between checkpoints; 0: only when asked for; auto: a tenth of the steps"
    )
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    resume: str = Field(
        "auto", description="auto: the run directory's newest checkpoint, if any; never; or a directory"
    )
    tensorboard: bool = Field(False, description="the same as tensorboard among the trackers")
    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = Field(
        (),
        description="also send the numbers of each step there (extras of these names). TensorBoard, and mlflow without "
        "MLFLOW_TRACKING_URI, write to the run directory, wandb too with WANDB_MODE=offline, trackio to TRACKIO_DIR; "
        "none: nothing is sent anywhere",
    )
    project: str = Field("offload-trainer", description="the name under which trackers collect runs")

    @property
    def all_trackers(self) -> tuple[str, ...]:
        """All selected trackers without duplicates; `tensorboard=True` counts as one of them."""
        return tuple(dict.fromkeys((*(["tensorboard"] if self.tensorboard else []), *self.trackers)))


class ParallelSection(_Section):
    """Tensor and sequence parallelism; `plan --parallel` compares them with data parallelism."""

    tensor: PositiveInt | Auto = Field(
        1,
        description="with --engine deepspeed: ranks that share each product of a block, by DeepSpeed's AutoTP with "
        "ZeRO-1, weights on the GPU; the other ranks have rows of their own. For architectures that transformers has "
        "rules for, such as Llama and Qwen3; checkpoints and exports are of whole weights. auto: as many of a "
        "node's ranks as is forecast to be fastest, 1 where nothing was timed; a step keeps its tokens",
    )
    sequence: PositiveInt = Field(
        1,
        description="tiered only: ranks that share each row, of which each has a piece of seq_len / N tokens, and "
        "attention sees the whole row (Ulysses); the other ranks have rows of their own. Refused for models that a "
        "trial at the start shows to compute something else then (recurrences, attention in chunks)",
    )
    partition_activations: bool = Field(
        False,
        description="with tensor=N: of each checkpointed block's input every rank keeps 1 / N, and all of it is "
        "gathered when the block is computed again",
    )


class TieredSection(_Section):
    """Buffer sizes, overlap and I/O of the tiered engine."""

    page_size: Annotated[int, Field(ge=4096)] = Field(4 << 20, description="parameters updated at a time, at most")
    page_buffers: Annotated[int, Field(ge=2)] = Field(6, description="pages in memory on their way to or from a drive")
    fetch_granularity: Literal["auto", "block", "module"] = Field(
        "auto",
        description="what of a block's weights is on the device at a time, where they live elsewhere; block: all; "
        "module: a part, such as one matrix of its MLP, as far as a trial shows that parts are not needed together; "
        "moments that chance rounds draw otherwise then; auto: module where nothing fits without, else block",
    )
    weight_buffers: Annotated[int, Field(ge=1)] = Field(
        3,
        description="blocks, or parts of them, whose weights are on the device at a time, where they live elsewhere; "
        "where nothing is said and nothing fits: 2, or 1",
    )
    weight_transfer: Literal["auto", "direct", "all_gather"] = Field(
        "auto",
        description="how each of several GPUs of a node gets weights that live in RAM; direct: all of a unit from "
        "there; gather: its part, and the others' from their GPUs; auto: as is forecast to be faster",
    )
    overlap: Literal["auto", "off", "forward", "backward"] = Field(
        "auto",
        description="forward: the update runs behind the next forward; full: that of pages on drives behind the "
        "backward too, with two places; auto: the fastest by the plan's seconds, where it gains 5 % of a step and the "
        "disk has room; forward where this machine was not timed and drives are used",
    )
    state_copies: Literal["auto", 1, 2] = Field(
        "auto",
        description="of a page of state on a drive; 2: on twice the disk, and a kill leaves one whole step; auto: 2 "
        "where the update begins behind the backward or page files that are gone on from have them, else 1",
    )
    master_format: Literal["auto", "fp32", "split"] = Field(
        "auto",
        description="how masters are stored; remainder: the 16 bits that rounding to the bf16 weight takes away, from "
        "which, with the weight, the same fp32 is made: 2 bytes a parameter less of state to keep and to move, while a "
        "dead run's page files hold no masters; checkpoints hold fp32 always; auto: remainder where by the plan that "
        "gains 5 % of a step, or nothing fits without it, else fp32",
    )
    io: Literal["threads", "async_io"] = Field(
        "threads", description="threads: preadv and pwritev; async_io: DeepSpeed's kernel, every byte checked"
    )
    io_threads: PositiveInt = Field(4, description="threads that read, and as many that write")
    io_block_bytes: Annotated[int, Field(ge=4096, multiple_of=4096)] = Field(
        8 << 20, description="bytes of one request"
    )
    checksums: bool = Field(
        False,
        description="compare weights, gradients and activations that are read from drives with what was written, as "
        "state always is; async_io always does",
    )
    drive_speeds: tuple[PositiveFloat, ...] = Field(
        (), description="relative speed of each --nvme, by which state is divided; empty: all alike"
    )


class DeepSpeedSection(_Section):
    """Sizes inside DeepSpeed. auto: derived from the model, so that every placement runs."""

    zero_stage: Literal[1, 2, 3] | Auto = Field(
        "auto",
        description="what ranks divide; 1: the optimizer's state; 2: gradients too; 3: weights too; auto: 2 where "
        "weights are on the GPU and the state there or in RAM, else 3",
    )
    sub_group_size: PositiveInt | Auto = Field("auto", description="parameters updated at a time in ZeRO-3")
    reduce_bucket_size: PositiveInt | Auto = Field("auto", description="gradient elements reduced at a time")
    prefetch_bucket_size: Count | Auto = Field("auto", description="weight elements fetched ahead in ZeRO-3")
    max_live_parameters: PositiveInt | Auto = Field("auto", description="weight elements gathered at a time in ZeRO-3")
    param_buffer_count: PositiveInt | Auto = Field("auto", description="NVMe weights: buffers of the largest weight")
    optimizer_buffer_count: Annotated[int, Field(ge=4)] | Auto = Field(
        "auto", description="NVMe optimizer: buffers of the largest sub-group"
    )
    pipeline_read: bool = Field(True, description="NVMe optimizer: read the next sub-group during the update")
    pipeline_write: bool = Field(True, description="NVMe optimizer: write the last sub-group during the update")
    aio_block_size: PositiveInt = Field(1 << 20, description="bytes of one request to the drive")
    aio_queue_depth: PositiveInt = Field(32, description="requests in flight in each thread")
    aio_threads: PositiveInt = Field(2, description="threads that one transfer is divided over")


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


# Keys and values of versions before 0.1, with their current names.
RENAMED_KEYS: Mapping[str, str] = {
    "model.scratch": "model.random_init",
    "model.checkpointing": "model.activation_checkpointing",
    "data.loss": "data.train_on",
    "optim.states": "optim.moment_dtype",
    "optim.clip": "optim.max_grad_norm",
    "optim.nonfinite": "optim.on_nonfinite_grad",
    "train.micro_batch": "train.micro_batch_size",
    "train.accumulate": "train.gradient_accumulation_steps",
    "placement.hung_seconds": "placement.hang_timeout",
    "tiered.fetch": "tiered.fetch_granularity",
    "tiered.unit_buffers": "tiered.weight_buffers",
    "tiered.take": "tiered.weight_transfer",
    "tiered.places": "tiered.state_copies",
    "tiered.masters": "tiered.master_format",
}
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "tiered.overlap": {"full": "backward"},
    "tiered.master_format": {"remainder": "split"},
    "tiered.weight_transfer": {"gather": "all_gather"},
}


def with_current_names(config: Any) -> Any:
    """Return a recorded configuration, as nested dicts, with the current names of its keys and values.

    It is applied to run.json files of earlier versions. Anything but a dict of sections is returned unchanged.
    """
    if not isinstance(config, dict):
        return config
    found: dict[str, Any] = {}
    for section, values in config.items():
        if not isinstance(values, dict):
            found[section] = values
            continue
        found[section] = {}
        for name, value in values.items():
            key = RENAMED_KEYS.get(f"{section}.{name}", f"{section}.{name}")
            renamed = RENAMED_VALUES.get(key, {})
            found[section][key.partition(".")[2]] = renamed.get(value, value) if isinstance(value, str) else value
    return found


RecordedConfig = Annotated[dict[str, dict[str, Any]], BeforeValidator(with_current_names)]
