"""How well teacher and student predict text: the language-model losses of both, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
from torch import nn

from ...shared.basics.errors import WorkloadError
from .distil import Distilling

_IGNORED = -100
"""The label of a token that does not count, as in transformers."""


@dataclass(frozen=True, slots=True)
class ValidationLosses:
    """Mean negative log-likelihood of the next token, in nats."""

    teacher: float
    student: float

    @property
    def perplexities(self) -> tuple[float, float]:
        """The teacher's and the student's."""
        return exp(self.teacher), exp(self.student)


@dataclass(slots=True)
class _Sum:
    """Of one model."""

    nats: float = 0.0
    num_tokens: int = 0

    def mean(self) -> float:
        if not self.num_tokens:
            raise WorkloadError("the batches hold no token to predict: each sample needs two tokens or more.")
        return self.nats / self.num_tokens


def validation_losses(training: Distilling, batches: Iterable[Mapping[str, Any]]) -> ValidationLosses:
    """The language-model losses of the whole teacher and of the whole student, over all tokens of ``batches``.

    Each batch has ``input_ids`` (batch, tokens) and whatever else the models take; ``labels``, where there are some,
    say which tokens are to be predicted (-100: not this one), else ``attention_mask`` does.  Both models run in
    evaluation mode; afterwards their modes are what they were.  To be called between step() and the next forward; of
    the logits of one sample at a time a float32 copy is made.  Raises WorkloadError if there is nothing to predict or a
    model gives no logits, and otherwise what ``training.evaluation`` raises.
    """
    sums = _Sum(), _Sum()
    models = training.teacher, training.student
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        with training.evaluation():
            for model in models:
                model.eval()
            for batch in batches:
                for model, found in zip(models, sums, strict=True):
                    _add(found, model, batch)
    finally:
        for module, is_training in modes:
            module.training = is_training
    return ValidationLosses(sums[0].mean(), sums[1].mean())


def language_model_loss(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> float:
    """The loss of one model that is nobody's, as ``validation_losses`` has it.  The mode is the caller's."""
    found = _Sum()
    with torch.no_grad():
        for batch in batches:
            _add(found, model, batch)
    return found.mean()


def _add(found: _Sum, model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Add what ``model`` makes of one batch.

    By the sample: the float32 copies of all logits would be more than the model's blocks ever hold.
    """
    given = {name: value for name, value in batch.items() if name != "labels"}
    output = model(**given)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
        raise WorkloadError(
            f"{type(model).__name__} gives no logits (batch, tokens, vocabulary). Validate models with their "
            f"language-model head (AutoModelForCausalLM)."
        )
    labels = _labels(batch).to(logits.device)
    for of_sample, wanted in zip(logits, labels, strict=True):
        nats = nn.functional.cross_entropy(of_sample[:-1].float(), wanted[1:], ignore_index=_IGNORED, reduction="sum")
        found.nats += nats.item()
        found.num_tokens += int((wanted[1:] != _IGNORED).sum())


def _labels(batch: Mapping[str, Any]) -> torch.Tensor:
    """(batch, tokens) what is to be predicted."""
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor):
        return labels
    tokens = batch["input_ids"]
    assert isinstance(tokens, torch.Tensor)
    mask = batch.get("attention_mask")
    return tokens if mask is None else tokens.masked_fill(mask == 0, _IGNORED)
