"""Trials on a tiny model of the same kind as a given one, for any architecture: `refuse_crossing` tries packed rows.

The configuration is shrunk by rules. Widths, heads, windows and numbers of experts become small, whatever their keys
are called. One layer of each kind remains, and at least two. Dropout and noise are off.
"""

import copy
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from offload_trainer.common.errors import UserError
from offload_trainer.common.safe_files import one_line

VOCABULARY, POSITIONS, HIDDEN, HEADS = 211, 64, 32, 4

_LAYERS = re.compile(r"^(num_hidden_layers|n_layers?|num_layers|(num_)?(de|en)coder_layers|num_blocks)$")
# The first rule whose pattern is found in a key gives the maximum of that key's number.
_RULES: tuple[tuple[str, int], ...] = (
    (r"token_id$|_index$|^seed$", 10**9),
    (r"vocab", VOCABULARY),
    (r"position(s|_bias_max_distance|_embeddings$)|context_length|n_ctx|max_seq_len|model_max_length", POSITIONS),
    (r"experts_per_tok|moe_(topk|k)$|topk_group|top_k_experts|zero_expert|n_group$|expert_group", 2),
    (r"experts?$", 8),
    (r"kv_heads|key_value_heads|query_groups|linear_num_key_heads", 2),
    (r"heads|n_head$|n_groups$|o_groups$", HEADS),
    (r"head_dim|d_head|dim_head|head_size|kv_channels|headdim|rotary_dim|v_head_dim", HIDDEN // HEADS),
    (r"hidden_size_per_layer_input|rank$|time_step_rank", 8),
    (r"^(intermediate_size|ffn|dff|dim_ff|.*intermediate|.*ffn|feed_forward|[dn]_inner|expert_ffn)", 48),
    (r"hidden_size|d_model|n_embd|embed|emb_dim|dim_model|lru_width|mamba_d_ssm", HIDDEN),
    (r"d_state|state_size|chunk|block_size|window|extent|index_topk|local_attention$|index_block|buckets", 8),
    (r"first_k_dense", 1),
)
_CHANCE = re.compile(r"drop|jitter|noise")
# keys that stay equal if they are equal in the original
_PAIRS = (("num_attention_heads", "num_key_value_heads"), ("n_heads", "n_kv_heads"))
_LEFT = {"transformers_version", "architectures", "id2label", "label2id", "model_type", "dtype"}

_EQUAL, _SHOWS = 1e-4, 1e-2  # relative to the largest logit, in fp32: limit for equality; least effect of a mistake
_LENGTHS = 13, 9, 10  # tokens of the documents; windows and chunks of a tiny model have 8 tokens

Result = TypeVar("Result")


class TrialFailed(Exception):
    """The tiny model cannot be built, or does not run; the message is that of transformers' error."""


def try_on_tiny_model(model: PreTrainedModel, trial: Callable[[PreTrainedModel], Result]) -> Result:
    """Return the result of `trial` for a tiny fp32 model of the same kind as `model`.

    Its weights are large enough that differences show. Torch's generator outside does not change. Raises TrialFailed
    for any exception, and for a tiny model that lacks a class of module that `model` has.
    """
    try:
        config = tiny_config_of(model.config)
        config._attn_implementation = model.config._attn_implementation
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            tiny = type(model)._from_config(config, dtype=torch.float32).eval()
            if missing := {type(m).__name__ for m in model.modules()} - {type(m).__name__ for m in tiny.modules()}:
                raise ValueError(f"it has no {', '.join(sorted(missing))}")
            with torch.no_grad():
                for parameter in tiny.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0, 0.2)
            return trial(tiny)
    except Exception as error:  # transformers' code may raise anything for an unusual configuration
        raise TrialFailed(one_line(error)) from error


def random_ids(tiny: PreTrainedModel, rows: int, length: int) -> torch.Tensor:
    """Return random tokens [rows, length] without those at both ends of the vocabulary, which may be special."""
    return torch.randint(5, tiny.config.get_text_config().vocab_size - 5, (rows, length))


