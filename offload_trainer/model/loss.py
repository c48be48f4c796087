"""The training loss without the logits: hidden states go through the head a chunk at a time.

Logits of 50,000 tokens in fp32 take 200 kB a position, more than all else in a small batch. The body runs once;
then, chunk by chunk, the model's own forward runs with the body replaced by one that returns the chunk's hidden
states, so whatever an architecture does behind its head (soft-capping, scaling) happens as transformers wrote it.
With more than one chunk each is recomputed in the backward, so one chunk's logits are all that ever exist. Where a head
wants more of the body than its last hidden states, the model runs as it is, with all of its logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


def body_of(model: PreTrainedModel) -> str | None:
    """The attribute that holds the model without its head: by transformers' name, else its one model inside.

    None where there is none, or no head beside it.
    """
    if model.get_output_embeddings() is None:
        return None
    if model.base_model_prefix in model._modules:
        return model.base_model_prefix
    inside = [name for name, module in model._modules.items() if isinstance(module, PreTrainedModel)]
    return inside[0] if len(inside) == 1 else None


def comes_apart(model: PreTrainedModel) -> bool:
    """Whether the head's part of `model` (without memory) runs on last hidden states alone.

    Some heads read more of the body's output. A model that does not run without values is taken to come apart.
    """
    if body_of(model) is None:
        return False
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    with torch.no_grad():
        try:
            CausalLoss(model, chunk=4)(ids, ids, None, 8)
        except Exception:  # of transformers' code, or since there are no values
            try:
                model(input_ids=ids, use_cache=False)
            except Exception:
                return True
            return False
    return True


def adds_router_loss(model: PreTrainedModel) -> bool:
    """Whether the configuration asks for the routers' logits, of which architectures with experts make a loss."""
    return any(getattr(c, "output_router_logits", False) for c in (model.config, model.config.get_text_config()))


class CausalLoss(nn.Module):
    """A causal language model whose forward is its mean loss: (inputs, targets, seed, count, positions) -> fp32 scalar.

    inputs, targets: int64 [rows, seq_len], targets the next tokens, or -100 where none is counted. Equals the mean
    cross-entropy of ``model(inputs).logits.float()`` against the `count` targets that are; 0 where none is. They are
    counted here where the caller does not say how many, and a GPU is then waited for. `seed`, where given, is that of
    torch's generators on every device from here on: what was drawn before, in an evaluation or another micro-batch,
    does not matter. `positions` (int64 [rows, seq_len]), where given, begin anew with each of the documents that a row
    holds, which then do not see each other (packed.py). Where the configuration asks for the routers' loss, it is added
    as transformers adds it.
    """

    def __init__(self, model: PreTrainedModel, *, chunk: int, whole: bool = False) -> None:
        """`whole`: the logits of all tokens at once, for a model that does not come apart."""
        super().__init__()
        if getattr(model.config, "z_loss_coefficient", None):
            raise UserError("z_loss_coefficient adds a loss of the logits' size that is not trained here: set it to 0")
        self.model = model
        self.chunk = chunk
        self.whole = whole
        self._body = "" if whole else body_of(model) or ""
        assert whole or self._body, type(model)
        self._adds = adds_router_loss(model)

    def forward(
        self,
        inputs: torch.Tensor,
        targets: torch.Tensor,
        seed: int | None = None,
        count: int | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if seed is not None:
            torch.manual_seed(seed)  # recomputation restores the state that its first time began with
        flat = targets.flatten()
        count = max(1, int((flat != _IGNORED).sum()) if count is None else count)
        output = self.run(inputs, positions)
        if self.whole:
            loss = cross_entropy(output.logits.flatten(0, 1).float(), flat) / count
            return loss + output.loss if self._adds else loss
        loss = self._in_chunks(type(output), output.last_hidden_state.flatten(0, 1), flat) / count
        return loss + self._added(output) if self._adds else loss

    def run(self, inputs: torch.Tensor, positions: torch.Tensor | None = None) -> Any:
        """The body's output, or the whole model's, with what it adds to the loss in the place of its loss."""
        given = {} if positions is None else {"position_ids": positions}
        if not self.whole:
            return self.model._modules[self._body](input_ids=inputs, use_cache=False, **given)
        if not self._adds:
            return self.model(input_ids=inputs, use_cache=False, **given)
        with self._without_cross_entropy(inputs.device):
            return self.model(input_ids=inputs, labels=inputs, use_cache=False, **given)

    def _in_chunks(self, kind: type, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        pieces = list(zip(hidden.split(self.chunk), targets.split(self.chunk), strict=True))
        if len(pieces) == 1:
            return self.summed(kind, hidden, targets)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # The reentrant variant would hand over the head's gradient once a chunk; the other is safe also where weights
        # are fetched for each module, since between a chunk's recomputation and its backward nothing else is fetched.
        for part, wanted in pieces:
            total = total + checkpoint(self.summed, kind, part, wanted, use_reentrant=False)
        return total

    def summed(self, kind: type, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Summed loss of one chunk: hidden [tokens, hidden] of a body's output of this kind, targets [tokens]."""
        return cross_entropy(self._logits(kind, hidden).float(), targets)  # nothing holds the 16-bit logits any more

    def _logits(self, kind: type, hidden: torch.Tensor) -> torch.Tensor:
        ids = hidden.new_zeros((), dtype=torch.int64).expand(1, len(hidden))  # of which heads ask the length
        with self._instead(kind(last_hidden_state=hidden[None])):
            # `forward`, not a call: hooks on the model as a whole belong to the pass through the body.
            return self.model.forward(input_ids=ids, use_cache=False).logits[0]

    def _added(self, output: Any) -> torch.Tensor:
        """What the model's own forward adds to the cross-entropy: the routers' loss, times its coefficient.

        That forward is given labels and the body's output, of which the head sees one token.
        """
        one = output.last_hidden_state[:1, :1]
        ids = torch.zeros((1, 1), dtype=torch.int64, device=one.device)
        given = type(output)(last_hidden_state=one, router_logits=output.router_logits)
        with self._instead(given), self._without_cross_entropy(one.device):
            return self.model.forward(input_ids=ids, labels=ids, use_cache=False).loss

    @contextmanager
    def _without_cross_entropy(self, device: torch.device) -> Iterator[None]:
        """transformers' forward takes the cross-entropy for 0."""
        before = self.model.loss_function
        self.model.loss_function = lambda *_, **__: torch.zeros((), dtype=torch.float32, device=device)
        try:
            yield
        finally:
            self.model.loss_function = before

    @contextmanager
    def _instead(self, output: Any) -> Iterator[None]:
        """The body gives this, whatever it is given."""
        body = self.model._modules[self._body]
        self.model._modules[self._body] = _Given(output, body)
        try:
            yield
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
        output = self.run(functional.pad(inputs, (0, length - last - 1)))
        if self.whole:
            return output.logits[:, last]
        return self._logits(type(output), output.last_hidden_state[:, last])


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed over the targets that are counted: fp32 logits [tokens, vocabulary], targets [tokens]."""
    return functional.cross_entropy(logits, targets, reduction="sum")
