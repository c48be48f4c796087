"""Compute the causal language modelling loss without ever holding all logits: the head runs on chunks of tokens.

The body runs once. Then the model's own forward runs for each chunk, with the body replaced by a module that returns
the chunk's hidden states, so what an architecture does after its head (soft-capping, scaling) is transformers' code.
With several chunks each is recomputed in the backward, so only one chunk's logits exist at a time.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from offload_trainer.common.errors import UserError
from offload_trainer.optim.cross_entropy import IGNORED, cross_entropy
from offload_trainer.plan.shape import loss_pieces


class _Given(nn.Module):
    """A stand-in for a model's body that returns hidden states computed earlier.

    Attributes are read from the real body (a scale); modules that the head calls (a decoder) are replaced as well.
    """

    def __init__(self, output: Any, body: nn.Module | None) -> None:
        super().__init__()
        self.output = output
        self._instead_of = (body,)  # the tuple keeps it from being registered as a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_instead_of"][0], name)
        return self if isinstance(value, nn.Module) else value


def body_of(model: PreTrainedModel) -> str | None:
    """Return the attribute that holds the model without its head (the only inner model, if not named), or None."""
    if model.get_output_embeddings() is None:
        return None
    if model.base_model_prefix in model._modules:
        return model.base_model_prefix
    inside = [name for name, module in model._modules.items() if isinstance(module, PreTrainedModel)]
    return inside[0] if len(inside) == 1 else None


def head_needs_only_hidden_states(model: PreTrainedModel) -> bool:
    """Return whether the head of `model` (on the meta device) needs only the last hidden states, if that is known."""
    if body_of(model) is None:
        return False
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    with torch.no_grad():
        try:
            CausalLoss(model, chunk=4)(ids, ids, None, 8)
        except Exception:  # raised by transformers' code, or because meta tensors have no values
            with suppress(Exception):
                model(input_ids=ids, use_cache=False)
                return False
    return True


def adds_router_loss(model: PreTrainedModel) -> bool:
    """Return whether the configuration adds the routers' auxiliary loss (`output_router_logits`)."""
    return any(getattr(c, "output_router_logits", False) for c in (model.config, model.config.get_text_config()))


class CausalLoss(nn.Module):
    """A causal language model whose forward returns its mean loss as an fp32 scalar.

    The result equals the mean cross-entropy of ``model(inputs).logits.float()`` over the targets that count, or 0 if
    none counts. The routers' auxiliary loss is added if the configuration asks for it, as transformers adds it.

    Forward args:
        inputs: int64 [rows, seq_len].
        targets: int64 [rows, seq_len], the next tokens; -100 marks targets that do not count.
        seed: seed all of torch's generators first, so that earlier draws do not influence this forward.
        count: the number of targets that count. Without it they are counted here, which waits for a GPU.
        positions: int64 [rows, seq_len]; they restart at each document of a packed row, and attention does not cross
            from one document to the next (packing.py).
    """

    def __init__(self, model: PreTrainedModel, *, chunk: int, whole: bool = False) -> None:
        """Wrap `model`. `chunk` is in tokens; `whole` computes all logits together, for a head that needs more."""
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
        return self.of(self.run(inputs, positions, seed=seed), targets, count)

    def of(self, output: Any, targets: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """Return the mean loss of what `run` returned."""
        flat = targets.flatten()
        count = max(1, int((flat != IGNORED).sum()) if count is None else count)
        if self.whole:
            loss = cross_entropy(output.logits.flatten(0, 1), flat) / count
            return loss + output.loss if self._adds else loss
        loss = self._in_chunks(type(output), output.last_hidden_state.flatten(0, 1), flat) / count
        return loss + self._added(output) if self._adds else loss

    def run(self, inputs: torch.Tensor, positions: torch.Tensor | None = None, *, seed: int | None = None) -> Any:
        """Return the body's output, or the whole model's with the auxiliary loss in place of its loss."""
        if seed is not None:
            torch.manual_seed(seed)  # a recomputation restores the generators' state of the first computation
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
        # Reentrant checkpointing would deliver the head's gradient once per chunk. The non-reentrant one is safe with
        # streamed weights, because nothing else is fetched between a chunk's recomputation and its backward.
        for part, wanted in pieces:
            total = total + checkpoint(self.summed, kind, part, wanted, use_reentrant=False)
        return total

    def summed(
        self, kind: type, hidden: torch.Tensor, targets: torch.Tensor, *, gpu: bool | None = None
    ) -> torch.Tensor:
        """Return the summed loss of one chunk: `hidden` is [tokens, hidden], `targets` is [tokens].

        It is computed in the pieces of a GPU or of a CPU; by default of the device that has `hidden`.
        """
        logits, gpu = self._logits(kind, hidden), hidden.device.type != "cpu" if gpu is None else gpu
        return cross_entropy(logits, targets, pieces=loss_pieces(logits.shape[1], chunk=self.chunk, gpu=gpu))

    def _logits(self, kind: type, hidden: torch.Tensor) -> torch.Tensor:
        ids = hidden.new_zeros((), dtype=torch.int64).expand(1, len(hidden))  # heads read only its length
        with self._instead(kind(last_hidden_state=hidden[None])):
            # Use `forward` instead of a call, because hooks on the whole model belong to the pass through the body.
            return self.model.forward(input_ids=ids, use_cache=False).logits[0]

    def _added(self, output: Any) -> torch.Tensor:
        """Return what the model's forward adds, for one token, to the cross-entropy: the routers' loss, weighted."""
        one = output.last_hidden_state[:1, :1]
        ids = torch.zeros((1, 1), dtype=torch.int64, device=one.device)
        given = type(output)(last_hidden_state=one, router_logits=output.router_logits)
        with self._instead(given), self._without_cross_entropy(one.device):
            return self.model.forward(input_ids=ids, labels=ids, use_cache=False).loss

    @contextmanager
    def _without_cross_entropy(self, device: torch.device) -> Iterator[None]:
        """Make transformers' forward use 0 as the cross-entropy."""
        before = self.model.loss_function
        self.model.loss_function = lambda *_, **__: torch.zeros((), dtype=torch.float32, device=device)
        try:
            yield
        finally:
            self.model.loss_function = before

    def _instead(self, output: Any) -> AbstractContextManager[object]:
        """Make the body return `output` for any input."""
        modules = self.model._modules
        return patch.dict(modules, {self._body: _Given(output, modules[self._body])})
