"""The shape of a transformers model, read from the module on the meta device: all that a plan knows of a model.

For any architecture, transformers is asked for blocks, heads and splits, and a run on meta tensors for activations.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from offload_trainer.common.errors import UserError
from offload_trainer.config import ModelSection
from offload_trainer.model.activations import ModelMemory, count_activations
from offload_trainer.model.images import Patches, class_names, image_parts, with_images
from offload_trainer.model.loss import head_needs_only_hidden_states
from offload_trainer.plan.shape import ModelShape, Split, Weight, unit_of
from offload_trainer.plan.tiered.weight_streaming import with_order
from offload_trainer.storage.tensorfile import DTYPES

_UNLIMITED = 2048  # row length in tokens for a model without a limit
_ACTIVE = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")  # names that configurations use for k
_SPLITS: dict[str, Split] = {"colwise": "column", "rowwise": "row", "replicated_with_grad_allreduce": "summed"}
# transformers' Trainer recognises biases and norms in this way; A_log is Mamba's decay, excluded by its authors too.
_SPARED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm(\.|$)|_norm(\.|$)|(^|\.)a_log$")


def model_shape(
    model: PreTrainedModel, section: ModelSection, *, packed: bool = False, image_patches: Patches = 0
) -> ModelShape:
    """Return the shape of a model on the meta device.

    `image_patches`: the patches of a row's images; 0: rows hold text alone. Afterwards the model's parameters
    are in the run's dtype, and frozen as configured. Raises UserError for a model without a vocabulary.
    """
    if not hasattr(model.config.get_text_config(), "vocab_size"):
        raise UserError(
            f"{type(model).__name__}: its configuration says no vocab_size, so it predicts no tokens: build it with "
            "transformers, and give the module to offload_trainer.offload"
        )
    patterns = []
    for text in section.freeze:
        try:
            patterns.append(re.compile(text))
        except re.error as error:
            raise UserError(f"model.freeze: {text!r} is not a regular expression: {error}") from error
    names = [name for name, _ in model.named_parameters()]
    if idle := [pattern.pattern for pattern in patterns if not any(pattern.search(name) for name in names)]:
        raise UserError(f"model.freeze: no parameter matches {', '.join(map(repr, idle))}; the first is {names[0]}")
    if section.activation_checkpointing not in ("auto", "off") and not model.supports_gradient_checkpointing:
        raise UserError(
            f"model.activation_checkpointing={section.activation_checkpointing}: {type(model).__name__} has none in "
            "transformers; leave it auto"
        )
    blocks = block_names(model)
    products = products_of(model)
    spared, divided = no_weight_decay_names(model), tensor_splits(model, blocks)
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    weights = []
    for name, parameter in model.named_parameters():
        unit, in_block = unit_of(name, blocks)
        weights.append(
            Weight(
                name,
                tuple(parameter.shape),
                trainable=not any(pattern.search(name) for pattern in patterns),
                unit=unit,
                block=in_block,
                uses=uses[id(parameter)],
                spared=name in spared,
                split=divided.get(name, ""),
                products=products[name],
            )
        )
    weights = _with_base(model, weights, section.base)
    # If nothing is trainable, adapters will be trained; count their passes as those of the whole model.
    trained = {weight.name for weight in weights if weight.trainable} or set(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)

    dtype, chunk = DTYPES[section.dtype], section.loss_chunk
    count = partial(count_activations, model, blocks, dtype=dtype, packed=packed, chunk=chunk)
    counted = count()  # if it is None, the plan estimates activations
    whole = counted is None and not head_needs_only_hidden_states(model)
    if whole:
        counted = count(whole_logits=True)
    order = counted.order if counted else None
    images = image_parts(model, weights, order, patches=image_patches) if image_patches else None
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or 0
    shape = ModelShape(
        weights=tuple(weights),
        layers=getattr(text, "num_hidden_layers", None) or len(blocks),
        hidden=getattr(text, "hidden_size", None) or model.get_input_embeddings().weight.shape[-1],
        vocabulary=text.vocab_size,
        # Some models have no limit, or state it as -1.
        context=positions if positions > 0 else _UNLIMITED,
        attention=attention_widths(model, blocks),
        heads=_count(text, "num_attention_heads"),
        key_heads=_count(text, "num_key_value_heads") or _count(text, "num_attention_heads"),
        on_gpu=counted.on_gpu if counted else None,
        on_cpu=counted.on_cpu if counted else None,
        can_checkpoint=model.supports_gradient_checkpointing,
        can_checkpoint_some=_can_checkpoint_some(model, blocks, counted),
        whole_logits=whole,
        packed=packed,
        images=images,
        notes=tuple(_notes(model, section, whole_logits=whole)),
    )
    if order and images:
        order = with_images(order, images, weights)
    return with_order(shape, order) if order else shape


def _with_base(model: PreTrainedModel, weights: list[Weight], base: str) -> list[Weight]:
    """Return the weights with the format `base` (`model.base`) of the frozen matrices of blocks.

    Linear layers, as in QLoRA, and experts in one tensor; not routers of other classes. Raises UserError without any.
    """
    if base == "model":
        return weights
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    found = []
    for weight in weights:
        chosen = weight.block_matrix and not weight.trainable and (weight.name in linear or len(weight.shape) == 3)
        found.append(replace(weight, quantised=base) if chosen else weight)
    if found == weights:
        raise UserError(
            f"model.base={base} quantises frozen matrices of the model's blocks, and none is frozen: add "
            "model.freeze=['.'], and train adapters"
        )
    return found


def _count(text: Any, name: str) -> int:
    """Return a number from a configuration, or 0 if it is missing or differs between blocks."""
    found = 0 if getattr(text, "is_heterogeneous", False) else getattr(text, name, None)
    return found if isinstance(found, int) else 0


def _can_checkpoint_some(model: PreTrainedModel, blocks: Sequence[str], counted: ModelMemory | None) -> bool:
    """Return whether the first N blocks can be checkpointed for any N.

    Each block must be a layer that checkpoints itself, and must run once, in the order of its number. The first block
    must be trained: its input requires a gradient then, so frozen blocks would keep activations that are not counted.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)]
    if not (model.supports_gradient_checkpointing and layers) or layers != list(blocks) or counted is None:
        return False
    if not any(parameter.requires_grad for parameter in model.get_submodule(blocks[0]).parameters()):
        return False
    ran = [name for name in (counted.order.forward if counted.order else ()) if name in layers]
    return ran == layers and len(counted.on_gpu.blocks) == len(layers)


