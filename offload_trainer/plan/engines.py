"""The engines that a configuration chooses between, and checks of settings that contradict each other or the engine.

`Tiered` and `DeepSpeed` each check their settings and list the placements that these allow. Checks return error
messages, one sentence each, with what to change.
"""

from __future__ import annotations

from offload_trainer.config import (
    STREAM,
    DeepSpeedSection,
    OptimSection,
    ParallelSection,
    TieredSection,
    TrainConfig,
)
from offload_trainer.plan.deepspeed.engine import DeepSpeed, DeepSpeedCandidate
from offload_trainer.plan.tiered.engine import Tiered, TieredCandidate
from offload_trainer.plan.tiered.state_formats import MOMENT_FORMATS, RULES
from offload_trainer.plan.tiers import TierKind, kind_asked

Engine = Tiered | DeepSpeed
Candidate = TieredCandidate | DeepSpeedCandidate  # one placement of an engine, with its costs


def engine_of(config: TrainConfig) -> Engine:
    """Return the configured engine with its settings."""
    place, name = config.placement, config.placement.engine_name
    if name == "tiered":
        return Tiered(place, config.tiered, config.model.offload_activations)
    return DeepSpeed(place, config.deepspeed, config.optim.moment_dtype, config.parallel.tensor)


def combination_mistakes(config: TrainConfig) -> list[str]:
    """Return errors in combinations of settings, one sentence each, with what to change."""
    mistakes = []
    place, optim = config.placement, config.optim
    for flag, home in (("--params", place.params), ("--optimizer", place.optimizer)):
        if kind_asked(home) == TierKind.DRIVES and not place.nvme:
            mistakes.append(f"{flag} nvme needs a drive: add --nvme DIR")
    engine = engine_of(config)
    mistakes += engine.mistakes() + settings_of_others(engine, config)
    if config.model.activation_checkpointing == "off" and config.model.offload_activations:
        mistakes.append(
            f"model.offload_activations={config.model.offload_activations} needs checkpointed activations: use "
            "model.activation_checkpointing=on"
        )
    if optim.schedule != "wsd" and optim.decay_steps != "auto":
        mistakes.append(f"optim.decay_steps belongs to optim.schedule=wsd, not to {optim.schedule}")
    if config.train.epochs == "auto":
        mistakes += mistakes_of_length(optim, steps=config.train.steps)
    elif "steps" in config.train.model_fields_set:
        mistakes.append(f"train.epochs={config.train.epochs:g} determines the steps: leave train.steps (--steps) out")
    if (
        config.train.tokens_per_step != "auto"
        and {"micro_batch_size", "gradient_accumulation_steps"} & config.train.model_fields_set
    ):
        mistakes.append(
            "train.tokens_per_step chooses micro_batch_size and gradient_accumulation_steps: leave those two out"
        )
    mistakes += mistakes_of_streams(config)
    mistakes += mistakes_of_division(config.parallel, engine=engine.name)
    return mistakes + mistakes_of_rule(optim) + mistakes_of_compilation(config)


def mistakes_of_streams(config: TrainConfig) -> list[str]:
    """Return settings that a streamed data set does not have, one sentence each."""
    data = config.data
    mistakes = []
    for flag, paths in (("--data", data.path), ("--validation-data", data.validation_path)):
        named = [path for path in paths if path.startswith(STREAM)]
        if named and len(paths) + (flag == "--data" and len(data.mixture)) > 1:
            told = f"a stream is neither mixed nor joined with other text: let it be the only {flag}"
            mistakes.append(f"{named[0]}: {told}")
    if data.shuffle_block_size and not (data.streamed and data.shuffle):
        mistakes.append(
            "data.shuffle_block_size is for --data stream:NAME with data.shuffle=true; all rows of other data are "
            "shuffled: leave it out"
        )
    if not data.streamed:
        return mistakes
    stream = next(path for path in data.path if path.startswith(STREAM))
    if config.train.epochs != "auto":
        mistakes.append(f"{stream}: the length of a stream is not known, so train.epochs has no meaning: use --steps")
    return mistakes


