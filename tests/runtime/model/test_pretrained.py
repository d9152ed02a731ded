"""Weights of a folder come into a model that is about to be trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protwin.runtime.model.pretrained import load_pretrained
from tests.runtime.small_language import make_folder


@pytest.mark.parametrize("shard_size", ["5GB", "40KB"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_weight_is_the_files_and_the_model_is_in_training(tmp_path: Path, shard_size: str, is_tied: bool) -> None:
    """transformers gives models in evaluation, whose dropout would be off."""
    folder = make_folder(tmp_path / "base", shard_size=shard_size, tie_word_embeddings=is_tied, attention_dropout=0.1)
    configuration = json.loads((folder / "config.json").read_text())
    model = load_pretrained(folder, configuration, "base", torch.float32, is_converting=False)
    assert all(module.training for module in model.modules())
    files = list(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (shard_size == "40KB")
    saved = {name: tensor for path in files for name, tensor in load_file(path).items()}
    own = dict(model.named_parameters())
    assert saved.keys() == own.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in saved.items())
