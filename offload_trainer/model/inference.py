"""Text generation with saved weights on the CPU, which are all set in an empty model or read as modules are called."""

import copy
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, LogitsProcessorList, TextStreamer
from transformers.initialization import no_init_weights

from offload_trainer.common.errors import TrainerError
from offload_trainer.model.images import auto_class
from offload_trainer.model.init_weights import parameters_without_memory, without_values
from offload_trainer.model.pretrained import config_in

_LIKELIEST = 50  # top_k for sampling


def generate(
    model: Any, tokenizer: Any, ids: list[int], *, tokens: int, temperature: float, seed: int, show: bool = False
) -> list[int]:
    """Return at most `tokens` ids that continue `ids`, stopping at the end of the text.

    The same seed gives the same ids. `temperature` 0 always takes the most likely token. `show` prints tokens at once.
    Ids that the tokenizer does not have are not taken. Raises TrainerError if the model's logits are not finite.
    """

    def known(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(scores).any() or torch.isnan(scores).any():
            raise TrainerError("the model's logits are not numbers: its weights cannot be used, or were not all read")
        scores[:, len(tokenizer) :] = -torch.inf
        return scores

    config = copy.deepcopy(model.generation_config)
    drawn = {"temperature": temperature, "top_k": _LIKELIEST, "top_p": 1.0} if temperature else {}
    config.update(max_new_tokens=tokens, max_length=None, do_sample=bool(drawn), **drawn)
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.eos_token_id
    given = torch.tensor([ids])
    torch.manual_seed(seed)
    with torch.no_grad():
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            generation_config=config,
            logits_processor=LogitsProcessorList([known]),
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if show else None,
        )
    return found[0, len(ids) :].tolist()


def empty_model(directory: Path) -> Any:
    """Build a directory's model: NaN parameters without memory, tied ones the same, and transformers' buffers."""
    config = config_in(directory)
    with no_init_weights(), parameters_without_memory():
        model = auto_class(config).from_config(config, dtype=torch.float32)
    model.tie_weights()
    without_values(model, dtype=torch.float32, device=torch.device("cpu"))
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model.eval()


def read_as_called(model: nn.Module, names: Container[str], read: Callable[[str], torch.Tensor]) -> None:
    """Read each module's weights before its call, a tied one by its name in `names`, and release them afterwards."""
    name_of = {weight: name for name, weight in model.named_parameters(remove_duplicate=False) if name in names}

    def fetch(module: nn.Module, _: Any) -> None:
        for weight in module.parameters(recurse=False):
            weight.data = read(name_of[weight]).float()

    def release(module: nn.Module, *_: Any) -> None:
        for weight in module.parameters(recurse=False):
            weight.data = torch.full((), torch.nan).expand(weight.shape)

    for module in model.modules():
        module.register_forward_pre_hook(fetch)
        module.register_forward_hook(release, always_call=True)