def mistakes_of_compilation(config: TrainConfig) -> list[str]:
    """Return settings that cannot be combined with compiled blocks, one sentence each."""
    if config.model.compile == "off":
        return []
    settings = {
        f"model.mlp_chunk={config.model.mlp_chunk}": isinstance(config.model.mlp_chunk, int),
        "tiered.fetch_granularity=module": config.tiered.fetch_granularity == "module",
        f"parallel.sequence={config.parallel.sequence}": config.parallel.sequence > 1,
    }
    return [
        f"{setting} with model.compile=on: a block is compiled as a whole, and this divides it: use one of the two"
        for setting, is_set in settings.items()
        if is_set
    ]


def settings_of_others(engine: Engine, config: TrainConfig) -> list[str]:
    """Return errors for settings that only another engine supports and this one would ignore."""
    mistakes = [] if isinstance(engine, Tiered) else _only_of_tiered(engine, config)
    for name, section, default in (
        ("tiered", config.tiered, TieredSection()),
        ("deepspeed", config.deepspeed, DeepSpeedSection()),
    ):
        if engine.name != name and section != default:
            words = f"{name}.* keys with --engine {engine.name}, which does not read them"
            mistakes.append(f"{words}: add --engine {name}")
    return mistakes


def _only_of_tiered(engine: DeepSpeed, config: TrainConfig) -> list[str]:
    """Return settings that only the tiered engine supports and `engine` would ignore."""
    place, model, optim = config.placement, config.model, config.optim
    mistakes = [
        f"{flag} {share:g} with the {engine.name} engine: it stores all of the optimizer state in one place; only "
        "--engine tiered divides it"
        for flag, share in place.shares.items()
        if share != "auto"
    ]
    settings = {
        "placement.gradients": (place.gradients != "auto", ""),
        "model.offload_activations": (kind_asked(model.offload_activations) == TierKind.DRIVES, ": use cpu"),
        "model.activation_checkpointing": (isinstance(model.activation_checkpointing, int), ": use on or off"),
        "model.base": (model.base != "model", ": leave it out"),
        "model.compile": (model.compile == "on", ": leave it out"),
        "model.mlp_chunk": (model.mlp_chunk not in ("auto", "off"), ": leave it out"),
        "optim.moment_dtype": (optim.moment_dtype not in ("fp32", "8bit"), ""),
        "optim.name": (optim.name != "adamw", ""),
        "optim.kernel": (optim.kernel != "auto", ""),
    }
    for setting, (is_set, fix) in settings.items():
        section, _, key = setting.partition(".")
        value = getattr(getattr(config, section), key)
        mistakes += [f"{setting}={value} belongs to --engine tiered, not to {engine.name}{fix}"] if is_set else []
    return mistakes


def mistakes_of_division(parallel: ParallelSection, *, engine: str) -> list[str]:
    """Return `parallel.*` settings that `engine` does not support, or that have no effect."""
    mistakes = []
    if parallel.tensor != 1 and engine != "deepspeed":
        mistakes.append(
            f"parallel.tensor={parallel.tensor} needs DeepSpeed: add --engine deepspeed; the tiered engine divides "
            "only rows and state"
        )
    if parallel.sequence > 1 and engine != "tiered":
        mistakes.append(f"parallel.sequence={parallel.sequence} belongs to --engine tiered, not to {engine}")
    return mistakes


def mistakes_of_length(optim: OptimSection, *, steps: int) -> list[str]:
    """Return an error if the warmup is longer than the run of `steps` steps."""
    if optim.warmup_steps == "auto" or optim.warmup_steps <= steps:
        return []
    return [f"optim.warmup_steps={optim.warmup_steps} is more than train.steps={steps}"]


def mistakes_of_rule(optim: OptimSection) -> list[str]:
    """Return errors in the optimizer, its moment format and its hyperparameters."""
    mistakes, rule, default = [], RULES[optim.name], OptimSection()
    if MOMENT_FORMATS[optim.moment_dtype] not in rule.formats:
        mistakes.append(f"optim.moment_dtype={optim.moment_dtype} with optim.name={optim.name}: {rule.no_other}")
    for key in rule.ignores:
        if (value := getattr(optim, key)) != getattr(default, key):
            mistakes.append(f"optim.{key}={value} with optim.name={optim.name}, which has no {key}: leave it out")
    if max(optim.betas) >= 1:
        mistakes.append(f"optim.betas={list(optim.betas)}: both must be below 1")
    return mistakes
