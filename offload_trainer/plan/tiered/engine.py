"""Planning for the tiered engine: check its settings, list the placements that they allow, and compute their cost.

Candidates are ordered from the fastest to the one that needs the least memory: first everything on the GPU, then
weights on the device, in RAM or on drives, and gradients likewise. Unless the shares are set, each candidate has as
much of the optimizer state on the GPU as fits, then as much in RAM as fits, and the rest on drives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from offload_trainer.config import PlacementSection, TieredSection
from offload_trainer.errors import UserError
from offload_trainer.packages import lacks
from offload_trainer.plan.machine import MachineProfile, sums_key, update_key
from offload_trainer.plan.memory import LONG, heap_holes
from offload_trainer.plan.parallel.collectives import all_to_alls, link_seconds, refusal
from offload_trainer.plan.parallel.comm_cost import CommCost, as_traffic, exchange_of, hidden_waits, waits
from offload_trainer.plan.step_time import (
    DEVICE_COPIES,
    PHASES,
    UPDATE_START,
    Bound,
    Costs,
    Forecast,
    Traffic,
    UnitShare,
    ahead_of,
    early_pages,
    hidden_seconds,
    in_turn,
    kernels_of,
    left_after,
    parts_left,
    parts_of,
    read_before_update,
    seconds_of_matrices,
    transfer_seconds,
    update_rate,
)
from offload_trainer.plan.tiered.footprint import (
    added_bytes,
    gathered_weights,
    shadow_bytes,
    tiered_items,
    tiered_traffic,
    traffic_beside_matrices,
)
from offload_trainer.plan.tiered.layout import FORMATS, TierMap, Unit, is_divided
from offload_trainer.plan.tiered.spec import (
    Layouts,
    TierSizes,
    layouts_of,
    left_free,
    shadows_that_fit,
    shares_in_words,
    shares_that_fit,
    tier_sizes,
)
from offload_trainer.plan.tiered.state_formats import ADAMW, FP32, StateFormat
from offload_trainer.plan.tiered.weight_streaming import (
    TransferBytes,
    bounds_by_parts,
    describe_weight_transfer,
)
from offload_trainer.plan.tiers import Item, Placement, Tier, TierKind, kind_asked, on_drive, sum_of, tiers_of
from offload_trainer.plan.workload import Workload
from offload_trainer.units import format_bytes, format_count, format_seconds

WORTH = 0.05  # share of a step that an alternative update schedule must save, since forecasts are inexact
_FORWARD_WORTH = 0.02  # the same for `FORWARD` instead of `OFF`, which needs no memory and changes no bits

# The update schedules. tiered.overlap: without overlap, with the next forward, and with the backward as well, which
# needs two copies of the state.
OFF, FORWARD, FULL = (f"tiered.overlap={how}" for how in ("off", "forward", "backward"))


@dataclass(frozen=True)
class Tiered:
    """The settings of the tiered engine."""

    place: PlacementSection
    section: TieredSection

    name = "tiered"

    def mistakes(self) -> list[str]:
        """Return the mistakes in the configuration, one sentence each."""
        return self._not_with_ranks(self.place.gpus) + self._not_with_shares()

    def _not_with_shares(self) -> list[str]:
        """Return the mistake if --gpu-fraction and --ram-fraction do not add up or contradict --optimizer."""
        place = self.place
        given = {flag: share for flag, share in place.shares.items() if share != "auto"}
        words = " and ".join(f"{flag} {share:g}" for flag, share in given.items())
        left = round(1 - sum(given.values()), 9)
        if left < 0:
            return [f"{words} add up to {1 - left:g} of the state: lower one of them"]
        asked = kind_asked(place.optimizer)
        only = "--gpu-fraction" if asked == TierKind.GPU else "--ram-fraction" if asked == TierKind.RAM else None
        if only and any(share != (flag == only) for flag, share in given.items()):
            where = "on the GPU" if only == "--gpu-fraction" else "in RAM"
            return [f"{words} with --optimizer {place.optimizer}, which puts all of it {where}: leave one out"]
        if place.ram_fraction != "auto" and left and not place.nvme:
            other = "" if place.gpu_fraction != "auto" else f", or --gpu-fraction {left:g}"
            return [f"{words} leaves {left:g} of the state for a drive: add --nvme DIR{other}"]
        return []

    def _not_with_ranks(self, world: int) -> list[str]:
        """Return the settings that several ranks do not support, one sentence each."""
        place, state, gpu = self.place, "the state must be in RAM or on drives", TierKind.GPU
        settings = {
            f"--optimizer gpu {{}}: {state}": kind_asked(place.optimizer) == gpu,
            f"--gpu-fraction {{}}: {state}": place.gpu_fraction not in ("auto", 0),
            "placement.gradients=gpu {}: gradient sums must be in RAM or on drives": kind_asked(place.gradients) == gpu,
        }
        ranks = f"with {world} ranks and --engine tiered"
        return [
            f"{setting.format(ranks)}; leave it out" for setting, is_set in settings.items() if is_set and world > 1
        ]

    def packages(self) -> list[tuple[str, str]]:
        """Return no package: this engine needs none that is not always installed."""
        return []

    def refuse(self, work: Workload, machine: MachineProfile) -> None:
        """Raise UserError for settings that the machine, or the launcher's number of ranks, makes impossible."""
        if impossible := self.impossible(work):
            raise UserError("; ".join(impossible))
        if work.shape.base_format and machine.lacks("bitsandbytes"):
            raise UserError(lacks(f"model.base={work.shape.base_format}", "bitsandbytes"))
        on_gpu = self.place.gpu_fraction not in ("auto", 0) or kind_asked(self.place.optimizer) == TierKind.GPU
        if on_gpu and machine.no_state_on_gpu:
            raise UserError(f"this GPU cannot store optimizer state: {machine.no_state_on_gpu}; use --gpu-fraction 0")

    def impossible(self, work: Workload) -> list[str]:
        """Return the settings that a step of this workload does not support, one sentence each."""
        section, why, in_pieces = self.section, why_not_breadth_first(work), _why_not_in_pieces(work)
        breadth_first = section.micro_batch_order == "breadth_first" and work.accumulate > 1
        whole = section.fetch_granularity == "module" and not is_divided(work.shape)
        found = {
            "tiered.overlap=backward: in a session, the learning rate and clipping factor of a step are known only "
            "after its backward; leave it out": work.checkpoints is None and section.overlap == "backward",
            f"parallel.sequence={work.sequence}{in_pieces}": in_pieces,
            f"tiered.micro_batch_order=breadth_first: {why}; leave it out": breadth_first and why,
            "tiered.fetch_granularity=module: a trial with a tiny model of this architecture found no block whose "
            "modules need their weights one after the other and are much smaller than the block; leave it out": whole,
            f"optim.name={work.state.rule.name}: no repeated block of this model has a trainable matrix; use "
            "optim.name=adamw": work.state.rule.matrices and not any(weight.matrix for weight in work.shape.weights),
        }
        return [*self._not_with_ranks(work.world), *(sentence for sentence, wrong in found.items() if wrong)]

    def with_setting(self, words: str) -> Tiered:
        """Return the engine with another setting, such as `FORWARD`."""
        key, value = words.removeprefix("tiered.").split("=")
        return replace(self, section=self.section.model_copy(update={key: value}))

    def why_not_full(self, work: Workload, machine: MachineProfile) -> str:
        """Return why `auto` does not consider an update that overlaps the backward, or ""."""
        if reasons := self.with_setting(FULL).impossible(work):
            return "; ".join(reason.removesuffix("; leave it out") for reason in reasons)
        if work.state.rule.matrices and machine.gpu is None:
            return f"{FULL} with optim.name={work.state.rule.name} on a CPU: the update has only one core then"
        return f"{FULL} with {work.world} ranks: auto chooses it only for one rank" if work.world > 1 else ""

    def candidates(self, work: Workload, machine: MachineProfile) -> list[TieredCandidate]:
        """Return the candidates, from the fastest to the one that needs the least memory."""
        if work.world > 1 and self.place.gpu_fraction == "auto":
            return replace(self, place=self.place.model_copy(update={"gpu_fraction": 0.0})).candidates(work, machine)
        layouts = layouts_of(work)
        found: list[TieredCandidate] = []
        homes = self._homes(work, machine)
        ways = [(*one, step) for one in homes for step in self._orders(work, machine, one[0].params)]
        for placement, gradients, step in ways:
            sizes = tier_sizes(step, machine, placement, section=self.place, tiered=self.section, gradients=gradients)
            one = TieredCandidate(step, machine, placement, sizes, layouts, self.section)
            if placement.optimizer != TierKind.GPU:
                one = self._with_shares(one)
            if one.sizes.gpu_fraction == 1:
                everything = replace(one.sizes, gradients=TierKind.GPU)
                one = replace(one, placement=replace(placement, optimizer=TierKind.GPU), sizes=everything)
            if one not in found:  # "everything on the GPU" occurs twice if it fits
                found.append(one)
        return found

    def _orders(self, work: Workload, machine: MachineProfile, params: TierKind) -> list[Workload]:
        """Return the step with its micro-batches depth-first, breadth-first or both, the preferred order first."""
        order, breadth_first = self.section.micro_batch_order, replace(work, breadth_first=True)
        if order == "depth_first" or work.accumulate == 1 or why_not_breadth_first(work):
            return [work]
        if order == "breadth_first":
            return [breadth_first]
        if params == TierKind.GPU:
            return [work]
        # Breadth-first needs more memory, so it must gain enough; where nothing was timed it is the better guess.
        copies = [drive.rates for drive in machine.drives] if params == TierKind.DRIVES else [machine.rates.to_device]
        return [work, breadth_first] if machine.rates.matmul and all(copies) else [breadth_first, work]

    def _with_shares(self, one: TieredCandidate) -> TieredCandidate:
        tried: dict[TierSizes, TieredCandidate] = {}

        def sized(sizes: TierSizes) -> TieredCandidate:
            return tried.setdefault(sizes, replace(one, sizes=sizes))

        def needs(sizes: TierSizes, tier: Tier) -> int:
            return sum_of(sized(sizes).items, tier)

        trained = sum(unit.trained for unit in one.units) // one.work.nodes
        each, ram, sizes = one.sizes.format.mean_bytes(one.work.shape), tiers_of(one.machine).ram, one.sizes
        room, may_keep = ram.capacity - left_free(ram.capacity), _may_keep_heap(one.work, one.machine)
        if may_keep and heap_holes(one.work, one.items) <= left_free(ram.capacity):
            sizes = replace(sizes, keeps_heap=True)  # The holes are small, so they take precedence over state.
        sizes = shares_that_fit(self.place, sizes, one.machine, trained=trained, each=each, needs=needs)
        if may_keep:
            sizes = replace(sizes, keeps_heap=needs(replace(sizes, keeps_heap=True), ram) <= room)
        chosen = sized(shadows_that_fit(sizes, one.machine, needs=needs))
        return replace(chosen, work=replace(chosen.work, keeps_heap=chosen.sizes.keeps_heap))

    def _homes(self, work: Workload, machine: MachineProfile) -> list[tuple[Placement, TierKind]]:
        """Return (placement, tier of gradient sums), from the fastest to the one that needs the least memory.

        With several micro-batches, sums on the GPU are the fastest, since gradients are accumulated there.
        """
        place, gpu, ram, drives = self.place, TierKind.GPU, TierKind.RAM, TierKind.DRIVES
        params = [gpu, drives]  # without a GPU the device's memory is RAM already
        if asked := kind_asked(place.params):
            params = [asked]
        elif machine.gpu is not None:
            params = [gpu, ram, drives]
        open_shares = {place.optimizer, *place.shares.values()} == {"auto"}
        found: list[tuple[Placement, TierKind]] = []
        if machine.gpu is not None and not machine.no_state_on_gpu and params[0] == gpu and open_shares:
            found.append((Placement(gpu, gpu), gpu))
        for home in params:
            placement = Placement(home, kind_asked(place.optimizer) or ram)
            homes = [ram, drives] if home == drives else [ram]
            if machine.gpu is not None and work.accumulate > 1 and work.world == 1:
                homes.insert(0, gpu)
            if asked := kind_asked(place.gradients):
                homes = [asked]
            found += [(placement, one) for one in homes]
        return [one for one in found if place.nvme or drives not in (one[0].params, one[1])]