def _notes(model: PreTrainedModel, section: ModelSection, *, whole_logits: bool) -> Iterator[str]:
    name, text = type(model).__name__, model.config.get_text_config()
    attends = bool(getattr(_of_layer(text, 0), "num_attention_heads", None))
    if section.attention == "auto" and attends and text._attn_implementation == "eager":
        yield f"attention: eager, since {name} has no SDPA in transformers; attention matrices are stored"
    if section.activation_checkpointing == "auto" and not model.supports_gradient_checkpointing:
        yield f"gradient checkpointing: off whatever its size, since {name} has none in transformers"
    if whole_logits:
        yield (
            f"loss: with the logits of all tokens at once, since {name}'s head cannot be run on a chunk of hidden "
            "states; model.loss_chunk has no effect"
        )


def no_weight_decay_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the biases, parts of norms and decays of Mamba that are no vectors, which get no weight decay."""
    norms = tuple(f"{name}." for name, module in model.named_modules() if type(module).__name__.endswith("Norm"))
    names = [name for name, parameter in model.named_parameters() if parameter.dim() > 1]
    return frozenset(name for name in names if _SPARED.search(name.lower()) or name.startswith(norms))


def block_names(model: PreTrainedModel) -> list[str]:
    """Return the repeated blocks: the outermost modules that transformers says must not be split over devices.

    In a model that reads images, layers that checkpoint themselves are too: some towers name only some (Idefics 3).
    """
    kinds = tuple(model._no_split_modules or ())
    reads_images = type(model).__name__ == class_names(model.config)[0]
    found: list[str] = []
    for name, module in model.named_modules():
        block = type(module).__name__ in kinds or (reads_images and isinstance(module, GradientCheckpointingLayer))
        if block and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def products_of(model: PreTrainedModel) -> dict[str, float]:
    """Return for each parameter the number of products per token in which its elements take part.

    The planner derives FLOPs from it. A matrix takes part in one for each module that uses it, an expert of E in k / E
    if each token is sent to k of them. Biases, norms and embeddings that are only looked up take part in none.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = dict.fromkeys(names.values(), 0.0)
    config = _of_layer(model.config.get_text_config(), 0)
    stated = (getattr(each, key, None) for each in (config, getattr(config, "ffn_config", None)) for key in _ACTIVE)
    active = next((value for value in stated if isinstance(value, int)), 0)
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1 and not leaf.endswith("bias"):
                found[names[id(parameter)]] += _share(model, path, module, parameter, active=active)
    return found