def tiny_config_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of `config`, shrunk by the rules."""
    twin = copy.deepcopy(config)
    for key, value in shrunk_keys(config).items():
        setattr(twin, key, tiny_config_of(value) if isinstance(value, PreTrainedConfig) else value)
    return twin


def shrunk_keys(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the keys that change, with their small values; nested configurations are returned unchanged."""
    held = {key: value for key, value in vars(config).items() if not key.startswith("_") and key not in _LEFT}
    made: dict[str, Any] = {}
    for key, value in held.items():
        if isinstance(value, PreTrainedConfig):
            made[key] = value
        elif isinstance(value, float) and _CHANCE.search(key):
            made[key] = 0.0
        elif isinstance(value, int) and not isinstance(value, bool) and _number(key, value) != value:
            made[key] = _number(key, value)
    for heads, keys in _PAIRS:
        if keys in made and held[keys] == held.get(heads):
            made[keys] = made.get(heads, held[heads])
    made |= _layers(held)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
        if isinstance(held.get(token), int | list):
            made[token] = {"bos_token_id": 1, "pad_token_id": 0}.get(token, 2)
    return made


def _number(key: str, value: int) -> int:
    most = next((most for pattern, most in _RULES if re.search(pattern, key)), value)
    return min(value, most)


def _layers(held: dict[str, Any]) -> dict[str, Any]:
    """Return the layer counts, and the lists with an item per layer, reduced to one layer of each kind."""
    if not (counts := {key: value for key, value in held.items() if isinstance(value, int) and _LAYERS.search(key)}):
        return {}
    count = max(counts.values())
    lists = {k: list(v) for k, v in held.items() if isinstance(v, list | tuple) and len(v) == count and count > 2}
    kinds = list(zip(*lists.values(), strict=True))
    chosen = sorted({kinds.index(one) for one in kinds})[:4]
    while len(chosen) < min(2, count):
        chosen.append(chosen[-1] if chosen else 0)
    made: dict[str, Any] = {key: min(value, len(chosen)) for key, value in counts.items()}
    for key, values in lists.items():
        items = (values[place] for place in chosen)
        made[key] = [_number(key, item) if type(item) is int else item for item in items]
    return made


def refuse_crossing(model: PreTrainedModel) -> None:
    """Raise UserError if documents in a row influence each other in models like `model`, or if that is unknown.

    transformers derives a mask between documents from positions that restart, if an architecture passes them on and
    carries no other state from token to token. The trial computes a row of several documents and each alone, and,
    to show that it can tell, the row without positions.
    """
    name, key = type(model).__name__, "data.packing=on"
    try:
        difference, effect = try_on_tiny_model(model, torch.no_grad()(_compare_documents))
    except TrialFailed as error:
        raise UserError(
            f"{key}: a tiny {name} to try it on does not run ({error}), so whether documents in a row stay apart is "
            "not known: leave data.packing out"
        ) from error
    if not (difference <= _EQUAL and effect >= _SHOWS):  # a NaN is neither
        raise UserError(
            f"{key}: in a row of several documents {name} computes something else than of each by itself (in a trial "
            f"logits are {difference:.0%} of the largest apart): it carries more from token to token than a mask holds "
            "back, or takes no positions. Leave data.packing out"
        )


def _compare_documents(tiny: PreTrainedModel) -> tuple[float, float]:
    """Return the relative difference between packed and separate documents, with and without positions."""
    documents = [random_ids(tiny, 1, length) for length in _LENGTHS]
    row = torch.cat(documents, 1)
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])[None]
    separate = torch.cat([_logits(tiny, ids) for ids in documents], 1)
    found = _logits(tiny, row, position_ids=positions), _logits(tiny, row)
    packed, crossed = (float((one - separate).abs().max()) / float(separate.abs().max()) for one in found)
    return packed, crossed


def _logits(tiny: PreTrainedModel, ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    return tiny(input_ids=ids, use_cache=False, **more).logits.float()
