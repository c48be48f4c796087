"""Derive the ModelShape that the planner needs from a module in memory: its weights and its repeated blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from offload_trainer.errors import UserError
from offload_trainer.plan.shape import ModelShape, Weight


def shape_of(module: nn.Module, *, blocks: Sequence[str] | None) -> ModelShape:
    """Return the shape of a module.

    Weights are those of the module; layers, hidden size, vocabulary and context come from its transformers
    configuration if it has one, and are estimated otherwise. `blocks`: names of modules, or of ModuleLists whose
    children are the blocks; None: `repeated_blocks`. Raises UserError for an unknown name.
    """
    names = repeated_blocks(module) if blocks is None else list(_named(module, blocks))
    weights = []
    for name, parameter in module.named_parameters():
        block = next((block for block in names if name.startswith(f"{block}.")), None)
        weights.append(
            Weight(
                name,
                tuple(parameter.shape),
                trainable=parameter.requires_grad,
                unit=block or name.rpartition(".")[0],
                block=block is not None,
            )
        )
    inside = [weight.shape for weight in weights if weight.block and len(weight.shape) > 1] or [(1, 1)]
    outside = [weight.shape[0] for weight in weights if not weight.block and len(weight.shape) > 1]
    return ModelShape(
        weights=tuple(weights),
        layers=_told(module, "num_hidden_layers") or len(names) or 1,
        hidden=_told(module, "hidden_size") or min(min(shape) for shape in inside),
        vocabulary=_told(module, "vocab_size") or max(outside, default=1),
        context=_told(module, "max_position_embeddings") or 2048,
    )


def repeated_blocks(module: nn.Module) -> list[str]:
    """Return the names of the blocks: children of each outermost ModuleList or Sequential of modules of one class."""
    found: list[str] = []
    for name, part in module.named_modules():
        alike = len({type(child) for child in part.children()}) == 1 and len(list(part.children())) > 1
        inside = any(name.startswith(f"{block}.") for block in found)
        if isinstance(part, nn.ModuleList | nn.Sequential) and alike and not inside:
            found += [
                _below(name, key) for key, child in part.named_children() if any(True for _ in child.parameters())
            ]
    return found


def _named(module: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    parts = dict(module.named_modules())
    for name in blocks:
        if name not in parts:
            raise UserError(
                f"blocks={name!r}: the module has no submodule of that name; it has {', '.join(list(parts)[1:9])}"
            )
        if isinstance(parts[name], nn.ModuleList):
            yield from (_below(name, key) for key, _ in parts[name].named_children())
        else:
            yield name


def _below(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _told(module: nn.Module, key: str) -> int | None:
    """Return an integer of the module's transformers (text) configuration; None if it lacks the key."""
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    found = getattr(text, key, None)
    return found if isinstance(found, int) else None
