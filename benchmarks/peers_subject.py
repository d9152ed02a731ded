"""What every contestant of the peers' bench trains: one model, one stream of batches, one kind of optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, Final

import torch

from protwin.calibration.demos.demo import CONFIGURATION
from protwin.runtime.data.byte_text import byte_batches, python_reference
from protwin.runtime.model.configurations import build_model

MODEL_NAME: Final = "llama"
BATCH_SIZE: Final = 2
SEQUENCE_LENGTH: Final = 128
LEARNING_RATE: Final = 1e-3
WEIGHT_DECAY: Final = 1e-2
OURS_TOGETHER: Final = "ours-"
"""What the names of our contestants of several ranks begin with."""
LONG: Final = "long-"
"""What the names of contestants of the bench of long sequences begin with."""
BUDGETED: Final = ("dense-resident", "dense-within", "osft-resident", "osft-within")
"""Our contestants of the bench of orthogonal subspace fine-tuning."""
_SEED: Final = 0
_BATCHES_AT_ONCE: Final = 64


def make_model() -> Any:
    """The model with the same random weights in every process, without a cache that training has no use for."""
    torch.manual_seed(_SEED)
    model = build_model(CONFIGURATION, MODEL_NAME, torch.float32, device="cpu")
    model.config.use_cache = False
    return model


def make_batches(rank: int = 0, num_ranks: int = 1) -> Iterator[dict[str, torch.Tensor]]:
    """Batches without end; each rank gets its share of the rows, so that all ranks together see the whole batch.

    Raises ValueError if the rows cannot be shared evenly: the mean of the ranks' losses would be another loss.
    """
    if BATCH_SIZE % num_ranks:
        raise ValueError(f"{BATCH_SIZE} rows cannot be shared evenly by {num_ranks} ranks.")
    text = python_reference()
    for seed in count(_SEED):
        for batch in byte_batches(
            text, batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH, num_batches=_BATCHES_AT_ONCE, seed=seed
        ):
            yield {name: rows[rank::num_ranks] for name, rows in batch.items()}
