"""Implement the `Engine` protocol with stock DeepSpeed: ZeRO-1, ZeRO-Offload (stage 2) and ZeRO-Infinity (stage 3).

    build under zero.Init  ->  deepspeed.initialize  ->  write masters and weights one by one  ->  train_step ...

Most of the code works around what DeepSpeed gets wrong or lacks: initial weights, rotary buffers (the bf16 engine
rounds them), Adam's bias correction after a resume, and checkpoints that are independent of ranks and flat buffers.
DeepSpeed's configuration is a pure function that golden files test. No other module uses DeepSpeed's keys.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from offload_trainer.common.errors import TrainerError
from offload_trainer.common.packages import is_installed, lacks, to_install
from offload_trainer.common.stdio import write_now
from offload_trainer.config import DeepSpeedSection, OptimSection
from offload_trainer.data.rows import Batch, weights_in_step
from offload_trainer.engine.protocol import StepResult
from offload_trainer.model.init_weights import set_buffers
from offload_trainer.model.loader import ModelSource
from offload_trainer.model.pretrained import as_parameter
from offload_trainer.optim import state_files
from offload_trainer.optim.state_files import (
    CONSTANT,
    BlockingSnapshot,
    EngineState,
    LossScale,
    read_engine_state,
    read_tensors,
)
from offload_trainer.plan.deepspeed import ZeroSizes
from offload_trainer.plan.shape import decay_groups
from offload_trainer.plan.tiered.state_formats import ADAMW, KINDS, MOMENTS
from offload_trainer.plan.tiers import Placement
from offload_trainer.plan.workload import Workload
from offload_trainer.ranks import all_gather_json, join_torch
from offload_trainer.storage.locks import exclusive_lock
from offload_trainer.storage.owned_dirs import reason
from offload_trainer.storage.tensorfile import DTYPES
from offload_trainer.telemetry.meters import PhaseClock

logger = logging.getLogger(__name__)

_BUILDS = {"cpu_adam": ("cpu_adam",), "async_io": ("async_io", "pin_memory")}  # the extensions that each kernel builds
_LONGEST_BUILD = 1800.0  # seconds that a build by another process may take
PATIENCE = 5.0  # seconds after which a lock without a build is stale; loading a built extension takes less


# Every key is written out, because DeepSpeed's defaults differ between versions and it ignores unknown keys silently.
def deepspeed_config(
    work: Workload,
    optim: OptimSection,
    section: DeepSpeedSection,
    placement: Placement,
    sizes: ZeroSizes,
    *,
    accelerator: str,
    swap_directory: str | None,
) -> dict[str, Any]:
    """Return DeepSpeed 0.19's configuration for one run.

    `accelerator` is `cuda` or `cpu`. `swap_directory` is the run's private directory on the drive, which is needed if
    anything is placed on NVMe. Optimizers that run on the accelerator are passed to DeepSpeed as objects, so only
    DeepSpeedCPUAdam has an `optimizer` section.
    """
    words: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": work.accumulate,
        "train_batch_size": work.micro_batch * work.accumulate * work.world,  # includes ranks that share rows
        "gradient_clipping": optim.max_grad_norm,
        "steps_per_print": 1_000_000_000,  # our own loop reports
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,  # bitsandbytes' AdamW
        "zero_force_ds_cpu_optimizer": False,  # allow torch's AdamW if the optimizer is on the accelerator
    }
    if work.dtype == "bf16":
        words["bf16"] = {"enabled": True, "check_grad_overflow": True}
    elif work.dtype == "fp16":
        words["fp16"] = {
            "enabled": True,
            "loss_scale": 0,  # dynamic
            "initial_scale_power": int(state_files.INITIAL_SCALE).bit_length() - 1,
            "loss_scale_window": state_files.WINDOW,
            "hysteresis": 1,  # halve at the first overflow, as torch's GradScaler does
            "min_loss_scale": 1,
        }
    words["zero_optimization"] = _zero(section, placement, sizes, gpu=accelerator == "cuda", swaps=swap_directory)
    if work.accumulate > 1:
        words["data_types"] = {"grad_accum_dtype": "fp32"}
    if placement.optimizer != "gpu":
        adam = {"lr": optim.lr, "betas": list(optim.betas), "eps": optim.eps, "weight_decay": optim.weight_decay}
        # DeepSpeed uses DeepSpeedCPUAdam if the optimizer is offloaded.
        words["optimizer"] = {"type": "AdamW", "params": {**adam, "torch_adam": False, "adam_w_mode": True}}
    if work.tensor > 1:
        # AutoTP's split rules by weight name, so that it does not guess
        rules = {"column": ("column", False), "row": ("row", False), "summed": ("skip", True)}
        specs = [
            {"patterns": [f".*{re.escape(name)}$" for name in names], "partition_type": kind, "grad_allreduce": summed}
            for split, (kind, summed) in rules.items()
            if (names := [w.name for w in work.shape.weights if w.split == split and not w.name.endswith(".bias")])
        ]
        partition = {"use_default_specs": False, "strict_mode": False, "layer_specs": specs}
        words["tensor_parallel"] = {"autotp_size": work.tensor, "partition_config": partition}
    if swap_directory is not None:
        words["aio"] = {
            "block_size": section.aio_block_size,
            "queue_depth": section.aio_queue_depth,
            "intra_op_parallelism": section.aio_threads,
            "single_submit": False,
            "overlap_events": True,
        }
    return words


def _zero(
    section: DeepSpeedSection, placement: Placement, sizes: ZeroSizes, *, gpu: bool, swaps: str | None
) -> dict[str, Any]:
    """Return the `zero_optimization` section; `gpu`: there is one, `swaps`: the directory on the drive."""

    def away(device: str, **on_drive: Any) -> dict[str, Any]:
        kept: dict[str, Any] = {"device": str(device), "pin_memory": gpu}
        return kept | {"nvme_path": swaps, **on_drive} if device == "nvme" else kept

    zero: dict[str, Any] = {
        "stage": placement.stage,
        "contiguous_gradients": True,
        "overlap_comm": gpu,
        "reduce_scatter": True,
        "reduce_bucket_size": sizes.reduce_bucket,
        "allgather_bucket_size": sizes.reduce_bucket,
    }
    if placement.optimizer != "gpu":
        flags = {"pipeline_read": section.pipeline_read, "pipeline_write": section.pipeline_write, "fast_init": False}
        zero["offload_optimizer"] = away(placement.optimizer, buffer_count=sizes.optimizer_buffers, **flags)
    if placement.stage < 3:
        zero["use_multi_rank_bucket_allreduce"] = False  # each rank receives only its shard
    else:
        zero |= {
            "sub_group_size": sizes.sub_group,
            "stage3_prefetch_bucket_size": sizes.prefetch_bucket,
            "stage3_param_persistence_threshold": sizes.persistent,
            "stage3_max_live_parameters": sizes.max_live,
            "stage3_max_reuse_distance": sizes.max_live,
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    if placement.params != "gpu":
        buffers = {"buffer_count": sizes.weight_buffers, "buffer_size": sizes.weight_buffer_elements, "max_in_cpu": 0}
        zero["offload_param"] = away(placement.params, **buffers)
    return zero


def start_processes() -> int:
    """Set up torch.distributed with a store private to this run, and DeepSpeed on top; return the number of ranks."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    with importing("deepspeed", feature="--engine deepspeed"):
        import deepspeed
        from deepspeed.utils import logger as log

    log.setLevel(logging.WARNING)
    # This is a kernel for inference on several processes; training never calls it, and it takes 40 s to build.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        join_torch(backend)
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed.comm.get_world_size()


