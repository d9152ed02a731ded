"""From a model's configuration to a Workload, without weights: the model is built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ..shared.errors import WorkloadError
from ..shared.uncollected import uncollected
from ..shared.workload import Workload
from .configurations import build_model, quiet, training_dtype
from .tracing import trace

_MAX_TOKENS: Final = 2**40


@uncollected()
def workload_of_configuration(
    configuration: Mapping[str, Any],
    *,
    name: str,
    batch_size: int,
    sequence_length: int,
    dtype: str | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Workload:
    """The workload of full training of the model that a Hugging Face ``config.json`` describes.

    ``dtype`` overrides the configuration's; without either, float32.  Batches are unpadded.  Raises WorkloadError
    if transformers is missing, refuses the configuration, or the shape makes no sense for the model.
    """
    if batch_size < 1 or sequence_length < 1 or batch_size * sequence_length > _MAX_TOKENS:
        raise WorkloadError(
            f"a batch of {batch_size} x {sequence_length} tokens cannot be traced; both must be positive and their "
            f"product at most 2**40."
        )
    model = build_model(configuration, name, training_dtype(configuration, dtype))
    limit = getattr(model.config, "max_position_embeddings", None)
    has_learned_positions = model.config.model_type in ("gpt2", "bert", "opt", "gpt_neo")
    if has_learned_positions and limit is not None and sequence_length > limit:
        raise WorkloadError(
            f"{name} has learned positions for {limit} tokens but sequence_length is {sequence_length}. Lower it."
        )
    with quiet():
        return trace(model, _batch(model, batch_size, sequence_length), name=name, on_progress=on_progress)


def _batch(model: Any, batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
    tokens = torch.empty((batch_size, sequence_length), dtype=torch.long, device="meta")
    return {"input_ids": tokens, "labels": tokens.clone()}