def _may_keep_heap(work: Workload, machine: MachineProfile) -> bool:
    """Return whether malloc may keep freed memory: in a run of one process that computes rows below `LONG` on a CPU.

    For long rows the arithmetic outweighs fresh pages (`mapped_from`). A session's process also runs other code.
    """
    return machine.gpu is None and work.world == 1 and work.seq_len < LONG and work.checkpoints is not None


def _why_not_in_pieces(work: Workload) -> str:
    """Return why the rows of this step cannot be divided over ranks (`parallel.sequence`), or "" if they can."""
    why = refusal(work.shape, sequence=work.sequence, seq_len=work.seq_len)
    reasons = {
        f" with {work.world} rank(s): a multiple of {work.sequence} is needed (--gpus)": work.world % work.sequence,
        " with data.packing=on: attention masks between documents need whole rows; leave one out": work.shape.packed,
        ": the model's number of attention heads is not known; leave it out": not work.shape.heads,
        f": {why}": why,
    }
    return next((reason for reason, here in reasons.items() if here and work.sequence > 1), "")


def why_not_breadth_first(work: Workload) -> str:
    """Return why the micro-batches of a step cannot pass through the model block by block, or "" if they can."""
    shape = work.shape
    reasons = {
        "in a session, other code runs the micro-batches": work.checkpoints is None,
        f"{work.world} ranks: it is for one rank": work.world > 1,
        "not all blocks are checkpointed (model.activation_checkpointing=on)": work.checkpointed < shape.layers,
        "weights are fetched by parts of a block (tiered.fetch_granularity=module)": is_divided(shape),
        "the model's head and body run together, on whole micro-batches": shape.whole_logits,
        shape.no_chain: bool(shape.no_chain),
    }
    return next((reason for reason, here in reasons.items() if here), "")


