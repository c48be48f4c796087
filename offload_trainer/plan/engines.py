"""The engines that a configuration chooses between, and checks of settings that contradict each other or the engine.

`Tiered` and `DeepSpeed` each check their settings and list the placements that these allow. Checks return error
messages, one sentence each, with what to change.
"""

from offload_trainer.config import STREAM, OptimSection, TrainConfig
from offload_trainer.plan.deepspeed import DeepSpeed, DeepSpeedCandidate
from offload_trainer.plan.tiered.engine import Tiered, TieredCandidate
from offload_trainer.plan.tiered.state_formats import FORMATS, RULES
from offload_trainer.plan.tiers import TierKind

Engine = Tiered | DeepSpeed
Candidate = TieredCandidate | DeepSpeedCandidate  # one placement of an engine, with its costs


def engine_of(config: TrainConfig) -> Engine:
    """Return the configured engine with its settings."""
    place, name = config.placement, config.placement.engine_name
    if name == "tiered":
        return Tiered(place, config.tiered)
    return DeepSpeed(place, config.deepspeed, config.optim.moment_dtype, config.parallel.tensor)


def combination_mistakes(config: TrainConfig) -> list[str]:
    """Return errors in combinations of settings, one sentence each, with what to change."""
    place, model, optim, train, engine = config.placement, config.model, config.optim, config.train, engine_of(config)
    data, parallel, rule = config.data, config.parallel, RULES[optim.name]
    epochs = train.epochs if train.epochs == "auto" else f"{train.epochs:g}"
    homes: dict[str, object] = {"--params ": place.params, "--optimizer ": place.optimizer}
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
    weights, texts = len(data.mixture), len(data.path)
    validation = next((path for path in data.validation_path if path.startswith(STREAM)), "")
    found |= {
        f"{stream}: a stream is neither mixed nor joined with other text: let it be the only --data": (
            stream and texts + weights > 1
        ),
        f"{validation}: validation text is not streamed: name hub:OWNER/NAME:SPLIT or a path": validation,
        f"data.mixture has {weights} weights, and data.path {texts} texts: give one for each": (
            weights not in (0, texts)
        ),
        "data.mixture needs shuffled rows: leave data.shuffle=false out": bool(weights) and not data.shuffle,
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
        words = f"{other}.* keys with --engine {engine.name}, which does not read them"
        mistakes.append(f"{words}: add --engine {other}")
    return mistakes


def mistakes_of_length(optim: OptimSection, *, steps: int) -> list[str]:
    """Return an error if the warmup is longer than the run of `steps` steps."""
    if optim.warmup_steps == "auto" or optim.warmup_steps <= steps:
        return []
    return [f"optim.warmup_steps={optim.warmup_steps} is more than train.steps={steps}"]
