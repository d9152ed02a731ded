"""The language-model loss of the assembled student, and of its teacher, within a distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.sources import Batch
from ..distillation.distil import Distilling


def language_model_losses(training: Distilling, models: Sequence[Any], batches: Sequence[Batch]) -> list[float]:
    """The mean loss per predicted token of each of ``models``, which ``training`` holds, dropout off.

    ``batches``: ``input_ids`` (sequences, length).  Raises what ``Distilling.evaluation`` does.
    """
    found = []
    device = training.device.torch_device
    with training.evaluation():
        for model in models:
            was_training = model.training
            model.eval()
            total, num_sequences = 0.0, 0
            for batch in batches:
                tokens = batch["input_ids"].to(device)
                total += model(input_ids=tokens, labels=tokens).loss.item() * len(tokens)
                num_sequences += len(tokens)
            model.train(was_training)
            found.append(total / num_sequences)
    return found
