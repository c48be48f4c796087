"""Find configuration settings that contradict each other, or that the chosen engine does not support.

Each function returns error messages, one sentence each, with what to change.
"""

from __future__ import annotations

from offload_trainer.config import ModelSection, OptimSection, ParallelSection, PlacementSection


def mistakes_of_shares(place: PlacementSection) -> list[str]:
    """Check that --gpu-fraction and --ram-fraction add up and agree with --optimizer; return at most one message."""
    shares = {"--gpu-fraction": place.gpu_fraction, "--ram-fraction": place.ram_fraction}
    given = {flag: share for flag, share in shares.items() if share != "auto"}
    words = " and ".join(f"{flag} {share:g}" for flag, share in given.items())
    left = round(1 - sum(given.values()), 9)
    if left < 0:
        return [f"{words} add up to {1 - left:g} of the state: lower one of them"]
    only = {"gpu": "--gpu-fraction", "cpu": "--ram-fraction"}.get(place.optimizer)
    if only and any(share != (flag == only) for flag, share in given.items()):
        where = "on the GPU" if place.optimizer == "gpu" else "in RAM"
        return [f"{words} with --optimizer {place.optimizer}, which puts all of it {where}: leave one out"]
    if place.ram_fraction != "auto" and left and not place.nvme:
        other = "" if place.gpu_fraction != "auto" else f", or --gpu-fraction {left:g}"
        return [f"{words} leaves {left:g} of the state for a drive: add --nvme DIR{other}"]
    return []


def only_here(
    place: PlacementSection, model: ModelSection, optim: OptimSection, *, engine: str, moments: tuple[str, ...]
) -> list[str]:
    """Return settings that only the tiered engine supports and `engine` would ignore; `moments` are its formats."""
    shares = {"--gpu-fraction": place.gpu_fraction, "--ram-fraction": place.ram_fraction}
    mistakes = [
        f"{flag} {share:g} with the {engine} engine: it stores all of the optimizer state in one place; only --engine "
        "tiered divides it"
        for flag, share in shares.items()
        if share != "auto"
    ]
    if place.gradients != "auto":
        mistakes.append(f"placement.gradients={place.gradients} belongs to --engine tiered, not to {engine}")
    if model.offload_activations == "nvme":
        mistakes.append(f"model.offload_activations=nvme belongs to --engine tiered, not to {engine}: use cpu")
    if engine == "deepspeed" and model.mlp_chunk not in ("auto", "off"):
        mistakes.append(f"model.mlp_chunk={model.mlp_chunk} belongs to --engine tiered, not to deepspeed: leave it out")
    if optim.moment_dtype not in moments:
        mistakes.append(f"optim.moment_dtype={optim.moment_dtype} belongs to --engine tiered, not to {engine}")
    if optim.name != "adamw":
        mistakes.append(f"optim.name={optim.name} belongs to --engine tiered, not to {engine}")
    if optim.kernel != "auto":
        mistakes.append(f"optim.kernel={optim.kernel} belongs to --engine tiered, not to {engine}")
    return mistakes


def mistakes_of_division(parallel: ParallelSection, *, engine: str, checkpointing: str) -> list[str]:
    """Return `parallel.*` settings that `engine` does not support, or that have no effect."""
    mistakes = []
    if parallel.tensor != 1 and engine != "deepspeed":
        mistakes.append(
            f"parallel.tensor={parallel.tensor} needs DeepSpeed: add --engine deepspeed; the tiered engine divides "
            "only rows and state"
        )
    if parallel.sequence > 1 and engine != "tiered":
        mistakes.append(f"parallel.sequence={parallel.sequence} belongs to --engine tiered, not to {engine}")
    if parallel.partition_activations and parallel.tensor == 1:
        mistakes.append(
            "parallel.partition_activations=true divides activations that tensor-parallel ranks all store: add "
            "--engine deepspeed parallel.tensor=N; other ranks store only the activations of their own rows"
        )
    if parallel.partition_activations and checkpointing == "off":
        mistakes.append(
            "parallel.partition_activations=true needs checkpointed activations: use model.activation_checkpointing=on"
        )
    return mistakes


def mistakes_of_length(optim: OptimSection, *, steps: int) -> list[str]:
    """Return an error if the warmup is longer than the run of `steps` steps."""
    if optim.warmup_steps == "auto" or optim.warmup_steps <= steps:
        return []
    return [f"optim.warmup_steps={optim.warmup_steps} is more than train.steps={steps}"]


def mistakes_of_rule(optim: OptimSection) -> list[str]:
    """Return errors in the optimizer, its moment format and its hyperparameters."""
    mistakes = []
    if optim.name == "lion" and optim.moment_dtype == "8bit":
        mistakes.append(
            "optim.moment_dtype=8bit with optim.name=lion: its moment changes by a hundredth a step, which rounding to "
            "the nearest of 256 numbers would undo; use bf16"
        )
    if optim.name == "lion" and optim.eps != OptimSection().eps:
        mistakes.append(f"optim.eps={optim.eps:g} with optim.name=lion, which has no eps: leave it out")
    if max(optim.betas) >= 1:
        mistakes.append(f"optim.betas={list(optim.betas)}: both must be below 1")
    return mistakes