@dataclass(frozen=True)
class TieredCandidate:
    """One placement of the tiered engine with its sizes, and the memory, traffic and time that follow from them."""

    work: Workload
    machine: MachineProfile
    placement: Placement
    sizes: TierSizes
    layouts: Layouts = field(compare=False, repr=False)
    section: TieredSection = field(default_factory=TieredSection)

    title, cannot_save = "tiered engine", None

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.layouts.units

    @cached_property
    def _laid_out(self) -> TierMap:
        return self.layouts.homes(self.placement, self.sizes)

    @property
    def homes(self) -> str:
        """Return the placement of weights and optimizer state in words; without a GPU the device's memory is RAM."""
        sizes, tiers = self.sizes, tiers_of(self.machine)
        shown = sizes.gradients != TierKind.RAM and sizes.gpu_fraction < 1
        gradients = f", gradients {sizes.gradients}" if shown else ""
        shares = dict[str, float]()
        for home, share in sizes.shares.items():
            title = tiers.by_home[home].title
            shares[title] = shares.get(title, 0.0) + share
        state = shares_in_words(shares | {TierKind.DRIVES: sizes.on_drives})
        inputs = f", block inputs {self.work.inputs_away}" if self.work.inputs_away else ""
        order = ", micro-batches breadth-first" if self.work.breadth_first else ""
        return self.machine.in_words(f"params {self.placement.params}, optimizer {state}{gradients}{inputs}{order}")

    @property
    def uses_drives(self) -> bool:
        """Return whether anything is placed on a drive."""
        others = (self.placement.params, self.sizes.gradients, self.work.inputs_away)
        return self.sizes.on_drives > 0 or TierKind.DRIVES in others

    @cached_property
    def items(self) -> list[Item]:
        """Return the bytes at the peak by tier, without checkpoints."""
        return tiered_items(self.work, self.units, self._laid_out, self.sizes, tiers=tiers_of(self.machine))

    def costs(self) -> Costs:
        return Costs(self._traffic, self._bounds, links=self._links, on_top=self._on_top)

    @cached_property
    def _traffic(self) -> list[Traffic]:
        return tiered_traffic(self.work, self.units, self._laid_out, self.sizes, tiers=tiers_of(self.machine))

    @cached_property
    def _exchange(self) -> CommCost:
        return exchange_of(self.work, self.units, self._laid_out, by_parts=self._by_parts)

    @cached_property
    def _by_parts(self) -> dict[str, TransferBytes]:
        return gathered_weights(self.work, self.units, self._laid_out, self.sizes)

    @property
    def _links(self) -> list[Traffic]:
        """Return the bytes that ranks exchange: into and out of each GPU, and those of a node over the network."""
        return [*self._exchange.links, *as_traffic(all_to_alls(self.work), here=self.work.here)]

    @property
    def _waits(self) -> list[Bound]:
        """Return the waits between ranks that no computation overlaps."""
        found = list(waits(self._exchange, self.work, self.machine))
        for one in all_to_alls(self.work) if self.machine.gpu is not None else ():  # on a CPU no rate is known
            what = f"{one.count} all-to-alls, {format_bytes(one.bytes)} in total for each GPU"
            found.append(Bound(one.phase, link_seconds(one, self.machine, here=self.work.here), what, "gpus"))
        return found

    @property
    def _bounds(self) -> list[Bound]:
        """Return the bounds of the optimizer on GPU and CPU, of transfers between ranks, and of adding gradients.

        Waits between ranks are in `_on_top`; those of unknown duration are bounds here, so that the phase is unknown.
        """
        bounds = [*self._updates(), *hidden_waits(self._exchange, self.work, self.machine)]
        bounds += bounds_by_parts(self._by_parts, self.machine, ranks=self.work.here)
        bounds += [wait for wait in self._waits if wait.seconds is None]
        if self.placement.params != TierKind.GPU and self.sizes.unit_buffers == 1:
            bounds += in_turn(self.work, self.machine, self._traffic)
        if self.machine.gpu is not None and (adding := self._adding):
            bounds.append(Bound("backward", adding, "adding gradients in RAM", "memory"))
        return bounds

    @property
    def _adding(self) -> float:
        """Return the seconds of adding gradients in RAM and of measuring the sums; 0 if no rate is known."""
        if self.work.world > 1:
            return 0.0  # several ranks exchange gradients instead (`comm_cost.py`)
        rates = self.machine.rates
        added = added_bytes(self.work, self.units, self._laid_out, gpu=self.machine.gpu is not None)
        seconds = 0.0
        for measured, moved in added.items():
            keys = [sums_key(name, measured=measured) for name in kernels_of(self.work)]
            rate = next((rates.sums[key] for key in keys if key in rates.sums), rates.memory)
            seconds += moved / rate.value if rate is not None else 0.0
        return seconds

    def _updates(self) -> list[Bound]:
        """Return the bounds of the update kernels on GPU and CPU.

        Rates were measured with AdamW and 16-bit gradients. Rules that move fewer bytes are assumed to be as fast.
        The products of a rule on whole matrices come in addition. They do not overlap the transfers of pages without
        matrices, since a unit's pages are updated one after the other.
        """
        work, rates, bounds = self.work, self.machine.rates.update, []
        on_gpu = self.sizes.gpu_fraction if self.machine.gpu is not None else 0.0
        trained = work.shape.trainable / work.nodes
        inside, outside = round(on_gpu * trained), round((1 - on_gpu) * trained)
        moved = 2 * work.state.mean_bytes(work.shape) + 2  # bytes per parameter without the gradient
        title = work.state.rule.title
        longer = (moved + work.gradient_bytes) / (moved + 2)
        products: float | None = 0.0
        others: float | None = 0.0
        if work.state.rule.matrices:
            products = seconds_of_matrices(work.shape, self.machine)
            cores = self.machine.cores / work.here if self._computes_products_on_cpu and self.sizes.overlap else 1
            products = None if products is None else products * cores / work.world
            tiers = tiers_of(self.machine)
            beside = traffic_beside_matrices(work, self._laid_out, format=self.sizes.format, tiers=tiers)
            others = transfer_seconds(beside, self.machine, phase="update")
        if inside:
            whole = 2 * StateFormat(ADAMW, FP32).bytes_each + 4
            timed, wide = rates.get(update_key("cuda", work.state.moments.name)), rates.get("cuda")
            rate = timed.value if timed else wide.value * whole / (moved + 2) if wide else None
            seconds = inside / rate * longer + products * on_gpu if rate and products is not None else None
            what = f"{title} on {format_count(inside)} parameters on the GPU"
            bounds.append(Bound("update", seconds, what, "adamw_gpu"))
        if outside:
            speed = update_rate(work, self.machine)
            seconds = None
            if speed and products is not None and others is not None:
                seconds = outside / speed * longer + products * (1 - on_gpu) + others + UPDATE_START
            bounds.append(Bound("update", seconds, f"{title} on {format_count(outside)} parameters", "adamw"))
        return bounds

    def settled(self, found: Forecast) -> tuple[TierSizes, Forecast]:
        """Return the final sizes and forecast, after deciding whether the update overlaps the next forward."""
        # An update that overlaps has one core of a CPU that computes the model.
        if not self.sizes.overlap and (self._computes_products_on_cpu or self.section.overlap != "auto"):
            return self.sizes, found
        overlapped = self.overlapping_forward(found)
        if found.step is not None:
            gains = overlapped.hidden >= _FORWARD_WORTH * found.step
        else:
            # Overlap changes no result and needs no memory, and without it drives are idle during the forward. If the
            # CPU computes the model, there must be more cores than ranks: each rank's update needs a core too.
            gains = self.uses_drives and (self.machine.gpu is not None or self.machine.cores > self.work.here)
        if not self.sizes.overlap and not gains:
            return self.sizes, replace(found, could_hide=overlapped.hidden)
        if self.sizes.ahead:
            return self.sizes, self._overlapping_backward(found)
        return replace(self.sizes, overlap=True), overlapped

    @property
    def _computes_products_on_cpu(self) -> bool:
        """Return whether the update has matrix products, and the CPU computes them and the model."""
        return self.work.state.rule.matrices and self.machine.gpu is None

    def overlapping_forward(self, found: Forecast) -> Forecast:
        """Return the forecast with the update overlapping the next forward; `found` has no overlap."""
        pages = sum(group.count for group in self._laid_out.cut.groups if on_drive(group.page.home))
        micro, buffers, read = self.work.passes, self.sizes.page_buffers, 0.0
        if self._weights_precede_state:
            read = read_before_update(found, pages, buffers=buffers, micro_batches=micro)
        return replace(found, behind=True, hidden=self._hidden(found, parts_of(self.units, self._laid_out), read=read))

    @property
    def _weights_precede_state(self) -> bool:
        """Return whether new weights are ready before the state of their page has been written.

        Several ranks wait for both. Weights on drives are written after the state of earlier pages.
        """
        return self.work.world == 1 and self.placement.params != TierKind.DRIVES

    def _hidden(self, found: Forecast, parts: Sequence[UnitShare], *, read: float = 0.0, after: float = 0.0) -> float:
        gpu, micro = self.machine.gpu is not None, self.work.passes
        return hidden_seconds(found, parts, micro_batches=micro, gpu=gpu, read=read, after=after)

    def _overlapping_backward(self, found: Forecast) -> Forecast:
        """Return the forecast of an update that starts during the backward; `found` has no overlap."""
        buffers, gpu = self.sizes.page_buffers, self.machine.gpu is not None
        early = early_pages(self.units, self._laid_out, copying=self._copying_shadows, buffers=buffers)
        ahead = ahead_of(found, self.units, early, micro_batches=self.work.passes, gpu=gpu)
        left = left_after(found, ahead, early)
        update, rest = (one.seconds["update"] or 0.0 for one in (found, left))
        whole_parts = parts_of(self.units, self._laid_out)
        parts = parts_left(found, left, self.units, whole_parts, last=early.last)
        ready = early.read * update if self._weights_precede_state else 0.0
        whole = self._hidden(left, parts, read=ready / rest if rest else 0.0, after=min(ahead.first, ready))
        whole += update - rest - (ahead.done - ahead.hidden)
        # A clipped step's update starts after the backward.
        again = self._hidden(found, whole_parts)
        longer = max(0.0, whole - again) + early.copying  # old bytes are copied back
        return replace(found, behind=True, ahead=True, hidden=whole, if_clipped=longer)

    @property
    def _copying_shadows(self) -> float:
        """Return the seconds of copying the old bytes of all pages with shadow memory: each is read and written.

        If the memory's rate was not measured, it is that of the update, which is bound by memory.
        """
        size, rate = shadow_bytes(self._laid_out, self.sizes.format), self.machine.rates.memory
        if rate is not None:
            return 2 * size / rate.value
        each = 2 * self.work.state.mean_bytes(self.work.shape) + 4  # the gradient and the weight have 16 bits
        moved = (update_rate(self.work, self.machine) or 0.0) * each
        return 2 * size / moved if moved else 0.0

    @property
    def _on_top(self) -> Mapping[str, float]:
        """Return the seconds that each phase takes in addition to the slowest of its bounds."""
        waited = dict.fromkeys(PHASES, 0.0)
        for wait in self._waits:
            waited[wait.phase] += wait.seconds or 0.0
        if self.machine.gpu is None:  # the cores that compute also add gradients and copy weights from RAM
            waited["backward"] += self._adding
            if self.placement.params == TierKind.RAM and (memory := self.machine.rates.memory):
                for moved in self._traffic:
                    if moved.place == DEVICE_COPIES and moved.phase != "update":
                        waited[moved.phase] += 2 * moved.read / memory.value
        return waited

    def notes(self) -> Iterator[str]:
        """Yield the sentences of the plan about this placement."""
        work, machine = self.work, self.machine
        if machine.no_state_on_gpu:
            yield f"this GPU cannot store optimizer state: {machine.no_state_on_gpu}"
        if work.world > 1:
            nodes = f"{work.nodes} nodes" if work.nodes > 1 else "one node"
            yield f"{work.world} ranks on {nodes}: RAM holds optimizer state, gradient sums and weights once a node"
            if work.nodes > 1:
                yield "RAM and drives are those of one node, which stores the state of its own ranks and all weights"
        if base := work.shape.base_format:
            frozen = sum(weight.numel for weight in work.shape.weights if weight.quantised)
            yield (
                f"model.base={base}: {format_count(frozen)} frozen parameters, the matrices of blocks, are stored in "
                f"{FORMATS[base].bytes_each:.3g} B each and dequantised when they are used; the plan does not count "
                "the seconds of that"
            )
        # The order of micro-batches, where it decides how often weights are fetched.
        why, count, key = why_not_breadth_first(work), work.accumulate, "tiered.micro_batch_order"
        is_open = self.section.micro_batch_order == "auto" and self.placement.params != TierKind.GPU
        if work.breadth_first:
            yield (
                f"{key}=breadth_first: the {count} micro-batches of a step pass through each block together, and its "
                "weights are fetched once a pass"
            )
        elif is_open and count > 1 and why and work.checkpoints is not None:
            yield f"{key}=depth_first: weights are fetched for each of the {count} micro-batches, since {why}"
        if parts := [unit for unit in self.units if unit.is_part]:
            largest = max(parts, key=lambda unit: unit.elements)
            block = sum(unit.elements for unit in self.units if unit.within == largest.within)
            yield (
                "tiered.fetch_granularity=module: weights of blocks are fetched in parts; the largest, "
                f"{largest.name}, has {format_count(largest.elements)} of its block's {format_count(block)} parameters"
            )
        if work.sequence > 1:
            yield (
                f"parallel.sequence={work.sequence}: each GPU processes {work.length} of the {work.seq_len} tokens of "
                f"a row; {work.data} data-parallel group(s) of {work.sequence} ranks"
            )
        in_ram, asked = self.placement.params == TierKind.RAM and work.here > 1, self.section.weight_transfer
        if in_ram and (machine.gpu is not None or self.sizes.by_parts):
            size = max(unit.stored_bytes(work.item_bytes) for unit in self.units)
            yield describe_weight_transfer(asked, size, machine, work=work, by_parts=self.sizes.by_parts)
        elif asked != "auto":
            yield (
                f"tiered.weight_transfer={asked} has no effect here: there is one rank per node, or the weights are "
                "not in RAM"
            )
        for phase in PHASES:
            held_up = [wait for wait in self._waits if wait.phase == phase and wait.seconds is not None]
            if parts_of_it := [f"{format_seconds(wait.seconds or 0.0)} for {wait.what}" for wait in held_up]:
                yield f"in the {phase}, ranks additionally wait {', '.join(parts_of_it)}"

    def tunable(self) -> list[tuple[str, ...]]:
        """Return groups of settings for `tune` to try; none of them changes a result or a placement."""
        groups = list[tuple[str, ...]]()
        if self.uses_drives:
            groups += [
                ("tiered.page_size=2097152", "tiered.page_size=8388608"),
                ("tiered.page_buffers=4", "tiered.page_buffers=10"),
            ]
        if self.placement.params != TierKind.GPU:
            groups.append(("tiered.weight_buffers=2", "tiered.weight_buffers=4"))
        return groups
