"""The training loss without the logits: hidden states go through the head a chunk at a time.

Logits of 50,000 tokens in fp32 take 200 kB a position, more than all else in a small batch. The body runs once;
then, chunk by chunk, the model's own forward runs with the body replaced by one that returns the chunk's hidden
states, so whatever an architecture does behind its head (soft-capping, scaling) happens as transformers wrote it.
With more than one chunk each is recomputed in the backward, so one chunk's logits are all that ever exist.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from offload_trainer.errors import UserError

_IGNORED = -100  # torch's and transformers' number for a target that is not counted
_LENGTHS = 64  # tokens; lengths that `next_logits` computes are multiples of it


class _Given(nn.Module):
    """Stands in for a model's body: returns hidden states that were computed before.

    What a head reads of the body is the body's (a scale); what it calls of it (a decoder) stands in for it too.
    """

    def __init__(self, output: Any, body: nn.Module | None) -> None:
        super().__init__()
        self.output = output
        self._instead_of = (body,)  # no module of this one: it is not to be found among its parts

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_instead_of"][0], name)
        return self if isinstance(value, nn.Module) else value


class CausalLoss(nn.Module):
    """A causal language model whose forward is its mean loss: (inputs, targets, seed, count) -> fp32 scalar.

    inputs, targets: int64 [rows, seq_len], targets the next tokens, or -100 where none is counted. Equals the mean
    cross-entropy of ``model(inputs).logits.float()`` against the `count` targets that are; 0 where none is. They are
    counted here where the caller does not say how many, and a GPU is then waited for. `seed`, where given, is that of
    torch's generators on every device from here on: what was drawn before, in an evaluation or another micro-batch,
    does not matter.
    """

    def __init__(self, model: PreTrainedModel, *, chunk: int) -> None:
        super().__init__()
        body = model.base_model_prefix
        if body not in model._modules or model.get_output_embeddings() is None:
            raise UserError(f"{type(model).__name__} has no body and head to take apart; it cannot be trained here")
        if getattr(model.config, "output_router_logits", False):
            raise UserError(
                "output_router_logits=true adds a router loss that is not trained here: "
                "use model.overrides.output_router_logits=false"
            )
        self.model = model
        self.chunk = chunk
        self._body = body

    def forward(
        self, inputs: torch.Tensor, targets: torch.Tensor, seed: int | None = None, count: int | None = None
    ) -> torch.Tensor:
        if seed is not None:
            torch.manual_seed(seed)  # recomputation restores the state that its first time began with
        output = self.model._modules[self._body](input_ids=inputs, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1)
        flat = targets.flatten()
        pieces = list(zip(hidden.split(self.chunk), flat.split(self.chunk), strict=True))
        kind = type(output)
        count = max(1, int((flat != _IGNORED).sum()) if count is None else count)
        if len(pieces) == 1:
            return self._summed(kind, hidden, flat) / count
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # The reentrant variant would hand over the head's gradient once a chunk; the other is safe also where weights
        # are fetched for each module, since between a chunk's recomputation and its backward nothing else is fetched.
        for part, wanted in pieces:
            total = total + checkpoint(self._summed, kind, part, wanted, use_reentrant=False)
        return total / count

    def _summed(self, kind: type, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Summed loss of one chunk: hidden [tokens, hidden], targets [tokens], of which -100 adds nothing."""
        return functional.cross_entropy(self._logits(kind, hidden).float(), targets, reduction="sum")

    def _logits(self, kind: type, hidden: torch.Tensor) -> torch.Tensor:
        body = self.model._modules[self._body]
        self.model._modules[self._body] = _Given(kind(last_hidden_state=hidden[None]), body)
        ids = hidden.new_zeros((), dtype=torch.int64).expand(1, len(hidden))  # of which heads ask the length
        try:
            # `forward`, not a call: hooks on the model as a whole belong to the pass through the body.
            return self.model.forward(input_ids=ids, use_cache=False).logits[0]
        finally:
            self.model._modules[self._body] = body

    def next_logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits of the token after the last: int64 [rows, length] -> [rows, vocabulary].

        What is appended does not reach the last token. It is there so that a text that grows has few lengths: the
        products of each leave code and buffers behind on a CPU, 2 MB a length for a model of 5 M parameters with AMX.
        """
        last = inputs.shape[1] - 1
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or _LENGTHS
        length = max(last + 1, min(-(-(last + 1) // _LENGTHS) * _LENGTHS, context))
        padded = functional.pad(inputs, (0, length - last - 1))
        output = self.model._modules[self._body](input_ids=padded, use_cache=False)
        return self._logits(type(output), output.last_hidden_state[:, last])
