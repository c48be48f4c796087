"""Choose the engine, placement and update schedule for a configuration on a machine, and check the configuration.

    MachineProfile + ModelShape + TrainConfig  ->  make_plan  ->  Plan

Each engine's module lists its candidate placements. The planner takes the fastest candidate that fits, or the first one
that fits if the machine has not been benchmarked.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from offload_trainer.common.errors import UserError
from offload_trainer.common.packages import lacks
from offload_trainer.common.units import format_bytes, format_count, format_seconds
from offload_trainer.config import STREAM, ModelSection, OptimSection, TrainConfig
from offload_trainer.plan.deepspeed import DeepSpeed, DeepSpeedCandidate
from offload_trainer.plan.machine import MachineProfile, card_mistakes, has_bf16
from offload_trainer.plan.memory import CUDA_CONTEXT, gpu_reserve, image_note, reserve_items, saved_items, with_rate
from offload_trainer.plan.plan import Plan, Shared
from offload_trainer.plan.shape import ModelShape
from offload_trainer.plan.step_time import DEVICE_COPIES, Traffic, forecast, stands_for
from offload_trainer.plan.tiered.engine import FULL, WORTH, Tiered, TieredCandidate
from offload_trainer.plan.tiered.spec import layouts_of
from offload_trainer.plan.tiered.state_formats import BF16, FORMATS, RULES, state_format
from offload_trainer.plan.tiered.weight_streaming import at_once
from offload_trainer.plan.tiers import GPU_NAME, RAM_NAME, Item, TierKind
from offload_trainer.plan.workload import Workload

LONGEST_ROW = 1024  # tokens, if the length of a row is `auto` and the model's context is not shorter
_ALIKE = 1.05  # steps within this factor count as equally fast

Engine = Tiered | DeepSpeed
Candidate = TieredCandidate | DeepSpeedCandidate  # one placement of an engine, with its costs


def make_plan(
    config: TrainConfig,
    shape: ModelShape,
    machine: MachineProfile,
    *,
    world: int = 1,
    nodes: int = 1,
    saves: bool = True,
) -> Plan:
    """Return the fastest candidate that fits, or, if none fits, the one with the smallest excess.

    `machine` stands for each of `nodes` machines, which have the same number of the `world` ranks. `saves`: count
    checkpoints, or the last weights, on the drive of `machine.output`. Raises UserError for settings that cannot be
    combined.
    """
    plans, refused = list[tuple[str, Plan]](), dict[str, UserError]()
    for way in divisions(config, world=world // nodes):
        name = f"parallel.pipeline={way.parallel.pipeline}"
        try:
            plans.append((name, _plan_of_way(way, shape, machine, world=world, nodes=nodes, saves=saves)))
        except UserError as error:
            refused[name] = error
    if not plans:
        raise next(iter(refused.values()))
    chosen = _choose(plans, untimed="not timed")
    whys = ((name, str(why).removeprefix(f"{name}: ").removesuffix("; leave it out")) for name, why in refused.items())
    return replace(chosen, rejected=(*whys, *chosen.rejected))


def engine_of(config: TrainConfig) -> Engine:
    """Return the configured engine with its settings."""
    place, name = config.placement, config.placement.engine_name
    if name == "tiered":
        return Tiered(place, config.tiered)
    return DeepSpeed(place, config.deepspeed, config.optim.moment_dtype, config.parallel.tensor)


def _plan_of_way(
    config: TrainConfig, shape: ModelShape, machine: MachineProfile, *, world: int, nodes: int, saves: bool
) -> Plan:
    """Return the plan of ranks that are data-parallel, or of a pipeline."""
    config = config.model_copy(update={"model": with_dtype_of_card(config.model, machine)})
    engine, work = engine_of(config), workload(config, shape, world=world, nodes=nodes, saves=saves)
    machine = at_once(machine, ranks=work.here)
    for wrong, fix in card_mistakes(machine, dtype=work.dtype):
        raise UserError(f"{wrong}: {fix}")
    for setting, package in engine.packages:
        if machine.lacks(package):
            raise UserError(lacks(setting, package))
    engine.refuse(work, machine)
    chosen = _best(engine, work, machine)
    asks_for_all = (config.tiered.micro_batch_order == "breadth_first" and work.accumulate > 1) or work.pipeline > 1
    if config.model.activation_checkpointing == "auto" and isinstance(engine, Tiered) and not asks_for_all:
        chosen = _best_checkpointing(engine, work, machine, default=chosen)
    if isinstance(engine, Tiered) and not chosen.fits:
        largest = max(layouts_of(work).units, key=lambda unit: unit.elements)
        size, gpu = work.item_bytes * largest.elements, machine.gpu is not None
        room = machine.gpu_bytes - CUDA_CONTEXT - gpu_reserve(machine) if gpu else machine.ram_bytes
        if size > room:
            name = f"the block {largest.name}" if largest.block else largest.name
            has = f"{'a GPU' if gpu else 'RAM'} has room for {format_bytes(room)}"
            told = f"{name} alone has {format_bytes(size)} of weights, {has}, and it is fetched as a whole"
            chosen = replace(chosen, too_large=told)
    return replace(chosen, faster=tuple(_faster_formats(engine, chosen, work, machine)))


def resolved(config: TrainConfig, plan: Plan) -> TrainConfig:
    """Return the configuration with the dtype, checkpointing and division over ranks of its plan."""
    if config.parallel.pipeline == "auto":
        config = config.with_keys("parallel", pipeline=plan.work.pipeline)
        config = config.with_keys("train", gradient_accumulation_steps=plan.work.accumulate)
    count, found = plan.work.checkpointed, dict[str, object]()
    if count or not config.model.offload_activations:  # off would be refused with offload_activations
        found["activation_checkpointing"] = "off" if not count else "on" if count == plan.work.shape.layers else count
    if plan.work.dtype != config.model.dtype:
        found["dtype"] = plan.work.dtype
    return config.with_keys("model", **found)


def divisions(config: TrainConfig, *, world: int) -> list[TrainConfig]:
    """Return the ways to divide a step over a node's `world` ranks that `parallel.pipeline` allows.

    For `auto`, what is written counts for data-parallel ranks. A pipeline has `world` times as many micro-batches,
    since its ranks share them, and so the same rows a step.
    """
    if config.parallel.pipeline != "auto":
        return [config]
    micro = config.train.gradient_accumulation_steps
    return [
        config.with_keys("parallel", pipeline=count).with_keys("train", gradient_accumulation_steps=count * micro)
        for count in sorted({1, world})
    ]


# -- the best of an engine's schedules and placements ----------------------------------------------------------------


def _best_checkpointing(engine: Tiered, work: Workload, machine: MachineProfile, *, default: Plan) -> Plan:
    """Return the plan with the number of checkpointed blocks that makes a step shortest; `default` has all or none.

    Another number than the default's must save `WORTH` of the step, since forecasts are inexact and the state moves to
    slower tiers; it may not write more to drives, which wear out. Without a forecast the default stays if it fits, else
    as few blocks as fit are checkpointed. If no number fits, all are.

    A CPU that computes the model shares its cores with the update and the transfers: with all state of gpt2-medium on a
    drive of 419 MB/s, a step of 1,024 tokens took 11.6 s without recomputation and 13.6 s with it. There, of the
    numbers whose steps are within `_ALIKE` of the shortest, the one that computes least is therefore taken.
    """
    shape, layers, step = work.shape, work.shape.layers, default.forecast.step
    may_gain = default.fits and default.work.checkpointed and step is not None
    may_fit = not default.fits and not default.work.checkpointed
    if not shape.can_checkpoint or not shape.trainable or not (may_gain or may_fit):
        return default  # if only adapters are trained, what they keep in each block is not counted
    plans = {default.work.checkpointed: default}
    least = 1 if work.offload_activations else 0  # only inputs of checkpointed blocks are offloaded

    def written(plan: Plan) -> int:
        return sum(moved.written for moved in plan.traffic if moved.place != DEVICE_COPIES)

    def seconds(count: int) -> float:
        plan = plans[count]
        if not plan.fits or (default.fits and written(plan) > written(default)):
            return math.inf
        return plan.forecast.step if plan.forecast.step is not None else 1.0 + count

    def computing(count: int) -> float:
        return sum(plans[count].forecast.seconds[phase] or 0.0 for phase in ("forward", "backward"))

    def best_of(counts: Iterable[int]) -> int:
        """Return the best number of all that were tried, after trying `counts`."""
        for count in counts:
            if count not in plans and least <= count <= layers:
                plans[count] = _best(engine, replace(work, checkpointed=count), machine)
        return min(plans, key=seconds)

    width = max(1, layers // 4) if shape.can_checkpoint_some else layers
    best = best_of((*range(0, layers, width), layers))
    while shape.can_checkpoint_some and width > 1:
        width //= 2
        best = best_of((best - width, best + width))
    if not plans[best].fits:
        return plans[layers]
    before, saved = seconds(default.work.checkpointed), 0.0
    if machine.gpu is None and step is not None:
        alike = (count for count in plans if seconds(count) <= _ALIKE * seconds(best))
        best = min(alike, key=computing)
        saved = computing(default.work.checkpointed) - computing(best)
    if default.fits and seconds(best) > (1 - WORTH) * before and saved < WORTH * before:
        return default
    told = "does not fit" if not default.fits else "not timed" if step is None else f"{format_seconds(step)} a step"
    other = f"{default.work.checkpointed} of {layers}: {told}"
    note = f"model.activation_checkpointing=auto: {best} of {layers} blocks; {other}"
    return replace(plans[best], notes=(*plans[best].notes, note))


def _best(engine: Engine, work: Workload, machine: MachineProfile) -> Plan:
    """Return the plan with the best placement and, if the tiered engine leaves that open, update schedule.

    An update that starts during the backward replaces the default only if it gains enough. If nothing is on drives, it
    is only tried if the rest of the update is a worthwhile share of the step.
    """
    first = _best_placement(engine, work, machine)
    if not isinstance(engine, Tiered) or engine.section.overlap != "auto" or engine.section.state_copies == 1:
        return first
    found, step, update = first.forecast, first.forecast.step, first.forecast.seconds["update"]
    in_memory = first.fits and not first.uses_drives
    if in_memory and (step is None or update is None or update - found.hidden < WORTH * step):
        return first
    full = replace(engine, section=engine.section.model_copy(update={"overlap": "backward"}))
    if why := full.why_not_full(work, machine):
        why = why.removeprefix(FULL).lstrip(": ")
        return first if in_memory else replace(first, rejected=(*first.rejected, (FULL, why)))
    plan = _best_placement(full, work, machine)
    # An overlap with the next forward that gains less than `WORTH` is taken, and must not keep this one from it.
    apart = (step or 0.0) + found.hidden
    before = apart if found.behind and found.hidden < WORTH * apart else step or 0.0
    gains = plan.forecast.step is not None and plan.forecast.step <= (1 - WORTH) * before
    if plan.fits and (gains or not first.fits):
        return plan
    why = _why_not(plan, first)
    return replace(first, rejected=(*first.rejected, (FULL, why))) if why and not in_memory else first


def _best_placement(engine: Engine, work: Workload, machine: MachineProfile) -> Plan:
    return _choose([(plan.homes, plan) for plan in map(_plan_of, engine.candidates(work, machine))])


def _choose(plans: Sequence[tuple[str, Plan]], *, untimed: str = "") -> Plan:
    """Return the best of the named plans, and first of all why the others were rejected; `untimed`: without a forecast.

    That is the fastest that fits, the first one that fits if a forecast is missing, or the smallest excess. Forecasts
    are inexact, so this takes the first plan within `_ALIKE` of the fastest: earlier plans move fewer bytes.
    """
    fitting = [plan for _, plan in plans if plan.fits]
    known = [plan.forecast.step for plan in fitting if plan.forecast.step is not None]
    if not fitting:
        _, chosen = min(plans, key=lambda one: sum(max(0, t["need"] - t["have"]) for t in one[1].tiers.values()))
    elif len(known) < len(fitting):
        chosen = fitting[0]
    else:
        chosen = next(plan for plan, step in zip(fitting, known, strict=True) if step <= _ALIKE * min(known))
    whys = [(name, _why_not(plan, chosen) or untimed) for name, plan in plans if plan is not chosen]
    return replace(chosen, rejected=(*((name, why) for name, why in whys if why), *chosen.rejected))


def _why_not(plan: Plan, chosen: Plan) -> str:
    """Return why a plan was not chosen over another one; "" if it fits and a forecast is missing."""
    step, best = plan.forecast.step, chosen.forecast.step
    if not plan.fits:
        return "; ".join(plan.shortfalls())
    if step is None or best is None:
        return ""
    takes = f"fits, but a step takes {format_seconds(step)}"
    if step >= 1.01 * best:
        return f"{takes}, {step / best - 1:.0%} longer"
    return f"{takes}, less than {_ALIKE - 1:.0%} faster, and forecasts are inexact"


def _faster_formats(engine: Engine, plan: Plan, work: Workload, machine: MachineProfile) -> Iterator[tuple[float, str]]:
    """Yield (seconds per step, settings) of each smaller format of the state that would be `WORTH` shorter again.

    These are the smaller moments, and at last bf16 masters with the smallest; they change results, so `auto` never
    takes them. They are only tried where the update keeps a step waiting, and state is not only in the RAM of a CPU.
    """
    found, state, formats = plan.forecast, work.state, work.state.rule.formats
    step, update = found.step, found.seconds["update"]
    if not isinstance(engine, Tiered) or not plan.fits or step is None or update is None:
        return
    if update - found.hidden < WORTH * step or (machine.gpu is None and not plan.uses_drives):
        return
    same = replace(work, checkpointed=plan.work.checkpointed)
    tried = [replace(state, moments=moments) for moments in formats[formats.index(state.moments) + 1 :]]
    if work.dtype == "bf16" and BF16 in state.rule.masters and state.masters != BF16:
        tried.append(replace(state, moments=formats[-1], masters=BF16))
    for smaller in tried:
        other = _best(engine, replace(same, state=smaller), machine)
        shorter = other.forecast.step
        if other.fits and shorter is not None and shorter <= (1 - WORTH) * step:
            pairs = ("moment", state.moments, smaller.moments), ("master", state.masters, smaller.masters)
            yield shorter, " ".join(f"optim.{name}_dtype={new.name}" for name, old, new in pairs if new != old)
            step = shorter


# -- a step of the configuration, and the plan of one candidate -------------------------------------------------------


def workload(config: TrainConfig, shape: ModelShape, *, world: int = 1, nodes: int = 1, saves: bool = True) -> Workload:
    """Return the workload of one optimizer step. `saves`: count checkpoints, or the last weights.

    If `parallel.pipeline` is `auto`, it is that of data-parallel ranks. Raises UserError for rows longer than the
    model's context.
    """
    model, train, optim = config.model, config.train, config.optim
    pipeline = 1 if config.parallel.pipeline == "auto" else config.parallel.pipeline
    asked, context = config.data.seq_len, shape.context
    seq_len = min(context, LONGEST_ROW) if asked == "auto" else asked
    if seq_len > context:
        raise UserError(f"--seq-len {seq_len}: this model's context is {context} tokens")
    return Workload(
        shape=with_rate(shape, seq_len),
        dtype=model.dtype,
        micro_batch=train.micro_batch_size,
        accumulate=train.gradient_accumulation_steps,
        seq_len=seq_len,
        world=world,
        checkpointed=checkpointed_blocks(model, shape, all_if_auto=pipeline > 1),
        offload_activations=model.offload_activations,
        loss_chunk=train.micro_batch_size * seq_len if shape.whole_logits else model.loss_chunk,
        state=state_format(optim.name, optim.moment_dtype, optim.master_dtype),
        kernel=optim.kernel,
        checkpoints=None if not saves else 0 if config.save.every == 0 else config.save.keep,
        nodes=nodes,
        tensor=config.parallel.tensor,
        pipeline=pipeline,
    )


def _plan_of(one: Candidate) -> Plan:
    work, machine, costs, sizes = one.work, one.machine, one.costs(), one.sizes
    found = forecast(work, machine, costs)
    if isinstance(one, TieredCandidate):
        sizes, found = one.settled(found)
    items, tiers, shared = _needs(one)
    return Plan(
        engine=one.engine,
        title=one.title,
        placement=one.placement,
        sizes=sizes,
        homes=one.homes,
        uses_drives=one.uses_drives,
        cannot_save=one.cannot_save,
        work=work,
        items=tuple(items),
        tiers=tiers,
        shared=shared,
        traffic=tuple(costs.traffic),
        links=tuple(costs.links),
        forecast=found,
        rejected=(),
        notes=(*work.shape.notes, *machine.notes, *_notes(work, costs.traffic, machine), *one.notes(costs)),
    )


def _needs(one: Candidate) -> tuple[list[Item], dict[str, dict[str, int]], Shared]:
    work, machine = one.work, one.machine
    items = [*one.items, *reserve_items(machine, here=work.here), *saved_items(work, output=machine.output.directory)]
    return items, *room_of(items, work, machine)


def room_of(items: Sequence[Item], work: Workload, machine: MachineProfile) -> tuple[dict[str, dict[str, int]], Shared]:
    """Return {"need", "have"} in bytes for each tier, and the filesystems with several directories in use.

    A directory that shares its filesystem with others has what the others leave.
    """
    outputs = () if work.checkpoints is None else (machine.output,)
    drives = {drive.directory: drive for drive in (*outputs, *machine.drives)}  # the directories that a run writes to
    have = {GPU_NAME: machine.gpu_bytes * work.here, RAM_NAME: machine.ram_bytes}
    have |= {directory: drive.free_bytes for directory, drive in drives.items()}
    need = {tier: sum(item.bytes for item in items if item.tier == tier) for tier in have}
    devices = dict.fromkeys(drive.device for drive in drives.values() if drive.device is not None)
    shared: Shared = {}
    for device in devices:
        these = tuple(directory for directory, drive in drives.items() if drive.device == device)
        for directory in these:
            others = sum(need[other] for other in these if other != directory)
            have[directory] = max(0, drives[directory].free_bytes - others)
        if sum(need[directory] > 0 for directory in these) > 1:
            shared |= dict.fromkeys(these, (these, min(drives[directory].free_bytes for directory in these)))
    return {tier: {"need": need[tier], "have": have[tier]} for tier in have}, shared


def _notes(work: Workload, traffic: Sequence[Traffic], machine: MachineProfile) -> Iterator[str]:
    if work.shape.images:
        yield image_note(work)
    if note := work.state.rule.note:
        yield note.format(matrices=format_count(sum(w.numel for w in work.shape.weights if w.matrix)))
    for drive in machine.drives:
        if written := sum(moved.written for moved in traffic if moved.place == drive.directory):
            rated = drive.endurance_bytes
            lasts = f", whose rated endurance of {format_bytes(rated)} lasts" if rated else ""
            steps = f" {format_count(rated / written)} steps" if rated else ""
            yield f"a step writes {format_bytes(written)} to {drive.directory}{lasts}{steps}"
    timed = machine.rates.matmul
    if machine.gpu is not None and not has_bf16(machine) and work.dtype == "fp16":
        yield f"{machine.gpu} has no bf16 units: training in fp16 with dynamic loss scaling"
    if machine.gpu is not None and timed and work.dtype not in timed:
        as_fast = stands_for(work.dtype, machine)
        guess = f"are assumed to be as fast as {as_fast}" if as_fast else "no time can be forecast"
        yield f"matrix products in {work.dtype} were not timed on {machine.gpu} and {guess}: run `offload-train bench`"
    if work.offload_activations and not work.checkpointed:
        yield "model.offload_activations has no effect: no block is checkpointed (model.activation_checkpointing=on)"
    if machine.gpu is None and work.inputs_away:
        yield "model.offload_activations has no effect without a GPU: block inputs are in host memory anyway"
    if machine.gpu is None:
        yield "no GPU here: the model runs on the CPU, in RAM"


def any_placement_fits(
    config: TrainConfig, shape: ModelShape, machine: MachineProfile, *, world: int, nodes: int
) -> bool:
    """Return whether the configuration fits in any placement that it allows."""
    if config.parallel.pipeline == "auto":
        ways = divisions(config, world=max(1, world // nodes))
        return any(any_placement_fits(way, shape, machine, world=world, nodes=nodes) for way in ways)
    place, machine = config.placement, at_once(machine, ranks=max(1, world // nodes))
    if place.nvme and (place.optimizer, place.gpu_fraction) == ("auto", "auto"):  # needs least with no state on the GPU
        config = config.with_keys("placement", gpu_fraction=0.0)
    engine, work = engine_of(config), workload(config, shape, world=world, nodes=nodes)
    if config.model.activation_checkpointing == "auto" and isinstance(engine, Tiered) and shape.can_checkpoint:
        work = replace(work, checkpointed=shape.layers)
    candidates = engine.candidates(work, machine)[::-1]  # the least on the GPU first
    return any(all(tier["need"] <= tier["have"] for tier in _needs(one)[1].values()) for one in candidates)


# -- values of `auto` that need no comparison of plans: dtype and checkpointing ----------------------------------------


def checkpointed_blocks(section: ModelSection, shape: ModelShape, *, all_if_auto: bool = False) -> int:
    """Return how many blocks are checkpointed, unless the plan chooses for `auto`: the first N, all or none.

    `auto` means all from 1e8 parameters on (below, recomputation costs more than it saves) or with `all_if_auto`, if
    the architecture supports it. Raises UserError if the model has fewer blocks, or cannot checkpoint some of them.
    """
    setting, large = section.activation_checkpointing, all_if_auto or shape.parameters >= 100_000_000
    name = f"model.activation_checkpointing={setting}"
    if not isinstance(setting, int):
        return shape.layers if setting == "on" or (setting == "auto" and large and shape.can_checkpoint) else 0
    if setting > shape.layers:
        raise UserError(f"{name}: the model has {shape.layers} blocks; use on for all")
    if setting < shape.layers and not shape.can_checkpoint_some:
        raise UserError(
            f"{name}: this model checkpoints all of its blocks or none in transformers, or what a single block keeps "
            "could not be counted; use on or off"
        )
    return setting


def with_dtype_of_card(section: ModelSection, machine: MachineProfile) -> ModelSection:
    """Return the section with fp16 as dtype if none was set and the GPU has no bf16 units."""
    is_set = "dtype" in section.model_fields_set
    return section if is_set or has_bf16(machine) else section.model_copy(update={"dtype": "fp16"})


# -- settings that contradict each other or the engine: one sentence each, with what to change ------------------------


def combination_mistakes(config: TrainConfig) -> list[str]:
    """Return errors in combinations of settings, one sentence each, with what to change."""
    place, model, optim, train, engine = config.placement, config.model, config.optim, config.train, engine_of(config)
    data, parallel, rule = config.data, config.parallel, RULES[optim.name]
    epochs = train.epochs if train.epochs == "auto" else f"{train.epochs:g}"
    homes: dict[str, str] = {"--params ": place.params, "--optimizer ": place.optimizer}
    homes["placement.gradients="] = place.gradients
    found: dict[str, object] = {
        f"{setting}nvme needs a drive: add --nvme DIR": home == TierKind.DRIVES and not place.nvme
        for setting, home in homes.items()
    }
    found |= dict.fromkeys([*engine.mistakes(), *_settings_of_others(engine, config)], True)
    found |= {
        "model.offload_activations=true needs checkpointed activations: use model.activation_checkpointing=on": (
            model.activation_checkpointing == "off" and model.offload_activations
        ),
        f"optim.decay_steps belongs to optim.schedule=wsd, not to {optim.schedule}": (
            optim.schedule != "wsd" and optim.decay_steps != "auto"
        ),
        f"train.epochs={epochs} determines the steps: leave train.steps (--steps) out": (
            train.epochs != "auto" and "steps" in train.model_fields_set
        ),
    }
    found |= dict.fromkeys(mistakes_of_length(optim, steps=train.steps) if train.epochs == "auto" else [], True)
    stream = next((path for path in data.path if path.startswith(STREAM)), "")
    shares, texts = len(data.mixture), len(data.path)
    validation = next((path for path in data.validation_path if path.startswith(STREAM)), "")
    found |= {
        f"{stream}: a stream is neither mixed nor joined with other text: let it be the only --data": (
            stream and texts + shares > 1
        ),
        f"{validation}: validation text is not streamed: name hub:OWNER/NAME:SPLIT or a path": validation,
        f"data.mixture has {shares} weights, and data.path {texts} texts: give one for each": shares not in (0, texts),
        "data.mixture needs shuffled rows: leave data.shuffle=false out": bool(shares) and not data.shuffle,
        f"data.shuffle={data.shuffle} is for --data stream:NAME; all rows of other data are shuffled: leave it out": (
            data.shuffled_block and not data.streamed
        ),
        f"{stream}: the length of a stream is not known, so train.epochs has no meaning: use --steps": (
            data.streamed and train.epochs != "auto"
        ),
        f"parallel.tensor={parallel.tensor} needs DeepSpeed: add --engine deepspeed; the tiered engine divides only "
        "rows and state": parallel.tensor != 1 and engine.name != "deepspeed",
        f"optim.moment_dtype={optim.moment_dtype} with optim.name={optim.name}: {rule.no_other}": (
            FORMATS[optim.moment_dtype] not in rule.formats
        ),
        f"optim.master_dtype={optim.master_dtype} with optim.name={optim.name}: {rule.title}'s steps of matrices were "
        "not tried on rounded masters; use fp32": FORMATS[optim.master_dtype] not in rule.masters,
        f"optim.betas={list(optim.betas)}: both must be below 1": max(optim.betas) >= 1,
    }
    return [sentence for sentence, wrong in found.items() if wrong]


def _settings_of_others(engine: Engine, config: TrainConfig) -> list[str]:
    """Return errors for settings that only another engine supports and this one would ignore."""
    place, model, optim = config.placement, config.model, config.optim
    settings, mistakes = dict[str, tuple[bool, str]](), list[str]()
    if not isinstance(engine, Tiered):
        mistakes += [
            f"{flag} {share:g} with the {engine.name} engine: it stores all of the optimizer state in one place; only "
            "--engine tiered divides it"
            for flag, share in place.shares.items()
            if share != "auto"
        ]
        settings = {
            "placement.gradients": (place.gradients != "auto", ""),
            "model.activation_checkpointing": (isinstance(model.activation_checkpointing, int), ": use on or off"),
            "model.base": (model.base != "model", ": leave it out"),
            "optim.moment_dtype": (optim.moment_dtype not in ("fp32", "8bit"), ""),
            "optim.master_dtype": (optim.master_dtype != "fp32", ""),
            "optim.name": (optim.name != "adamw", ""),
            "optim.kernel": (optim.kernel != "auto", ""),
            "parallel.pipeline": (config.parallel.pipeline != 1, ""),
        }
    for setting, (is_set, fix) in settings.items():
        section, _, key = setting.partition(".")
        value = getattr(getattr(config, section), key)
        mistakes += [f"{setting}={value} belongs to --engine tiered, not to {engine.name}{fix}"] if is_set else []
    other = "deepspeed" if isinstance(engine, Tiered) else "tiered"
    keys = getattr(config, other)
    if keys != type(keys)():
        mistakes.append(f"{other}.* keys with --engine {engine.name}, which does not read them: add --engine {other}")
    return mistakes


def mistakes_of_length(optim: OptimSection, *, steps: int) -> list[str]:
    """Return an error if the warmup is longer than the run of `steps` steps."""
    if optim.warmup_steps == "auto" or optim.warmup_steps <= steps:
        return []
    return [f"optim.warmup_steps={optim.warmup_steps} is more than train.steps={steps}"]
