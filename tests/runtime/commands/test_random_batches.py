"""Batches that are made up for a model do not depend on whether it has weights already."""

from __future__ import annotations

import pytest
import torch

from protwin.runtime.commands.random_batches import random_batches
from protwin.runtime.data.byte_text import read_text
from protwin.runtime.model.configurations import build_model
from tests.runtime.modalities import MODALITIES


@pytest.mark.parametrize("name", ["whisper", "wav2vec2", "idefics3"])
def test_a_model_with_weights_is_given_what_one_without_is_given(name: str) -> None:
    config, length, _ = MODALITIES[name]
    made = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model = build_model(config, name, torch.float32, device=device)
        before = [p.clone() for p in model.parameters()]
        (batch,) = random_batches(
            model, read_text(None), name=name, batch_size=2, sequence_length=length, num_batches=1
        )
        made.append(batch)
        assert all(device == "meta" or torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(made[0][key], made[1][key]) for key in made[0] if isinstance(made[0][key], torch.Tensor))
