"""Configuration schema: frozen pydantic models with the type, default and description of every key.

Add or change a key here; `settings/` fills the models from a YAML file and the command line, and `--help` and
docs/config.md show the keys' docstrings. `auto` means that the plan chooses the value and reports it.
"""

from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """Return a float that is a whole number, such as 1e3, as an int; anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _day(value: str) -> str:
    try:
        return value if value == "auto" else date.fromisoformat(value).isoformat()
    except ValueError:
        raise ValueError("a day, such as 2026-01-31, or auto") from None


PositiveInt = Annotated[int, Field(gt=0), BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
PositiveFloat = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Auto = Literal["auto"]
Home = Literal["auto", "gpu", "cpu", "nvme"]
RuleName = Literal["adamw", "muon"]  # described in plan/tiered/state_formats.py
STREAM = "stream:"  # begins an entry of data.path that names a streamed data set


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelSection(_Section):
    """The model, and how its forward and backward run."""

    name: str = "gpt2-mini"
    """a preset (gpt2-mini, gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-10b; random weights), a directory of a
    transformers causal language model, or a hub id"""
    random_init: bool = False
    """start from random weights; only the model's configuration is read"""
    overrides: dict[str, bool | int | float | str] = {}
    """entries of the model's configuration to change, e.g. n_layer: 24; needs random weights"""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """dtype of weights, activations and gradients; fp16 on a GPU without bf16 units. Master weights:
    optim.master_dtype"""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """transformers' attention implementation; auto: sdpa where the architecture supports it, else eager"""
    activation_checkpointing: Annotated[
        Count | Literal["auto", "on", "off"], AfterValidator(lambda wish: "off" if wish == 0 else wish)
    ] = "auto"
    """recompute activations in the backward, of all blocks (on) or the first N (not with deepspeed); auto: on from 100
    M parameters, of fewer blocks where a forecast from measured rates is 5 % faster; smaller models: as few as fit"""
    offload_activations: bool = False
    """keep the inputs of checkpointed blocks in RAM until their backward"""
    loss_chunk: PositiveInt = 1024
    """tokens whose logits exist at the same time in the loss"""
    freeze: tuple[str, ...] = ()
    """regular expressions; parameters whose name matches one are not trained"""
    base: Literal["model", "nf4", "int8"] = "model"
    """library only: how frozen matrices of blocks are stored under adapters; nf4: 0.53 bytes a parameter, int8: 1.01
    (extra: qlora)"""
    trust_remote_code: bool = False
    """allow the Python code of a model directory or hub id to run"""


class DataSection(_Section):
    """The training text, and how it is tokenized and cut into rows."""

    path: tuple[str, ...] = ("builtin",)
    """files of text, JSON, CSV (also .gz, .bz2, .xz, .zst), tables (.parquet, .arrow; extra: tables), directories of
    these (of several splits train) or of datasets' save_to_disk, .bin token files; builtin: the text of the package;
    hub:OWNER/NAME[/CONFIGURATION][:SPLIT] (extra: hub); stream:OWNER/NAME or stream:PATH: tokenized while the run reads
    it"""
    mixture: tuple[PositiveFloat, ...] = ()
    """a weight for each entry of data.path: its share of each epoch's rows; empty: every row once an epoch"""
    validation_path: tuple[str, ...] = ()
    """validation text, in the forms of data.path except stream:; nothing of data.path is then held out"""
    text_field: str = "text"
    """field of a JSON record (at most 64 MiB) or table row that holds the text"""
    format: Literal["auto", "text", "chat", "sharegpt", "alpaca", "pairs"] = "auto"
    """what a JSON record or table row holds. chat: messages with role and content; sharegpt: conversations with from
    and value; alpaca: instruction, input, output; pairs: prompt, completion; text: text_field; auto: by the keys of the
    first line"""
    train_on: Literal["answers", "all"] = "answers"
    """which tokens of conversations and pairs count in the loss: answers with their end tokens, or all"""
    packing: Literal["off", "on"] = "off"
    """on: several conversations or documents a row, kept apart by positions and attention, where a trial shows that the
    model does so; off: one conversation a row, documents concatenated"""
    chat_template: str = "auto"
    """file with a Jinja template for conversations; auto: the tokenizer's, or a plain one"""
    template_date: Annotated[str, AfterValidator(_day)] = "auto"
    """day that a chat template prints which asks for today's (strftime_now), as 2026-01-31; auto: the day of the first
    start, also when the run resumes"""
    tokenizer: str = "auto"
    """builtin, a directory or a hub id; auto: the model directory's, or builtin for presets"""
    seq_len: PositiveInt | Auto = "auto"
    """tokens in a row; auto: the model's context, at most 1024"""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """share of the tokens, from the end, held out if validation_path is empty"""
    shuffle: bool | PositiveInt = True
    """read rows in a random order that the seed determines and every epoch changes. A stream is read in its own order,
    or with N shuffled within blocks of N rows, held in memory"""
    cache: str = "auto"
    """directory for tokenised text; auto: ~/.cache/offload-trainer"""

    @property
    def shuffled_block(self) -> int:
        """The rows of a stream that are shuffled together; 0: none."""
        return 0 if isinstance(self.shuffle, bool) else self.shuffle

    @property
    def streamed(self) -> bool:
        """True if the training text is a stream, which is tokenized while the run reads it."""
        return any(path.startswith(STREAM) for path in self.path)


