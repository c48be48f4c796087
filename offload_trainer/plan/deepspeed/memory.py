"""Bytes of stock DeepSpeed (0.19.8: stage_1_and_2.py, stage3.py, swap_tensor/), item by item. Pure arithmetic.

P parameters, T trainable ones, e bytes a weight, g an element of the sums, W ranks with the same weights; of a rank. b:
elements in a full gradient bucket, at most T. L: elements of its largest weight, l of the largest part of one whose
state it has. Held all the time:

    ZeRO-1, 2   e P of weights (those that were flattened are views of the flat ones); with the state in RAM 16 T / W of
                masters, moments and fp32 gradients, e T / W of new weights on their way, and 2 e L, through which
                gradients of several micro-batches go; of those e T / W more, or 4 T / W where they are added in fp32
    ZeRO-3      e P / W of weights, e b, g T / W of gradients, and 16 T / W in RAM; or on a drive, with swap buffers,
                and 8 T / W of moments in RAM, which are made in the first update and leave in the second one

and then the largest of these moments:

    the model's         activations with gradients that are being made, and weights that ZeRO-3 has gathered
    a full bucket's     8 l, a gradient in fp64 (`set_norm_for_param_grad_in_gpu`), and e L where it is larger than a
                        bucket; or what is sent, copied, and once more by gloo: 2 e of b or T / W. With ZeRO-3 all
                        three, e b even where W = 1, in fp32 on its way to a drive, and the last weight gathered.
                        Activations are there too where the largest gradient is not the last
    the first           AutoTP divides weights that were built whole: e P of the whole model

ZeRO-2's bucket is filled as gradients are made, so of the model's moments all of it is counted too: those that are the
largest at the head of a wide model have less of it. Measured: docs/benchmarks/predictions.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload_trainer.plan.deepspeed.zero_buffers import Placement, ZeroSizes, decay_groups
from offload_trainer.plan.memory.common import Item, activation_items, process_items
from offload_trainer.plan.memory.malloc_threshold import LONG, mapped_from
from offload_trainer.plan.parallel.modes import Mode, divided, part_held
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes

# Resident once it trains, beside tensors and what products take: DeepSpeed imports parts of itself as it begins.
# Measured on 2 cores of an AMD EPYC, torch 2.13 for CPUs (docs/log.md), libraries' pages included.
PROCESS = 450_000_000
# What a CPU's heap keeps of what is freed (malloc_threshold.py), seen and not worked out: of short rows, where glibc
# keeps it as it likes, bytes for each of those of the weights' gradients, which come and go; of long ones bytes of a
# process.
_HOLES = {1: 1.3, 2: 1.3, 3: 0.8}  # by stage
_HOLES_OF_LONG_ROWS = 20_000_000
_FP64 = 8
_ACTIVATIONS = ("saved activations", "block inputs", "activations")


@dataclass(frozen=True)
class StockBytes:
    """One placement: of a rank `held` weights, `held_trained` of them trained; `trained`: whose state a node has."""

    work: Workload
    placement: Placement
    sizes: ZeroSizes
    mode: Mode
    held: int
    held_trained: int
    trained: int
    device: str  # the tier that computes
    drive: str

    def items(self) -> list[Item]:
        """What a node holds at its peak."""
        model = activation_items(
            self._of_rank, device=self.device, gradients=self.placement.stage > 1, waiting=self._waiting
        )
        there = [item for item in model if item.tier == self.device and item.name in _ACTIVATIONS]
        return [
            *self._process(),
            *(self._gathered_weights() if self.placement.stage == 3 else self._whole_weights()),
            *self._gradients(),
            *self._state(),
            *model,
            *self._beyond(sum(item.bytes for item in there), kept=sum(item.bytes for item in there[:-1])),
        ]

    # -- what it is counted with --------------------------------------------------------------------------------------

    @property
    def _of_rank(self) -> Workload:
        """The work with what a rank holds of the activations."""
        on_gpu, on_cpu = self.work.shape.on_gpu, self.work.shape.on_cpu
        if self.work.tensor == 1 or on_gpu is None or on_cpu is None:
            return self.work
        on_gpu, on_cpu = divided(on_gpu, self.mode), divided(on_cpu, self.mode)
        return replace(self.work, shape=replace(self.work.shape, on_gpu=on_gpu, on_cpu=on_cpu))

    @property
    def _waiting(self) -> int:
        """A tied head's gradient, until the embedding's is there: one weight here, whose gradient is made once."""
        tied = [weight for weight in self.work.shape.weights if weight.trainable and weight.uses > 1]
        return self.work.item_bytes * sum(weight.numel for weight in tied) if self.placement.stage > 1 else 0

    @property
    def _sums(self) -> int:
        """Bytes of an element of the sums of a rank's micro-batches."""
        return 4 if self.work.accumulate > 1 and self.work.sums == "fp32" else self.work.item_bytes

    @property
    def _parts(self) -> list[int]:
        """Elements of each trained weight on a rank."""
        return [part_held(self.mode, weight) for weight in self.work.shape.weights if weight.trainable]

    @property
    def _bucket(self) -> int:
        return min(self.sizes.reduce_bucket, self.held_trained)

    @property
    def _gathered(self) -> int:
        """Weights that ZeRO-3 has whole at a time."""
        return min(self.work.shape.parameters, self.sizes.max_live + self.sizes.prefetch_bucket)

    def _tier(self, home: str) -> str:
        return {"gpu": self.device, "cpu": "ram", "nvme": self.drive}[home]

    # -- held all the time --------------------------------------------------------------------------------------------

    def _process(self) -> list[Item]:
        here, row = self.work.here, self.work.seq_len
        items = process_items(self.device, here=here, own=PROCESS, what="torch, transformers and DeepSpeed")
        if self.device == "ram" and row >= LONG:
            why = f"measured: heap fragments of allocations below {format_bytes(mapped_from(row))}, in each process"
            items.append(Item("ram", "heap", _HOLES_OF_LONG_ROWS * here, why))
        elif self.device == "ram":
            each = _HOLES[self.placement.stage]
            holes = int(each * self.work.item_bytes * self.held_trained) * here
            why = f"measured: heap fragments, {each} times the temporary gradients; peaks were up to 13 % higher"
            items.append(Item("ram", "heap", holes, why))
        return items

    def _whole_weights(self) -> list[Item]:
        e, work = self.work.item_bytes, self.work
        how = "whole on each rank" if work.tensor == 1 else f"{self.held:,} parameters on each rank"
        return [Item(self.device, "weights", e * self.held * work.here, f"{e} B a parameter, {how}")]

    def _gathered_weights(self) -> list[Item]:
        shape, here, e, sizes = self.work.shape, self.work.here, self.work.item_bytes, self.sizes
        home, divided_up = self._tier(self.placement.params), e * -(-shape.parameters // self.work.nodes)
        why = "gathered at the same time: max_live_parameters and a prefetch bucket"
        items = [
            Item(home, "weights", divided_up, f"{e} B a parameter, sharded over the ranks"),
            Item(self.device, "weights in use", e * self._gathered * here, why),
        ]
        if self.placement.params == "nvme":
            buffers, why = (
                e * sizes.weight_buffers * sizes.weight_buffer_elements,
                f"{sizes.weight_buffers} buffers for the",
            )
            items.append(Item("ram", "weight swap buffers", buffers * here, f"{why} largest weight"))
            items.append(Item("ram", "weight write buffer", e * sizes.largest_sub_group * here, "one sub-group"))
        return items

    def _gradients(self) -> list[Item]:
        e, here, device, several = self.work.item_bytes, self.work.here, self.device, self.work.accumulate > 1
        of_bucket = self._sums if self.placement.stage == 1 else e
        count = 2 if device == "gpu" and self.placement.stage < 3 else 1
        buckets = count * of_bucket * self._bucket * here
        items = [Item(device, "gradient buckets", buckets, f"{count} of {self._bucket:,} elements")]
        if self.placement.stage == 3:
            tier = device if self.placement.optimizer == "gpu" else "ram"
            why = f"{self._sums} B a parameter, sharded over the ranks"
            return [*items, Item(tier, "gradients", self._sums * self.trained, why)]
        if self.placement.stage == 1:
            each = self._sums * self.held_trained * here
            items.append(Item(device, "gradients", each, "whole on each rank"))
        elif self.placement.optimizer == "gpu":
            items.append(Item(device, "gradients", e * self.trained, f"{e} B a parameter, until the update"))
        if several and self.placement.stage == 2 and self._sums > e:
            why = "of the micro-batches' gradients, in fp32, sharded over the ranks"
            return [*items, Item(device, "sums", 4 * self.trained, why)]
        if several and self.placement.optimizer == "cpu":
            items.append(Item("ram", "sums", e * self.trained, "of the micro-batches' gradients"))
        return items

    def _state(self) -> list[Item]:
        e, trained, here, sizes = self.work.item_bytes, self.trained, self.work.here, self.sizes
        home = self._tier(self.placement.optimizer)
        items = [Item(home, "masters and moments", 12 * trained, "fp32 master, first and second moment")]
        if self.placement.optimizer == "nvme":
            buffers = 4 * sizes.optimizer_buffers * sizes.largest_sub_group * here
            why = f"{sizes.optimizer_buffers} buffers for the largest sub-group"
            return [
                *items,
                Item(home, "gradients, fp32", 4 * trained, "DeepSpeed swaps them together with the state"),
                Item("ram", "optimizer swap buffers", buffers, why),
                Item("ram", "first moments", 8 * trained, "from the first update, which creates them, to the second"),
            ]
        items.append(Item(home, "gradients, fp32", 4 * trained, "the update reads them in fp32"))
        if self.placement.optimizer == "cpu" and self.placement.stage < 3:
            through = e * max(self._parts, default=0) * here
            items.append(Item("ram", "new weights", e * trained, "output of the update"))
            items.append(Item("ram", "gradients in transfer", through, "the largest weight's"))
            items.append(Item(self.device, "gradients in transfer", through, "the largest weight's"))
        return items

    # -- the largest moment -------------------------------------------------------------------------------------------

    def _beyond(self, model: int, *, kept: int) -> Sequence[Item]:
        """What other moments need on the device beyond the model's, which has `model` bytes, `kept` of them inputs."""
        e, here = self.work.item_bytes, self.work.here
        if self.placement.stage == 3:
            model += e * self._gathered * here
        full = self._full_buckets() + (0 if self._ends_with_largest else kept)
        whole = e * (self.work.shape.parameters - self.held) * here if self.work.tensor > 1 else 0
        if whole > max(model, full):
            return [
                Item(self.device, "whole model", whole - model, "until AutoTP has split it; in addition to activations")
            ]
        why = "a bucket's gradients and the largest weight's norm in fp64, minus activations that are freed by then"
        return [Item(self.device, "gradients reduced", max(0, full - model), why)]

    def _full_buckets(self) -> int:
        """Bytes beside them, of the ranks of the node that needs most."""
        of_each = sorted(map(self._full_bucket, self._largest_parts()))
        return sum(of_each[-self.work.here :]) * (self.work.here // min(self.work.here, len(of_each)))

    def _full_bucket(self, part: int) -> int:
        """Of a rank with the state of `part` elements of a weight, and of no larger part."""
        e, bucket, alike = self.work.item_bytes, self._bucket, self.mode.data_parallel
        largest = max(self._parts, default=0)
        norm = _FP64 * part + (e * largest if largest > self.sizes.reduce_bucket else 0)
        if self.placement.stage < 3:
            sent = 2 * e * min(bucket, -(-self.held_trained // alike)) if alike > 1 else 0
            return max(norm, sent)
        if self.placement.optimizer == "nvme":
            norm = max(norm, 4 * -(-bucket // alike))
        return e * bucket * min(2, alike) + norm + e * largest

    @property
    def _ends_with_largest(self) -> bool:
        """Whether nothing of the activations is left when the largest gradient is reduced."""
        parts = self._parts
        return self.held_trained <= self._bucket or max(parts[1:], default=0) < parts[0]

    def _largest_parts(self) -> list[int]:
        """Of each rank with the same weights, elements of the largest part of one whose state it has."""
        alike = self.mode.data_parallel
        if self.placement.stage == 3:
            return [max((-(-numel // alike) for numel in self._parts), default=0)] * alike
        largest = [0] * alike
        for group in decay_groups(self.work.shape.weights):
            numels = [part_held(self.mode, weight) for weight in group]
            size, begin = max(1, -(-sum(numels) // alike)), 0
            for numel in numels:
                end = begin + numel
                for rank in range(begin // size, min(alike, -(-end // size))):
                    largest[rank] = max(largest[rank], min(end, (rank + 1) * size) - max(begin, rank * size))
                begin = end
        return largest