class DeepSpeedEngine:
    """An engine that trains `source` with DeepSpeed; `words` is DeepSpeed's configuration for `placement`."""

    def __init__(
        self,
        source: ModelSource,
        work: Workload,
        optim: OptimSection,
        *,
        placement: Placement,
        words: dict[str, Any],
        load_weights: bool = True,
    ) -> None:
        import deepspeed

        self._rank, self._world = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
        self.rank, self.world = self._rank // work.tensor, self._world // work.tensor  # data-parallel ranks
        self._placement = placement
        self._dtype = DTYPES[work.dtype]
        if placement.optimizer != "gpu":
            load_kernel("cpu_adam")
        if "nvme" in (placement.params, placement.optimizer):
            load_kernel("async_io")
        # Under zero.Init each module is partitioned when it is created.
        context = deepspeed.zero.Init(config_dict_or_path=words) if placement.stage == 3 else nullcontext()
        module = source.build(
            dtype=self._dtype,
            context=context,
            # Non-reentrant checkpointing gives wrong gradients with weights on NVMe: DeepSpeed
            # reuses the buffer of a weight before its recomputation has ended (seen in 0.19.8).
            reentrant=placement.params == "nvme",
            offload=work.offload_activations,
            checkpointed=work.checkpointed,
        )
        if placement.stage < 3:
            module.to(_device())
        self._parameters: dict[str, nn.Parameter] = dict(module.model.named_parameters())
        self._trained = {weight.name: weight.shape for weight in source.shape.weights if weight.trainable}
        self._fixed = {weight.name: weight.shape for weight in source.shape.weights if not weight.trainable}
        decayed, plain = decay_groups(source.shape.weights)
        groups = [
            {"params": [self._parameters[weight.name] for weight in weights], "weight_decay": decay}
            for weights, decay in ((decayed, optim.weight_decay), (plain, 0.0))
            if weights
        ]
        settings: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
        optimizer: torch.optim.Optimizer | None = None  # None: DeepSpeed creates it, for state off the accelerator
        if "optimizer" not in words and optim.moment_dtype == "8bit":
            with importing("bitsandbytes", feature="optim.moment_dtype=8bit with --engine deepspeed"):
                import bitsandbytes

            optimizer = bitsandbytes.optim.AdamW8bit(groups, **settings)
        elif "optimizer" not in words:
            optimizer = torch.optim.AdamW(groups, fused=True, **settings)
        made = deepspeed.initialize(model=module, model_parameters=groups, optimizer=optimizer, config=words)
        self._engine, self._optimizer, _, _ = made
        place, group = 0, None
        if work.tensor > 1:
            from deepspeed.utils import groups as groups_of_ranks

            group = groups_of_ranks.get_tensor_model_parallel_group()
            place = torch.distributed.get_rank(group)
        divided = [weight for weight in source.shape.weights if work.tensor > 1 and weight.split in _DIVIDED]
        self._parts = Parts({weight.name: _DIVIDED[weight.split] for weight in divided}, work.tensor, place, group)
        for name, value in source.weights() if load_weights else ():
            # After initialize, because DeepSpeed would create masters from the rounded weights.
            self._write(name, "master" if name in self._trained else "fixed", value)
        set_buffers(module.model, source.buffers(), _device())  # the 16-bit engine, or zero.Init, may have rounded them
        self._betas = optim.betas
        self._missed: dict[str, int] = {}  # steps that a weight had missed when it was loaded
        self._arrived: set[str] = set()  # weights with a gradient in this micro-batch
        for name in self._trained:
            self._parameters[name].register_hook(lambda _, name=name: self._arrived.add(name))

    # -- a step -------------------------------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[Batch], *, lr: float, clock: PhaseClock) -> StepResult:
        import deepspeed

        self._engine.train()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        scale = float(self._optimizer.loss_scale)
        skipped_before = self._engine.skipped_steps
        losses = []
        # The weight of each micro-batch in the mean over the step's targets on all ranks, of which this rank's are
        # used. Ranks that share rows have equal counts, so their weights are right as well.
        counts = all_gather_json([batch.counted for batch in batches])
        first = len(batches) * self._rank
        weights = weights_in_step([n for each in counts for n in each])[first : first + len(batches)]
        for batch, weight in zip(batches, weights, strict=True):
            with clock.phase("forward"):
                loss = self._engine(*batch.arguments(_device(), training=True)) * weight
                losses.append(loss.detach().float())
            with clock.phase("backward"):
                self._engine.backward(loss)
                self._refuse_without_gradient()
            with clock.phase("update"):
                self._engine.step()  # updates only after the last micro-batch
        skipped = self._engine.skipped_steps > skipped_before
        norm = None if skipped else float(self._engine.get_global_grad_norm())
        mean = torch.stack(losses).mean()
        if self._world > 1:
            deepspeed.comm.all_reduce(mean)
        return StepResult(loss=float(mean / self._world), grad_norm=norm, loss_scale=scale, skipped=skipped)

    def _refuse_without_gradient(self) -> None:
        """Raise TrainerError if a weight has no gradient in this micro-batch, before anything changes.

        DeepSpeed would use an older gradient from its buffers, both in the sum over micro-batches and in the update.
        """
        without = [name for name in self._trained if name not in self._arrived]
        self._arrived.clear()
        if without:
            raise TrainerError(
                f"{len(without)} of {len(self._trained)} weights got no gradient ({', '.join(without[:3])}"
                f"{', ...' if len(without) > 3 else ''}), and stock DeepSpeed would update them with an older one: use "
                "--engine tiered, or freeze them with model.freeze"
            )

    def synchronize(self) -> None:
        """Return immediately, because a step has finished when `train_step` returns."""

    def abandon_step(self) -> None:
        raise TrainerError("DeepSpeed keeps no state of the last step while the next one runs")

    @torch.no_grad()
    def eval_loss(self, batch: Batch) -> float:
        self._engine.eval()
        return float(self._engine(*batch.arguments(_device(), training=False)))

    # -- state --------------------------------------------------------------------------------------------------------

    def named_master_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._trained:
            yield name, self._read(name, "master")
        for name in self._fixed:
            yield name, self._read(name, "fixed").float()

    def snapshot(self) -> BlockingSnapshot:
        steps, scale, scaler = self._optimizer_steps(), CONSTANT, self._optimizer.loss_scaler
        if self._dtype is torch.float16:
            good_steps = scaler.cur_iter - scaler.last_overflow_iter - 1
            scale = LossScale(float(scaler.cur_scale), scaler.scale_window, good_steps)
        of_weights = {name: steps - missed for name, missed in self._missed.items()}
        state = EngineState(optimizer_steps=steps, weight_steps=of_weights, loss_scale=scale)
        self._link_moments()
        return BlockingSnapshot(state, self._trained, self._fixed, self._dtype, self._read)

    def load(self, directory: Path) -> None:
        state = read_engine_state(directory, rule=ADAMW)
        # DeepSpeed uses one step count for all bias corrections; each weight's count is kept for later checkpoints.
        self._missed = {name: state.optimizer_steps - count for name, count in state.weight_steps.items()}
        self._make_moments(state.optimizer_steps)
        shapes = dict.fromkeys(KINDS if state.optimizer_steps else ["master"], self._trained)
        for kind, of_kind in (shapes | ({"fixed": self._fixed} if self._fixed else {})).items():
            for name, tensor in read_tensors(directory, kind, shapes=of_kind):
                self._write(name, kind, tensor)
        scaler = self._optimizer.loss_scaler
        if self._dtype is torch.float16 and state.loss_scale.window:  # None: the earlier run was not in fp16
            scaler.cur_scale, scaler.scale_window = state.loss_scale.value, state.loss_scale.window
            scaler.cur_iter = state.loss_scale.good_steps
            scaler.last_overflow_iter = -1

    def _read(self, name: str, kind: str) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        parameter = self._parameters[name]
        if kind == "fixed":
            with _gathered(parameter) as whole:
                return self._parts.whole(name, whole.detach()).to("cpu", copy=True)
        if kind == "master":
            tensor = safe_get_full_fp32_param(parameter)
        elif self._optimizer_steps() == 0:
            return torch.zeros(self._trained[name])
        else:
            tensor = safe_get_full_optimizer_state(parameter, kind)
        part = tensor.detach().float().reshape(getattr(parameter, "ds_shape", parameter.shape))
        return self._parts.whole(name, part).cpu()

    def _write(self, name: str, kind: str, tensor: torch.Tensor) -> None:
        """Set a weight and its master ("master"), a frozen weight ("fixed"), or a moment.

        `tensor` is whole and the same on every rank. Raises TrainerError if the weight reads back differently.
        """
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        parameter = self._parameters[name]
        part = self._parts.of(name, tensor, getattr(parameter, "ds_shape", parameter.shape))  # the gathered shape
        if kind == "master":
            safe_set_full_fp32_param(parameter, part.to(_device(), torch.float32))
        elif kind != "fixed":
            safe_set_full_optimizer_state(parameter, part.to(_device()), kind)
        if kind in ("master", "fixed"):
            value = as_parameter(part, self._dtype)
            with _gathered(parameter, modify=True) as whole:
                whole.copy_(value)
            with _gathered(parameter) as whole:
                if not torch.equal(whole.to(value.device), value):
                    wrong = f"{int((whole.to(value.device) != value).sum())} of {value.numel()} elements"
                    raise TrainerError(f"{name}: {wrong} read back differently after they were written")
        # With `pipeline_write`, setting a weight writes its sub-group asynchronously, and setting the next one reads it
        # from the drive again. Without this wait the first change could be lost (seen in 0.19.8).
        swapper: Any = getattr(self._optimizer, "optimizer_swapper", None)
        if getattr(swapper, "swap_ops", {}).get("async_swap_out"):
            swapper._complete_swap_out("async_swap_out")

    def _optimizer_steps(self) -> int:
        states = self._optimizer.optimizer.state.values()
        return max((int(state["step"]) for state in states if "step" in state), default=0)

    def _make_moments(self, steps: int) -> None:
        """Create zero moments at step `steps`, which DeepSpeed would only create in its first update.

        DeepSpeedCPUAdam multiplies the powers of beta step by step in fp32. After a jump in the step count it uses
        pow(), which differs in the last bits, so a resumed run would drift. This replays all steps on one element.
        """
        if steps == 0:
            return
        zero = self._optimizer
        flats = zero.single_partition_of_fp32_groups if self._placement.stage < 3 else zero.fp32_partitioned_groups_flat
        on_cpu = "ds_opt_adam" in vars(zero.optimizer)
        for flat in flats:
            count: Any = steps if on_cpu else torch.tensor(float(steps), device=flat.device)
            moments = {moment: torch.zeros_like(flat.data) for moment in MOMENTS}
            zero.optimizer.state[flat] = {"step": count, **moments}
        self._link_moments()
        scratch = [torch.zeros(1) for _ in range(4)]
        for step in range(1, steps + 1) if on_cpu else ():
            adam = zero.optimizer.ds_opt_adam
            adam.adam_update(zero.optimizer.opt_id, step, 0.0, *self._betas, 1e-8, 0.0, True, *scratch)

    def _link_moments(self) -> None:
        """Make DeepSpeed link each weight to its moments in the flat buffers.

        ZeRO-1 and 2 do this only once, after the first update of the first parameter group, so the moments of the
        other groups could not be read (seen in 0.19.8).
        """
        if self._placement.stage < 3 and self._optimizer.optimizer.state:
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def close(self) -> None:
        self._engine.destroy()