class OptimSection(_Section):
    """The optimizer and the learning-rate schedule."""

    name: RuleName = "adamw"
    """adamw, or muon (tiered only): matrices of blocks as torch.optim.Muon with adjust_lr_fn=match_rms_adamw, all other
    weights as adamw"""
    lr: PositiveFloat = 3e-4
    """peak learning rate"""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """decay rates of AdamW's moments"""
    eps: PositiveFloat = 1e-8
    """added to the square root of the second moment"""
    moment_dtype: Literal["fp32", "bf16", "8bit"] = "fp32"
    """how moments are stored; bytes a parameter with the master weight: fp32 12; bf16 8, rounded stochastically (tiered
    only); 8bit 6, in blocks of 256 (adamw only)"""
    master_dtype: Literal["fp32", "bf16"] = "fp32"
    """how master weights are stored; bf16: rounded stochastically after each update, 2 bytes a parameter less (tiered,
    adamw and --dtype bf16 only)"""
    kernel: Literal["auto", "torch", "native"] = "auto"
    """tiered only: implementation of the update; native: compiled C++; auto: native if there is a compiler and its
    results equal torch's, else torch"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """decoupled weight decay of matrices and embeddings; vectors, and parameters that transformers' Trainer exempts,
    have none"""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """limit of the global gradient norm; 0: no clipping"""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """learning rate after the warm-up; wsd: constant, then linear over the last decay_steps"""
    warmup_steps: Count | Auto = "auto"
    """steps of linear warm-up; auto: 2 % of the steps"""
    decay_steps: Count | Auto = "auto"
    """wsd only: steps of the final decay; auto: 20 % of the steps"""
    final_lr_ratio: Fraction = 0.1
    """rate at the end, and of wsd at the start, as a share of the peak"""
    schedule_delay: Count = 0
    """steps by which the schedule comes later; 1: the rates of transformers' and torch's schedulers"""
    on_nonfinite_grad: Literal["stop", "skip"] = "stop"
    """bf16, fp32: on NaN or infinity in the gradient, end the run (stop) or leave the weights unchanged in that step
    (skip)"""


class TrainSection(_Section):
    """Length of the run, batch sizes, evaluation intervals and the seed."""

    steps: PositiveInt = 300
    """optimizer steps of the whole run"""
    epochs: PositiveFloat | Auto = "auto"
    """passes over the training rows, which determine the steps; auto: train.steps decides"""
    micro_batch_size: PositiveInt = 4
    """rows of one forward and backward, on each rank"""
    gradient_accumulation_steps: PositiveInt = 1
    """micro-batches a step, on each rank"""
    seed: Count = 0
    """seed of initial weights, order of rows and dropout"""
    deterministic: bool = False
    """on a GPU: use torch's deterministic, slower algorithms, so that runs repeat bit for bit; a CPU always does"""
    eval_every: Count = 100
    """steps between validations; 0: only at the end"""
    eval_rows: PositiveInt = 32
    """validation rows used each time"""
    stop_within: PositiveFloat | Auto = "auto"
    """seconds from a stop signal until the scheduler kills the run; it stops at once if the step and a save would take
    longer; auto: no limit"""

    @property
    def known_steps(self) -> int | None:
        """The optimizer steps of the run; None if they follow from `epochs` and the data."""
        return self.steps if self.epochs == "auto" else None


class PlacementSection(_Section):
    """Placement of weights, gradients and optimizer state, and the engine that implements it."""

    engine: Literal["auto", "tiered", "deepspeed"] = "auto"
    """tiered: this package's own; deepspeed: stock ZeRO; auto: tiered"""
    params: Home = "auto"
    """where the 16-bit weights are stored"""
    optimizer: Home = "auto"
    """where the optimizer state (master weights, moments) is stored"""
    nvme: tuple[str, ...] = ()
    """directories on drives for weights and optimizer state"""
    gradients: Home = "auto"
    """tiered only: where gradients are summed, except those whose state is on the GPU; auto: the GPU for several
    micro-batches where there is room, else RAM, else a drive"""
    gpu_fraction: Fraction | Auto = "auto"
    """tiered only: share of the optimizer state on the GPU; auto: as much as fits"""
    ram_fraction: Fraction | Auto = "auto"
    """tiered only: share of the optimizer state in RAM; auto: as much as fits"""
    gpus: PositiveInt = 1
    """processes (ranks) to start, one for each GPU; without a GPU they run on the CPU"""
    threads: PositiveInt | Auto = "auto"
    """CPU threads of each process; auto: its share of the cores"""
    force: bool = False
    """run even if the plan says that it does not fit"""

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

    output: str = "runs/default"
    """run directory: logs, metrics, checkpoints"""
    every: Count | Auto = "auto"
    """steps between checkpoints; 0: on request, and the weights alone at the end; auto: a tenth of the steps"""
    keep: PositiveInt = 2
    """how many of the newest checkpoints are kept"""
    resume: str = "auto"
    """auto: from the newest checkpoint in the run directory, if any; never: from step 0; or a checkpoint's directory"""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """experiment trackers that also receive the metrics of each step (extras of the same names). tensorboard, and wandb
    with WANDB_MODE=offline, write to the run directory, trackio to TRACKIO_DIR. Empty: nothing is sent anywhere"""


