"""Write DeepSpeed's configuration: a pure function that golden files test. No other module uses DeepSpeed's keys.

Every key is written out, because DeepSpeed's defaults differ between versions and it ignores unknown keys silently.
"""

from __future__ import annotations

import re
from typing import Any

from offload_trainer.config import DeepSpeedSection, OptimSection
from offload_trainer.optim import loss_scale
from offload_trainer.plan.deepspeed.memory import ZeroSizes
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.tiers import Placement
from offload_trainer.plan.workload import Workload


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
        **_precision(work.dtype),
        "zero_optimization": _zero(section, placement, sizes, accelerator=accelerator, swap_directory=swap_directory),
    }
    if work.accumulate > 1 and work.sums == "fp32":
        words["data_types"] = {"grad_accum_dtype": "fp32"}
    if placement.optimizer != "gpu":
        words["optimizer"] = {
            "type": "AdamW",  # DeepSpeed uses DeepSpeedCPUAdam if the optimizer is offloaded
            "params": {
                "lr": optim.lr,
                "betas": list(optim.betas),
                "eps": optim.eps,
                "weight_decay": optim.weight_decay,
                "torch_adam": False,
                "adam_w_mode": True,
            },
        }
    if work.tensor > 1:
        words["tensor_parallel"] = {
            "autotp_size": work.tensor,
            "partition_config": {"use_default_specs": False, "strict_mode": False, "layer_specs": _specs(work.shape)},
        }
    if swap_directory is not None:
        words["aio"] = {
            "block_size": section.aio_block_size,
            "queue_depth": section.aio_queue_depth,
            "intra_op_parallelism": section.aio_threads,
            "single_submit": False,
            "overlap_events": True,
        }
    return words


def _specs(shape: ModelShape) -> list[dict[str, Any]]:
    """Return AutoTP's split rules by weight name, so that AutoTP does not guess."""
    kinds = {"column": ("column", False), "row": ("row", False), "summed": ("skip", True)}
    found = []
    for split, (kind, summed) in kinds.items():
        names = [f".*{re.escape(w.name)}$" for w in shape.weights if w.split == split and not w.name.endswith(".bias")]
        if names:
            found.append({"patterns": names, "partition_type": kind, "grad_allreduce": summed})
    return found


def _precision(dtype: str) -> dict[str, Any]:
    if dtype == "bf16":
        return {"bf16": {"enabled": True, "check_grad_overflow": True}}
    if dtype == "fp16":
        return {
            "fp16": {
                "enabled": True,
                "loss_scale": 0,  # dynamic
                "initial_scale_power": int(loss_scale.INITIAL_SCALE).bit_length() - 1,
                "loss_scale_window": loss_scale.WINDOW,
                "hysteresis": 1,  # halve at the first overflow, as torch's GradScaler does
                "min_loss_scale": 1,
            }
        }
    return {}


def _zero(
    section: DeepSpeedSection, placement: Placement, sizes: ZeroSizes, *, accelerator: str, swap_directory: str | None
) -> dict[str, Any]:
    on_gpu = accelerator == "cuda"

    def away(device: str, **on_drive: Any) -> dict[str, Any]:
        kept: dict[str, Any] = {"device": str(device), "pin_memory": on_gpu}
        return kept | {"nvme_path": swap_directory, **on_drive} if device == "nvme" else kept

    zero: dict[str, Any] = {
        "stage": placement.stage,
        "contiguous_gradients": True,
        "overlap_comm": on_gpu,
        "reduce_scatter": True,
        "reduce_bucket_size": sizes.reduce_bucket,
        "allgather_bucket_size": sizes.reduce_bucket,
    }
    if placement.optimizer != "gpu":
        zero["offload_optimizer"] = away(
            placement.optimizer,
            buffer_count=sizes.optimizer_buffers,
            pipeline_read=section.pipeline_read,
            pipeline_write=section.pipeline_write,
            fast_init=False,
        )
    if placement.stage < 3:
        zero["use_multi_rank_bucket_allreduce"] = False  # each rank receives only its shard
    if placement.stage == 3:
        zero |= {
            "sub_group_size": sizes.sub_group,
            "stage3_prefetch_bucket_size": sizes.prefetch_bucket,
            "stage3_param_persistence_threshold": sizes.persistent,
            "stage3_max_live_parameters": sizes.max_live,
            "stage3_max_reuse_distance": sizes.max_live,
            "stage3_gather_16bit_weights_on_model_save": False,
        }
    if placement.params != "gpu":
        zero["offload_param"] = away(
            placement.params,
            buffer_count=sizes.weight_buffers,
            buffer_size=sizes.weight_buffer_elements,
            max_in_cpu=0,
        )
    return zero
