"""The language-model loss of the assembled student, and of its teacher, within a distillation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.sources import Batch
from ..distillation.distil import Distilling
from ..distillation.validation import language_model_loss


def language_model_losses(training: Distilling, models: Sequence[Any], batches: Sequence[Batch]) -> list[float]:
    """The mean loss per predicted token of each of ``models``, which ``training`` holds, dropout off.

    The teacher, whose loss never changes, need not be asked each time, as ``validation_losses`` does.  ``batches``:
    ``input_ids`` (sequences, length).  Raises what ``Distilling.evaluation`` does.
    """
    found, device = [], training.device.torch_device
    with training.evaluation():
        for model in models:
            was_training = model.training
            model.eval()
            on_device = ({"input_ids": batch["input_ids"].to(device)} for batch in batches)
            found.append(language_model_loss(model, on_device))
            model.train(was_training)
    return found