def _share(model: PreTrainedModel, path: str, module: nn.Module, parameter: nn.Parameter, *, active: int) -> float:
    """Return the share of a module's weight that one token is multiplied with, below 1 for experts."""
    if parameter.dim() == 3 and not isinstance(module, nn.Conv1d):
        # Experts whose forward does not receive the router's choice compute every expert for every token.
        gets_choice = len(inspect.signature(type(module).forward).parameters) > 2
        return min(1.0, active / parameter.shape[0]) if gets_choice and active else 1.0
    before, found, _ = path.rpartition(".experts.")
    experts = model.get_submodule(f"{before}.experts") if found else None
    return min(1.0, active / len(experts)) if isinstance(experts, nn.ModuleList) and active else 1.0


def attention_widths(model: PreTrainedModel, blocks: Sequence[str]) -> tuple[int, ...]:
    """Return heads x (key size + value size) for each block, or 0 for a block without attention."""
    config = model.config.get_text_config()
    return tuple(
        sum(
            _width(module, _of_layer(config, getattr(module, "layer_idx", None)))
            for module in model.get_submodule(block).modules()
            if hasattr(module, "is_causal")
        )
        for block in blocks
    )


def _of_layer(config: Any, number: int | None) -> Any:
    """Return the configuration of one layer if layers have separate ones, otherwise the model's."""
    return config.per_layer_config[number or 0] if getattr(config, "is_heterogeneous", False) else config


def _width(module: nn.Module, config: Any) -> int:
    """Return the width of one attention module; query heads count, since each uses the grouped keys and values."""
    heads = getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", 0)
    head = getattr(module, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = getattr(module, "qk_head_dim", None) or head
    return int(heads * (keys + (getattr(module, "v_head_dim", None) or head)))


def tensor_splits(model: PreTrainedModel, blocks: Sequence[str]) -> dict[str, Split]:
    """Return the split of each weight in the blocks by name, or {} if a matrix has no split that is supported here.

    transformers' `base_model_tp_plan` says how tensor parallelism splits an architecture's weights.
    Styles that need more than splitting (packed products, experts, gathered outputs) are not supported.
    """
    styles = getattr(model.config.get_text_config(), "base_model_tp_plan", None) or {}
    if not styles or not set(styles.values()) <= set(_SPLITS):
        return {}
    prefix = re.escape(f"{model.base_model_prefix}.")
    patterns = {prefix + re.escape(name).replace(r"\*", "[0-9]+"): _SPLITS[style] for name, style in styles.items()}
    found: dict[str, Split] = {}
    for name, parameter in model.named_parameters():
        if not any(name.startswith(f"{block}.") for block in blocks):
            continue
        owner, _, leaf = name.rpartition(".")
        split: Split = next((its for pattern, its in patterns.items() if re.fullmatch(pattern, owner)), "")
        linear = type(model.get_submodule(owner)) is nn.Linear
        if parameter.dim() > 1 and not (linear and split in ("column", "row")):
            return {}
        if split:
            found[name] = "" if split == "row" and leaf == "bias" else split
    return found