def _device() -> torch.device:
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


# -- weights that ZeRO-3 may have partitioned -------------------------------------------------------------------------


@contextmanager
def _gathered(parameter: nn.Parameter, *, modify: bool = False) -> Iterator[torch.Tensor]:
    """Gather the whole weight on every rank. With `modify`, all ranks keep what rank 0 writes inside the context."""
    if not hasattr(parameter, "ds_id"):  # not managed by ZeRO-3
        yield parameter.data
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if modify else None):
        yield parameter.data


# -- weights that tensor-parallel ranks divide -------------------------------------------------------------------------

_DIVIDED = {"column": 0, "row": -1}  # the dimension; nn.Linear's weights are [outputs, inputs], biases [outputs]


@dataclass(frozen=True)
class Parts:
    """This rank's shard of each weight: number `place` of `count` in the process group `group`."""

    dims: dict[str, int]  # the dimension of each weight that is divided
    count: int
    place: int
    group: Any

    def of(self, name: str, whole: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's shard of a whole weight, or of a tensor of the same shape.

        Raises TrainerError if DeepSpeed has split the weight differently from the plan: its shard has another `shape`.
        """
        dim = self.dims.get(name)
        part = whole if dim is None else whole.chunk(self.count, dim)[self.place].contiguous()
        if part.shape != shape:
            raise TrainerError(f"{name} was not split as planned: {list(shape)} for {list(part.shape)}")
        return part

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """Join the shards of all ranks on every rank. All ranks of the group call it."""
        if (dim := self.dims.get(name)) is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.count)]
        torch.distributed.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, dim)


# -- DeepSpeed's compiled kernels --------------------------------------------------------------------------------------


def load_kernel(name: str) -> Any:
    """Build or load DeepSpeed's kernel `cpu_adam` or `async_io` with a builder that needs no CUDA toolkit.

    Return its module. Raises TrainerError if the build failed; the message contains the compiler's output.
    """
    with importing("deepspeed", feature=f"its kernel {name}"):
        if name == "cpu_adam":
            from deepspeed.ops.op_builder.cpu import CPUAdamBuilder as Builder
        else:
            from deepspeed.ops.op_builder import AsyncIOBuilder as Builder

    return _load(Builder())


@contextmanager
def importing(package: str, *, feature: str) -> Iterator[None]:
    """Turn errors of importing an optional package into TrainerError with advice; `feature` is what needs it.

    Such packages raise more than ImportError, for example if a CUDA toolkit or a shared library is missing.
    """
    if package == "deepspeed" and not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # without it, DeepSpeed warns that it found none
    try:
        yield
    except Exception as error:
        if not is_installed(package):
            raise TrainerError(lacks(feature, package)) from error
        words = " ".join(str(error).split())[:300]
        raise TrainerError(
            f"{feature} needs {package}, which is installed but cannot be imported: {words}; reinstall it: "
            f"{to_install(package)} --force-reinstall --no-deps"
        ) from error


def is_built(name: str) -> bool:
    """Return whether a DeepSpeed kernel is compiled in torch's extension cache, without building it."""
    try:
        return is_installed("deepspeed") and (_build_directory(name) / f"{name}.so").exists()
    except OSError:  # torch creates the directory when it returns its name
        return False


def _build_directory(name: str) -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))


