"""Planning for the stock DeepSpeed engine: check its settings, and list the placements that they allow.

`candidate.py` computes the memory and time of each placement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload_trainer.config import DeepSpeedSection, PlacementSection
from offload_trainer.errors import UserError
from offload_trainer.plan.deepspeed.candidate import DeepSpeedCandidate
from offload_trainer.plan.machine import MachineProfile
from offload_trainer.plan.parallel.modes import Mode, refusal
from offload_trainer.plan.tiers import Placement, TierKind, kind_asked
from offload_trainer.plan.workload import Workload

# From the fastest to the one that needs the least memory.
_PLACEMENTS = (
    Placement(TierKind.GPU, TierKind.GPU),
    Placement(TierKind.GPU, TierKind.RAM),
    Placement(TierKind.RAM, TierKind.RAM),
    Placement(TierKind.GPU, TierKind.DRIVES),
    Placement(TierKind.RAM, TierKind.DRIVES),
    Placement(TierKind.DRIVES, TierKind.DRIVES),
)


@dataclass(frozen=True)
class DeepSpeed:
    """The settings of the DeepSpeed engine.

    `moments` is optim.moment_dtype; "8bit" means bitsandbytes on the GPU. `tensor` is the number of AutoTP ranks.
    """

    place: PlacementSection
    section: DeepSpeedSection
    moments: str
    tensor: int = 1

    name = "deepspeed"

    def mistakes(self) -> list[str]:
        """Return the mistakes in the configuration, one sentence each."""
        place, mistakes = self.place, []
        params, optimizer = kind_asked(place.params), kind_asked(place.optimizer)
        if len(place.nvme) > 1:
            mistakes.append(f"DeepSpeed swaps to one drive and {len(place.nvme)} --nvme were given: keep one")
        if self.moments == "8bit" and optimizer in (TierKind.RAM, TierKind.DRIVES):
            mistakes.append(
                f"optim.moment_dtype=8bit with --engine deepspeed and --optimizer {place.optimizer}: bitsandbytes' "
                "8-bit AdamW runs on the GPU; use --optimizer gpu, or --engine tiered"
            )
        if params == TierKind.DRIVES and self.section.prefetch_bucket_size not in ("auto", 0):
            # Seen with DeepSpeed 0.19.8, which prefetches a weight twice (`zero_sizes`).
            mistakes.append(
                "deepspeed.prefetch_bucket_size with --params nvme: DeepSpeed's prefetch from NVMe fails in the second "
                "step (`already assigned swap buffer`); leave it at auto, which is 0 there"
            )
        away = params not in (None, TierKind.GPU) or optimizer == TierKind.DRIVES
        if self.tensor > 1 and away:
            mistakes.append(
                f"parallel.tensor={self.tensor} divides the weights over GPUs and keeps the state there or in RAM: use "
                "--params gpu, and --optimizer gpu or cpu"
            )
        if self.tensor == 1 and self.section.zero_stage in (1, 2) and away:
            mistakes.append(
                f"deepspeed.zero_stage={self.section.zero_stage} keeps whole weights on each GPU, and the state there "
                "or in RAM: use --params gpu, and --optimizer gpu or cpu"
            )
        if self.tensor > 1 and self.section.zero_stage not in ("auto", 1):
            mistakes.append(f"parallel.tensor={self.tensor} works with ZeRO-1 only: leave deepspeed.zero_stage out")
        if self.tensor > 1 and self.moments == "8bit":
            mistakes.append(f"parallel.tensor={self.tensor} with optim.moment_dtype=8bit is untested: use fp32")
        return mistakes

    def packages(self) -> list[tuple[str, str]]:
        """Return (setting, package) for each package that the settings need and that is not always installed."""
        eight = [("optim.moment_dtype=8bit with --engine deepspeed", "bitsandbytes")] if self.moments == "8bit" else []
        return [("--engine deepspeed", "deepspeed"), *eight]

    def refuse(self, work: Workload, machine: MachineProfile) -> None:
        """Raise UserError for settings that this machine or this step makes impossible."""
        if machine.gpu is None and work.dtype == "fp16":
            raise UserError(
                "--dtype fp16 without a GPU: DeepSpeed's CPU accelerator has no fp16; use --dtype bf16, or --engine "
                "tiered"
            )
        if self._sums_need_ram(work) and (kind_asked(self.place.optimizer) == TierKind.GPU or self.moments == "8bit"):
            wish = "deepspeed.zero_stage=1" if self.tensor == 1 else f"parallel.tensor={self.tensor}"
            raise UserError(
                f"{wish} --optimizer gpu with fp32 sums of several bf16 micro-batches: DeepSpeed uses another "
                "optimizer then, which is untested; use --optimizer cpu, --accumulate 1, or "
                "optim.accumulate_dtype=model"
            )
        if self.tensor > 1:
            self._refuse_dividing(work)

    @property
    def _zero(self) -> int | None:
        """Return the requested ZeRO stage, or None for `auto`; tensor parallelism implies stage 1."""
        if self.tensor > 1:
            return 1
        return None if self.section.zero_stage == "auto" else self.section.zero_stage

    def _refuse_dividing(self, work: Workload) -> None:
        """Raise UserError if the ranks or the model cannot be divided by `tensor`."""
        wish = f"parallel.tensor={self.tensor}"
        if work.partition and not work.checkpointing:
            raise UserError(
                "parallel.partition_activations=true divides the block inputs that gradient checkpointing saves, but "
                "checkpointing is off for a model of this size: use model.activation_checkpointing=on"
            )
        if work.world % self.tensor:
            raise UserError(f"{wish} with {work.world} rank(s): a multiple of {self.tensor} is needed (--gpus)")
        if not any(weight.split for weight in work.shape.weights):
            raise UserError(
                f"{wish}: transformers has no tensor-parallel plan for this architecture that splits each matrix of a "
                "block by rows or columns only; use 1"
            )
        if reason := refusal(Mode(tensor=self.tensor), work.shape, rows=1, seq_len=work.seq_len):
            raise UserError(f"{wish}: {reason}")

    def _sums_need_ram(self, work: Workload) -> bool:
        """Return whether the state must be in RAM: elsewhere DeepSpeed has another class for ZeRO-1 with fp32 sums."""
        return self._zero == 1 and work.dtype == "bf16" and work.accumulate > 1 and work.sums == "fp32"

    def candidates(self, work: Workload, machine: MachineProfile) -> list[DeepSpeedCandidate]:
        """Return the candidates, from the fastest to the one that needs the least memory."""
        found = self._placements(machine)
        if self._zero is not None:
            found = [replace(one, zero=self._zero) for one in found if self._zero == 3 or one.stage == 2]
        if not found or self._sums_need_ram(work):
            found = [Placement(TierKind.GPU, TierKind.RAM, zero=self._zero)]
        return [DeepSpeedCandidate(work, machine, placement, self.section, self.moments) for placement in found]

    def _placements(self, machine: MachineProfile) -> list[Placement]:
        params, optimizer = kind_asked(self.place.params), kind_asked(self.place.optimizer)
        if self.moments == "8bit":
            optimizer = TierKind.GPU
        if params and optimizer:
            return [Placement(params, optimizer)]
        found = [
            one
            for one in _PLACEMENTS
            if params in (None, one.params)
            and optimizer in (None, one.optimizer)
            and (self.place.nvme or TierKind.DRIVES not in (one.params, one.optimizer))
            # Without a GPU that means host memory, and DeepSpeed's path for an optimizer there is slower than for RAM.
            and (machine.gpu is not None or one.optimizer != TierKind.GPU or optimizer == TierKind.GPU)
        ]
        # A requested combination that is not in the list, such as weights off the GPU and the optimizer on it, is used.
        return found or [Placement(params or TierKind.GPU, optimizer or TierKind.RAM)]