class ParallelSection(_Section):
    """Tensor and pipeline parallelism; `plan --parallel` compares them with data parallelism."""

    tensor: PositiveInt = 1
    """deepspeed only: ranks that share each product of a block, by AutoTP with ZeRO-1 and weights on the GPU, for
    architectures with a tensor-parallel plan in transformers"""
    pipeline: PositiveInt | Auto = 1
    """tiered only: ranks of a node that compute one model together, with one rank's bits. auto: all of a node if
    faster, with as many times --accumulate for the same rows a step"""


class TieredSection(_Section):
    """Buffer sizes, schedule and copies of the tiered engine."""

    page_size: Annotated[int, Field(ge=4096)] = 4 << 20
    """largest number of parameters that are read, updated and written at a time"""
    page_buffers: Annotated[int, Field(ge=2)] = 6
    """buffers in RAM for pages on their way from or to a drive"""
    weight_buffers: Annotated[int, Field(ge=1)] = 3
    """blocks whose fetched weights are on the device at a time; unless set, lowered to 2 or 1 when nothing fits
    otherwise"""
    weight_transfer: Literal["auto", "direct", "all_gather"] = "auto"
    """how GPUs of a node fetch weights in RAM. direct: each copies all; all_gather: each copies a shard, and they
    exchange them; auto: the faster forecast"""
    micro_batch_order: Literal["auto", "depth_first", "breadth_first"] = "auto"
    """depth_first: one micro-batch after the other; breadth_first: all through a block before the next, so that weights
    are fetched once a pass; auto: breadth_first where it fits and saves 5 % of a step. Results are equal"""
    overlap: Literal["auto", "off", "forward", "backward"] = "auto"
    """what the update overlaps with. forward: the next forward; backward: also this backward, for pages on drives (two
    copies of their state) and, with a GPU, in RAM; off: nothing; auto: the fastest forecast that saves 5 % of a step
    (forward: 2 %); forward if drives are used and nothing was timed"""
    state_copies: Literal["auto", 1, 2] = "auto"
    """copies of each page on a drive; 2 leaves a complete step behind when the run is killed; auto: 2 if the update
    starts during the backward, or if resumed page files have 2"""


class DeepSpeedSection(_Section):
    """Sizes inside DeepSpeed. auto: derived from the model, so that every placement runs."""

    zero_stage: Literal[1, 2, 3] | Auto = "auto"
    """what ZeRO shards. 1: optimizer state; 2: gradients too; 3: weights too; auto: 2 with weights on the GPU and no
    state on NVMe, else 3"""
    sub_group_size: PositiveInt | Auto = "auto"
    """ZeRO-3: parameters updated at a time"""
    reduce_bucket_size: PositiveInt | Auto = "auto"
    """gradient elements reduced at a time"""
    prefetch_bucket_size: Count | Auto = "auto"
    """ZeRO-3: weight elements prefetched"""
    max_live_parameters: PositiveInt | Auto = "auto"
    """ZeRO-3: weight elements gathered at a time"""
    param_buffer_count: PositiveInt | Auto = "auto"
    """weights on NVMe: number of buffers, each as large as the largest weight"""
    optimizer_buffer_count: Annotated[int, Field(ge=4)] | Auto = "auto"
    """optimizer state on NVMe: number of buffers, each as large as the largest sub-group"""
    pipeline_read: bool = True
    """optimizer state on NVMe: read the next sub-group during the update"""
    pipeline_write: bool = True
    """optimizer state on NVMe: write the previous sub-group during the update"""
    aio_block_size: PositiveInt = 1 << 20
    """bytes of one request to a drive"""
    aio_queue_depth: PositiveInt = 32
    """requests in flight in each thread"""
    aio_threads: PositiveInt = 2
    """threads that share one transfer"""


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

    def with_keys(self, section: str, **keys: Any) -> Self:
        """Return the configuration with other values of some of a section's keys."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=keys)})