def _load(builder: Any) -> Any:
    # ninja is next to this interpreter, whose directory may be missing in PATH if the program is called by its path.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    try:
        directory = _build_directory(builder.name)
    except OSError as error:
        raise TrainerError(
            f"DeepSpeed's kernel {builder.name} could not be built: {reason(error)}; name a directory for it with "
            "TORCH_EXTENSIONS_DIR"
        ) from error
    turn = directory.with_name(f"{builder.name}.turn")
    with exclusive_lock(turn, say=write_now, patience=_LONGEST_BUILD) as (_, unlocked):  # exclude our other builds
        for name in () if unlocked else _BUILDS[builder.name]:
            remove_stale_lock(_build_directory(name))
        try:
            return builder.load(verbose=False)
        except Exception as error:
            raise TrainerError(
                f"DeepSpeed's kernel {builder.name} could not be built: {' '.join(str(error).split())[:500]}\n"
                "It needs g++ and ninja, and async_io needs Debian's libaio-dev."
            ) from error


def remove_stale_lock(directory: Path, *, patience: float = PATIENCE) -> None:
    """Remove `directory/lock` if it stays for `patience` seconds while no process works in `directory`.

    torch guards a build with this file. If the process is killed, it stays, and every later run would wait for it.
    """
    lock = directory / "lock"
    deadline = time.monotonic() + patience
    while lock.exists():
        if _someone_works_in(directory):
            deadline = time.monotonic() + patience
        elif time.monotonic() > deadline:
            logger.warning("%s: left behind by a killed build; removed", lock)
            lock.unlink(missing_ok=True)
        time.sleep(0.1)


def _someone_works_in(directory: Path) -> bool:
    """Return whether a build runs in `directory`: ninja and its compilers use it as their working directory."""
    place = str(directory.resolve())
    return any(process.info["cwd"] == place for process in psutil.process_iter(["cwd"]))
