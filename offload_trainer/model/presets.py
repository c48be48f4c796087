"""Model presets: GPT-2 shapes with random weights, whose sizes and activations are computed in closed form.

OpenAI's pretrained weights have a hub id (``openai-community/gpt2``). Dropout is off: no token is seen often enough.
"""

import difflib
import math
from pathlib import Path
from typing import Any

from offload_trainer.config import ModelSection
from offload_trainer.errors import UserError
from offload_trainer.plan.shape import Activations, Growth, ModelShape, Part, Weight, loss_peak, loss_pieces, pruned

_CHUNK: int = ModelSection.model_fields["loss_chunk"].default


def _gpt2(layers: int, hidden: int, heads: int, *, vocabulary: int = 50304, context: int = 1024) -> dict[str, Any]:
    """Return keys of transformers' GPT2Config. 50304 is GPT-2's 50257 tokens rounded up to a multiple of 128.

    The initial standard deviation is 0.25 / sqrt(hidden), at most GPT-2's 0.02. With 0.02 the tied head of a wide model
    starts with a high loss: two layers of width 768, 1600 and 4096 start at 10.956, 11.106 and 11.600, where guessing
    gives 10.826; with the smaller deviation they start at most 0.06 above. GPT-3's and OPT's largest models use 0.006.
    """
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": vocabulary,
        "n_positions": context,
        "initializer_range": round(min(0.02, 0.25 / math.sqrt(hidden)), 5),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "gpt2-mini": _gpt2(6, 256, 8, vocabulary=2048, context=256),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-10b": _gpt2(50, 4096, 32),
}


def gpt2_shape(config: dict[str, Any], *, item_bytes: int = 2, chunk: int = _CHUNK) -> ModelShape:
    """Return the shape of transformers' tied GPT2LMHeadModel, with activations of `item_bytes` a number."""
    hidden, layers = config["n_embd"], config["n_layer"]
    modules: dict[str, tuple[int, ...]] = {
        "ln_1": (hidden,),
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "ln_2": (hidden,),
        "mlp.c_fc": (hidden, 4 * hidden),
        "mlp.c_proj": (4 * hidden, hidden),
    }
    block = {f"{name}.{leaf}": size for name, s in modules.items() for leaf, size in (("weight", s), ("bias", s[-1:]))}
    weights = [
        Weight("transformer.wte.weight", (config["vocab_size"], hidden), unit="transformer.wte", uses=2),
        Weight("transformer.wpe.weight", (config["n_positions"], hidden), unit="transformer.wpe", products=0.0),
    ]
    for layer in range(layers):
        unit = f"transformer.h.{layer}"
        weights += [
            Weight(f"{unit}.{name}", shape, unit=unit, block=True, products=float(len(shape) > 1))
            for name, shape in block.items()
        ]
    unit = "transformer.ln_f"
    weights += [Weight(f"{unit}.{name}", (hidden,), unit=unit, products=0.0) for name in ("weight", "bias")]
    return ModelShape(
        weights=tuple(weights),
        layers=layers,
        hidden=hidden,
        vocabulary=config["vocab_size"],
        context=config["n_positions"],
        attention=(2 * hidden,) * layers,
        heads=config["n_head"],
        key_heads=config["n_head"],
        on_gpu=gpt2_activations(config, item_bytes=item_bytes, chunk=chunk, gpu=True),
        on_cpu=gpt2_activations(config, item_bytes=item_bytes, chunk=chunk, gpu=False),
        can_checkpoint_some=True,
    )


def gpt2_activations(config: dict[str, Any], *, item_bytes: int, chunk: int, gpu: bool) -> Activations:
    """Return what `model/activations.py` would count, in closed form: without dropout, with fused attention.

    The eager `gelu_new` keeps most of it: in total 28 hidden states per token and block.
    """
    e, hidden, vocabulary = item_bytes, config["n_embd"], config["vocab_size"]
    states = e * hidden
    numbers = 4 * config["n_head"] + 16  # fp32: attention's logarithms, means and deviations of two norms
    kept = 28 * states + numbers
    block = Part(
        kept=Growth(token=kept),
        forward=(Growth(token=kept + 2 * states),),
        backward=pruned(
            [
                Growth(fixed=4 * states * (hidden + 1), position=-states, token=12 * states + numbers),
                Growth(fixed=states * (4 * hidden + 1), position=-states, token=31 * states + numbers),
                Growth(position=-states, token=35 * states + numbers),
            ]
        ),
    )
    norm = Part(
        kept=Growth(position=-states, token=8 - states),
        forward=(Growth(token=states + 8),),
        backward=(Growth(fixed=2 * states, position=-states, token=states + 8),),
    )
    # `optim/cross_entropy.py`: logits, pieces in fp32, and each target's column and log-softmax
    pieces = loss_pieces(vocabulary, chunk=chunk, gpu=gpu)
    logits, piece = e * vocabulary, 4 * vocabulary / pieces
    looked_up = piece + 8 + 4 if e == 4 else 2 * piece + 8 + 4 * (1 - 1 / pieces)
    head = Part(
        kept=Growth(token=logits),
        forward=(Growth(token=logits + looked_up),),
        backward=pruned(
            [
                Growth(fixed=states * vocabulary, token=logits + states),
                Growth(token=loss_peak(vocabulary, e, pieces=pieces) + 12),
            ]
        ),
    )
    return Activations(
        before=Growth(position=states + 8, token=2 * states),
        kinds=(block,),
        blocks=(0,) * config["n_layer"],
        hidden=Growth(token=states),
        norm=norm,
        head=head,
        embedding=pruned(
            [
                Growth(fixed=states * vocabulary, position=8, token=2 * states),
                Growth(fixed=states * config["n_positions"], position=states + 8, token=2 * states),
            ]
        ),
    )


def local_directory(name: str) -> Path | None:
    """Return the directory that `model.name` names; None for a preset or hub id. Raises UserError for other names."""
    path = Path(name).expanduser()
    if name in PRESETS:
        return None
    if path.is_dir():
        if not (path / "config.json").exists():
            raise UserError(f"{path}: not a model directory: it has no config.json")
        return path
    if "/" not in name or name.startswith((".", "/", "~")):
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(
            f"--model {name}: neither a preset ({', '.join(PRESETS)}), nor a directory, "
            f"nor a hub id such as openai-community/gpt2{hint}"
        )
    return None
